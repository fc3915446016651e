"""The forward kernel of the norm.

Variants are constexpr flags and absent pointers: `None` is constexpr, so `if p_x1 is not None` costs nothing at run time.
Names: `p_` pointer, `b_` block in registers, `m_` mask. All arithmetic is fp32.
"""

import triton
import triton.language as tl

from .forward_looped_kernels import looped_tile
from .forward_tile_kernels import begin_tile, centre, finish_tile, load_weights
from .row_kernels import collect, load_row, narrow_row, publish, signed, tile_rows, valid, widen_row


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
    if PACKED and ROWS == 1:
        tile, stride_x, stride_x1, stride_residual = signed(tile), signed(stride_x), signed(stride_x1), signed(stride_residual)
        stride_y, stride_y1, stride_r = signed(stride_y), signed(stride_y1), signed(stride_r)
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
