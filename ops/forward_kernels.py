"""The forward kernel of the norm.

Variants are constexpr flags and absent pointers: `None` is constexpr, so `if p_x1 is not None` costs nothing at run time.
Names: `p_` pointer, `b_` block in registers, `m_` mask. All arithmetic is fp32.
"""

import triton
import triton.language as tl

from .conversion_kernels import narrow, rounded
from .dropout_kernels import drop_block
from .row_kernels import (
    add_pairs,
    block_cols,
    block_count,
    block_mask,
    block_start,
    collect,
    gather,
    inside,
    load_row,
    load_vector_block,
    narrow_row,
    publish,
    reopen,
    row_sum,
    store_row,
    tile_rows,
    valid,
    widen_row,
)


# A new batch size or dropout probability must not compile anything; nor must the next seed of a vector, every other of
# which lies on a 16-byte boundary.
@triton.jit(do_not_specialize=["M", "tiles", "threshold"], do_not_specialize_on_alignment=["p_seed"])
def norm_forward_kernel(
    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, p_seed,
    p_y, p_y1, p_r, p_stats, p_mask, p_mask1, p_board,
    M, N, tiles, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r,
    eps, threshold, scale,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, SLICES: tl.constexpr, SLICES_POW2: tl.constexpr,
    LONG: tl.constexpr, LOOPED: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    PERSISTENT: tl.constexpr, HOLD: tl.constexpr, EARLY: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr,
    IN_PLACE: tl.constexpr, RESIDUAL_DTYPE: tl.constexpr, IS_RMS: tl.constexpr, DROPOUT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Programs, each striding over tiles of ROWS rows, of

        z = dropout(x · rowscale) + dropout(x1 · rowscale1) + residual;   r = round(z)
        x̂ = (r − mean(r)) · rstd(r)  or  r · rstd(r);   y = x̂ · (weight + OFFSET) + bias;   y1 likewise with weight1, bias1

    p_stats: fp32 [1, M] rstd for RMSNorm, [2, M] rstd and mean for LayerNorm.
    PACKED: between its statistics and its output a row waits in RESIDUAL_DTYPE, in half the registers of fp32.
    IN_PLACE: p_r is p_residual.
    p_board: where the SLICES programs that share a row exchange their sums; see `publish`.
    """
    slice_id = tl.program_id(0) % SLICES
    group = tl.program_id(0) // SLICES
    groups = tl.num_programs(0) // SLICES
    seed = 0
    if DROPOUT:
        seed = tl.load(p_seed)
    share = 1.0 / N  # of the squares; dividing them by N would hold each tile up between its sums and its output

    if not LOOPED:
        first_col = slice_id * BLOCK_N
        count = tl.minimum(BLOCK_N + TAIL_N, N - first_col).to(tl.float32)
        weights = ()
        if HOLD:
            weights = load_weights(
                p_weight, p_bias, p_weight1, p_bias1, p_y1, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, OFFSET
            )
        if SLICES > 1:
            b_held = narrow_row(load_row(None, tl.arange(0, ROWS), None, 0, 0, N, BLOCK_N, 0, True, VECTOR), RESIDUAL_DTYPE)
            for tile in tl.range(group, tiles + groups, groups, num_stages=STAGES):
                rows = tile_rows(tile, ROWS, LONG)
                m_row = rows < M
                b_r, b_mean, b_centred, b_m2 = begin_tile(
                    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, p_r, p_mask, p_mask1, rows, m_row, first_col,
                    N, stride_x, stride_x1, stride_residual, stride_r, threshold, scale, count,
                    ROWS, BLOCK_N, TAIL_N, EVEN_N, VECTOR, False, SPAN, IN_PLACE, RESIDUAL_DTYPE, IS_RMS, DROPOUT,
                )  # fmt: skip
                # From here on rows and m_row are those of the tile before, whose sums have had the time to arrive.
                publish(p_board, b_mean, b_m2, rows, m_row, slice_id, SLICES)
                b_finish = widen_row(b_held)
                b_held = narrow_row(b_r, RESIDUAL_DTYPE)
                rows -= groups * ROWS
                m_row = (rows >= 0) & (rows < M)
                b_means, b_m2s = collect(p_board, rows, m_row, SLICES, SLICES_POW2)
                b_mean, b_m2 = merge_moments(b_means, b_m2s, N, BLOCK_N, SLICES_POW2)
                b_centred = (centre(0, b_finish[0], b_mean, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, IS_RMS),)
                finish_tile(
                    p_y, p_y1, p_stats, p_weight, p_bias, p_weight1, p_bias1, weights, b_centred, b_mean,
                    tl.rsqrt(b_m2 * share + eps), rows, m_row, slice_id == 0, first_col, M, N, stride_y, stride_y1,
                    BLOCK_N, TAIL_N, EVEN_N, VECTOR, HOLD, False, IS_RMS, OFFSET,
                )  # fmt: skip
        elif PERSISTENT:
            for tile in tl.range(group, tiles, groups, num_stages=STAGES):
                whole_tile(
                    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, seed,
                    p_y, p_y1, p_r, p_stats, p_mask, p_mask1, weights, tile,
                    M, N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r, eps, threshold, scale, share,
                    ROWS, BLOCK_N, TAIL_N, LONG, EVEN_N, VECTOR, HOLD, EARLY, PACKED, SPAN, IN_PLACE,
                    RESIDUAL_DTYPE, IS_RMS, DROPOUT, OFFSET,
                )  # fmt: skip
        else:
            # Not a loop of one: that would take a quarter more registers.
            whole_tile(
                p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, seed,
                p_y, p_y1, p_r, p_stats, p_mask, p_mask1, weights, group,
                M, N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r, eps, threshold, scale, share,
                ROWS, BLOCK_N, TAIL_N, LONG, EVEN_N, VECTOR, HOLD, EARLY, PACKED, SPAN, IN_PLACE,
                RESIDUAL_DTYPE, IS_RMS, DROPOUT, OFFSET,
            )  # fmt: skip
    elif PERSISTENT:
        for tile in tl.range(group, tiles, groups, num_stages=1):
            looped_tile(
                p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, seed,
                p_y, p_y1, p_r, p_stats, p_mask, p_mask1, tile,
                M, N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r, eps, threshold, scale, share,
                ROWS, BLOCK_N, LONG, EVEN_N, VECTOR, SPAN, IN_PLACE, RESIDUAL_DTYPE, IS_RMS, DROPOUT, OFFSET,
            )  # fmt: skip
    else:
        looped_tile(
            p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, seed,
            p_y, p_y1, p_r, p_stats, p_mask, p_mask1, group,
            M, N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r, eps, threshold, scale, share,
            ROWS, BLOCK_N, LONG, EVEN_N, VECTOR, SPAN, IN_PLACE, RESIDUAL_DTYPE, IS_RMS, DROPOUT, OFFSET,
        )  # fmt: skip


@triton.jit
def whole_tile(
    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, seed,
    p_y, p_y1, p_r, p_stats, p_mask, p_mask1, weights, tile,
    M, N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r, eps, threshold, scale, share,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, LONG: tl.constexpr, EVEN_N: tl.constexpr,
    VECTOR: tl.constexpr, HOLD: tl.constexpr, EARLY: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr,
    IN_PLACE: tl.constexpr, RESIDUAL_DTYPE: tl.constexpr, IS_RMS: tl.constexpr, DROPOUT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """A tile of rows that this program has to itself."""
    rows = tile_rows(tile, ROWS, LONG)
    m_row = valid(rows, M, ROWS == 1)
    if EARLY:
        weights = load_weights(p_weight, p_bias, p_weight1, p_bias1, p_y1, 0, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, OFFSET)
    b_r, b_mean, b_centred, b_m2 = begin_tile(
        p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, p_r, p_mask, p_mask1, rows, m_row, 0,
        N, stride_x, stride_x1, stride_residual, stride_r, threshold, scale, tl.cast(N, tl.float32),  # one column is a constant
        ROWS, BLOCK_N, TAIL_N, EVEN_N, VECTOR, PACKED, SPAN, IN_PLACE, RESIDUAL_DTYPE, IS_RMS, DROPOUT,
    )  # fmt: skip
    # Always so, but it keeps the loads of weights in a loop over tiles from being prefetched with the next rows: they would
    # take shared memory from them, and all tiles find them in L1.
    if tile >= 0:
        finish_tile(
            p_y, p_y1, p_stats, p_weight, p_bias, p_weight1, p_bias1, weights, b_r if PACKED else b_centred, b_mean,
            tl.rsqrt(b_m2 * share + eps), rows, m_row, True, 0, M, N, stride_y, stride_y1,
            BLOCK_N, TAIL_N, EVEN_N, VECTOR, HOLD or EARLY, PACKED, IS_RMS, OFFSET,
        )  # fmt: skip


@triton.jit
def looped_tile(
    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, seed,
    p_y, p_y1, p_r, p_stats, p_mask, p_mask1, tile,
    M, N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r, eps, threshold, scale, share,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LONG: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr,
    SPAN: tl.constexpr, IN_PLACE: tl.constexpr, RESIDUAL_DTYPE: tl.constexpr, IS_RMS: tl.constexpr, DROPOUT: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """A tile of rows wider than it, in two passes. The first asks the caches to keep the rows, the second to let them go.

    Nothing is written before the second, so that residual_out may be the residual's own buffer.
    """
    rows = tile_rows(tile, ROWS, LONG)
    m_row = valid(rows, M, ROWS == 1)
    # LayerNorm: sums of what is left of r − shift. Σ (r − mean)² = Σ d² − (Σ d)² / N then loses little to cancellation: Σ d² is
    # at most N / BLOCK_N times as large, N / 2 times in the worst case of three elements.
    b_shift = tl.zeros([ROWS], tl.float32)
    if not IS_RMS:
        if p_x1 is None and p_residual is None and p_rowscale is None and not DROPOUT:
            b_shift = middle_of_three(p_x, rows, m_row, N, stride_x)
        else:
            b_r = load_sum(
                p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, None, None, rows, m_row, 0,
                N, stride_x, stride_x1, stride_residual, threshold, scale,
                BLOCK_N, 0, EVEN_N, VECTOR, False, RESIDUAL_DTYPE, DROPOUT, "evict_last",
            )  # fmt: skip
            b_shift = quotient(row_sum(b_r, SPAN), tl.minimum(BLOCK_N, N).to(tl.float32))
    b_terms = tl.zeros([ROWS, BLOCK_N], tl.float32)
    b_squares = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for first_col in tl.range(0, N, BLOCK_N, num_stages=1):
        b_r = load_sum(
            p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, None, None, rows, m_row, first_col,
            N, stride_x, stride_x1, stride_residual, threshold, scale,
            BLOCK_N, 0, EVEN_N, VECTOR, False, RESIDUAL_DTYPE, DROPOUT, "evict_last",
        )  # fmt: skip
        b_left = centre(0, b_r[0], b_shift, first_col, N, BLOCK_N, 0, EVEN_N, VECTOR, IS_RMS)
        b_squares += b_left * b_left
        if not IS_RMS:
            b_terms += b_left
    if IS_RMS:
        b_mean = b_shift
        b_m2 = tl.sum(b_squares, 1)
    else:
        b_m2, b_sum = tl.reduce((b_squares, b_terms), 1, add_pairs)
        b_delta = b_sum / N
        b_mean = b_shift + b_delta
        b_m2 -= b_sum * b_delta
    b_rstd = tl.rsqrt(b_m2 * share + eps)

    for first_col in tl.range(0, N, BLOCK_N, num_stages=1):
        b_r = load_sum(
            p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, p_mask, p_mask1, rows, m_row, first_col,
            N, stride_x, stride_x1, stride_residual, threshold, scale,
            BLOCK_N, 0, EVEN_N, VECTOR, False, RESIDUAL_DTYPE, DROPOUT, "evict_first",
        )  # fmt: skip
        if IN_PLACE:
            tl.debug_barrier()
        if p_r is not None:
            store_row(p_r, b_r, rows, m_row, stride_r, first_col, N, BLOCK_N, 0, EVEN_N, VECTOR)
        b_centred = (centre(0, b_r[0], b_mean, first_col, N, BLOCK_N, 0, EVEN_N, VECTOR, IS_RMS),)
        finish_tile(
            p_y, p_y1, p_stats, p_weight, p_bias, p_weight1, p_bias1, (), b_centred, b_mean, b_rstd,
            rows, m_row, first_col == 0, first_col, M, N, stride_y, stride_y1,
            BLOCK_N, 0, EVEN_N, VECTOR, False, False, IS_RMS, OFFSET,
        )  # fmt: skip


@triton.jit
def middle_of_three(p_x, rows, m_row, N, stride_x):
    """fp32 [ROWS]: the median of the row's first, middle and last element: near the mean, without a sum to wait for."""
    b_first = tl.load(p_x + rows * stride_x, mask=m_row, other=0.0).to(tl.float32)
    b_middle = tl.load(p_x + rows * stride_x + N // 2, mask=m_row, other=0.0).to(tl.float32)
    b_last = tl.load(p_x + rows * stride_x + (N - 1), mask=m_row, other=0.0).to(tl.float32)
    low, high = tl.minimum(b_first, b_middle), tl.maximum(b_first, b_middle)
    return tl.maximum(low, tl.minimum(high, b_last))


@triton.jit
def begin_tile(
    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, p_r, p_mask, p_mask1, rows, m_row, first_col,
    N, stride_x, stride_x1, stride_residual, stride_r, threshold, scale, count,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr,
    PACKED: tl.constexpr, SPAN: tl.constexpr, IN_PLACE: tl.constexpr, RESIDUAL_DTYPE: tl.constexpr, IS_RMS: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """r, stored if it is wanted; of this program's columns the mean, r − mean, Σ (r − mean)²; for RMSNorm 0, r, Σ r²."""
    b_r = load_sum(
        p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, p_mask, p_mask1, rows, m_row, first_col,
        N, stride_x, stride_x1, stride_residual, threshold, scale,
        BLOCK_N, TAIL_N, EVEN_N, VECTOR, PACKED, RESIDUAL_DTYPE, DROPOUT, "",
    )  # fmt: skip
    if IN_PLACE:
        # Threads may hold a column twice: all must have read it before one of them writes.
        tl.debug_barrier()
    if p_r is not None:
        store_row(p_r, b_r, rows, m_row, stride_r, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR)
    # Block by block, so that only one at a time is in fp32 where the others wait PACKED.
    b_mean = tl.zeros([ROWS], tl.float32)
    if not IS_RMS:
        b_terms = ()
        for i in tl.static_range(len(b_r)):
            b_terms = gather(b_terms, reopen(b_r[i], PACKED))
        b_mean = quotient(row_sum(b_terms, SPAN), count)
    b_centred = ()
    b_squares = ()
    for i in tl.static_range(len(b_r)):
        b = centre(i, reopen(b_r[i], PACKED), b_mean, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, IS_RMS)
        b_centred += (b,)
        b_squares = gather(b_squares, b * b)
    return b_r, b_mean, b_centred, row_sum(b_squares, SPAN)


@triton.jit
def finish_tile(
    p_y, p_y1, p_stats, p_weight, p_bias, p_weight1, p_bias1, weights, b_row, b_mean, b_rstd,
    rows, m_row, first, first_col, M, N, stride_y, stride_y1,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr,
    LOADED: tl.constexpr, PACKED: tl.constexpr, IS_RMS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Stores y, y1 and the statistics. first: these columns begin the row.

    weights: of each block, if LOADED; else they are read here. b_row: r − mean, or r if PACKED.
    """
    # Block by block: the loads of one wait for the stores of the one before, and so take no registers from it.
    for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
        cols = block_cols(i, first_col, BLOCK_N, TAIL_N, VECTOR)
        m = block_mask(i, m_row, cols, N, BLOCK_N, TAIL_N, EVEN_N)
        if LOADED:
            of_block = weights[i]
        else:
            of_block = load_block_weights(
                i, p_weight, p_bias, p_weight1, p_bias1, p_y1, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, OFFSET
            )
        b_xhat = reopen(b_row[i], PACKED)
        if PACKED and not IS_RMS:
            b_xhat -= b_mean[:, None]
        b_xhat *= b_rstd[:, None]
        b_y = affine(b_xhat, of_block[0], of_block[1], p_weight is not None, p_bias is not None)
        tl.store(p_y + rows[:, None] * stride_y + cols[None, :], b_y, mask=m)
        if p_y1 is not None:
            b_y1 = affine(b_xhat, of_block[2], of_block[3], p_weight1 is not None, p_bias1 is not None)
            tl.store(p_y1 + rows[:, None] * stride_y1 + cols[None, :], b_y1, mask=m)
    if p_stats is not None:
        store_stats(p_stats, b_rstd, b_mean, rows, m_row & first, M, IS_RMS)


@triton.jit
def load_weights(
    p_weight, p_bias, p_weight1, p_bias1, p_y1, first_col, N,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Of each block (weight, bias), and (weight1, bias1) behind them where there is a y1."""
    weights = ()
    for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
        weights += (
            load_block_weights(
                i, p_weight, p_bias, p_weight1, p_bias1, p_y1, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, OFFSET
            ),
        )
    return weights


@triton.jit
def load_block_weights(
    i: tl.constexpr, p_weight, p_bias, p_weight1, p_bias1, p_y1, first_col, N,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    of_block = (
        load_vector_block(i, p_weight, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, 1.0, OFFSET),
        load_vector_block(i, p_bias, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, 0.0, 0.0),
    )
    if p_y1 is not None:
        of_block += (
            load_vector_block(i, p_weight1, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, 1.0, OFFSET),
            load_vector_block(i, p_bias1, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, 0.0, 0.0),
        )
    return of_block


@triton.jit
def load_sum(
    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, p_mask, p_mask1, rows, m_row, first_col,
    N, stride_x, stride_x1, stride_residual, threshold, scale,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, PACKED: tl.constexpr,
    RESIDUAL_DTYPE: tl.constexpr, DROPOUT: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """dropout(x · rowscale) + dropout(x1 · rowscale1) + residual as the residual dtype rounds it, in blocks of fp32, or of that
    dtype if PACKED. EVICTION: what the caches do with the inputs."""
    UNTOUCHED: tl.constexpr = (
        p_x1 is None and p_residual is None and p_rowscale is None and not DROPOUT and p_x.dtype.element_ty == RESIDUAL_DTYPE
    )
    # All loads are issued before the first use.
    b_scale = load_scale(p_rowscale, rows, m_row)
    m_rowx = scaled_rows(m_row, b_scale, p_rowscale)
    RAW: tl.constexpr = UNTOUCHED and PACKED
    b_x = load_row(p_x, rows, m_rowx, stride_x, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, RAW, EVICTION)
    if p_x1 is not None:
        b_scale1 = load_scale(p_rowscale1, rows, m_row)
        m_row1 = scaled_rows(m_row, b_scale1, p_rowscale1)
        b_x1 = load_row(p_x1, rows, m_row1, stride_x1, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, False, EVICTION)
    if p_residual is not None:
        b_residual = load_row(
            p_residual, rows, m_row, stride_residual, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, False, EVICTION
        )

    b_r = ()
    for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
        start = block_start(i, first_col, BLOCK_N)
        m = block_mask(i, m_row, block_cols(i, first_col, BLOCK_N, TAIL_N, VECTOR), N, BLOCK_N, TAIL_N, EVEN_N)
        b_z = b_x[i]
        if p_rowscale is not None:
            b_z = b_z * b_scale[:, None]
        if DROPOUT:
            b_z = drop_block(b_z, seed, p_mask, rows, start, m, N, threshold, scale, 0, VECTOR)
        if p_x1 is not None:
            b_z1 = b_x1[i]
            if p_rowscale1 is not None:
                b_z1 = b_z1 * b_scale1[:, None]
            if DROPOUT:
                b_z1 = drop_block(b_z1, seed, p_mask1, rows, start, m, N, threshold, scale, 1, VECTOR)
            b_z += b_z1
        if p_residual is not None:
            b_z += b_residual[i]
        # Normalise the rounded value: backward and whoever reads the residual stream will see only that.
        if UNTOUCHED:
            b_r += (b_z,)
        elif PACKED:
            b_r += (narrow(b_z, RESIDUAL_DTYPE),)
        else:
            b_r += (rounded(b_z, RESIDUAL_DTYPE),)
    return b_r


@triton.jit
def load_scale(p_rowscale, rows, m_row):
    """fp32 [ROWS]; 1 where there is no rowscale."""
    if p_rowscale is not None:
        b_scale = tl.load(p_rowscale + rows, mask=m_row, other=0.0).to(tl.float32)
    else:
        b_scale = tl.full([rows.shape[0]], 1.0, tl.float32)
    return b_scale


@triton.jit
def scaled_rows(m_row, b_scale, p_rowscale):
    """int1 [ROWS]: the rows to read. One with a scale of 0 counts as zeros, whatever it holds, and is not read."""
    if p_rowscale is not None:
        m_row = m_row & (b_scale != 0.0)
    return m_row


@triton.jit
def quotient(b_sum, count):
    """sum / count, exact where it is a float, so that a constant row has its own mean: GPUs' plain division may be 2 ulp off.

    One Newton step from sum · (1 / count), whose remainder a fused multiply-add gives exactly.
    """
    share = 1.0 / count
    b_estimate = b_sum * share
    return tl.fma(tl.fma(-b_estimate, count, b_sum), share, b_estimate)


@triton.jit
def centre(
    i: tl.constexpr, b, b_mean, first_col, N,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, IS_RMS: tl.constexpr,
):  # fmt: skip
    """r − mean of block i, zero in the columns past the row's end; for RMSNorm r itself."""
    if not IS_RMS:
        b = b - b_mean[:, None]
        if not inside(i, BLOCK_N, TAIL_N, EVEN_N):
            b = tl.where((block_cols(i, first_col, BLOCK_N, TAIL_N, VECTOR) < N)[None, :], b, 0.0)
    return b


@triton.jit
def merge_moments(b_means, b_m2s, N, BLOCK_N: tl.constexpr, SLICES_POW2: tl.constexpr):
    """mean and Σ (r − mean)², fp32 [ROWS], from those of slices of BLOCK_N columns, of which the last may be shorter."""
    counts = tl.maximum(tl.minimum(N - tl.arange(0, SLICES_POW2) * BLOCK_N, BLOCK_N), 0).to(tl.float32)
    # One reduction with one use of what `collect` returned: the compiler repeats its wait for every further one.
    b_mean, b_m2, _ = tl.reduce((b_means, b_m2s, tl.broadcast_to(counts[None, :], b_means.shape)), 1, merge_two)
    return b_mean, b_m2


@triton.jit
def merge_two(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    """Chan, Golub & LeVeque 1979: the moments of two sets together, without cancellation."""
    count = count_a + count_b
    share = tl.where(count > 0.0, count_b / count, 0.0)
    delta = mean_b - mean_a
    return mean_a + delta * share, m2_a + m2_b + delta * delta * count_a * share, count


@triton.jit
def affine(b_xhat, b_weight, b_bias, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """x̂ · weight + bias."""
    b = b_xhat
    if WEIGHT:
        b = b * b_weight
    if BIAS:
        b = b + b_bias
    return b


@triton.jit
def store_stats(p_stats, b_rstd, b_mean, rows, m, M, IS_RMS: tl.constexpr):
    tl.store(p_stats + rows, b_rstd, mask=m)
    if not IS_RMS:
        tl.store(p_stats + M + rows, b_mean, mask=m)
