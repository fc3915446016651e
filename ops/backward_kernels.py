"""The backward kernel of the norm, and the small sum that finishes the weight gradients. Names as in `forward_kernels`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .input_gradient_kernels import draw_row, store_input_gradients, store_rowscale_gradients
from .norm_gradient_kernels import add_norm_gradient, add_product, add_rows, normalise, weighted_sum
from .prefetch_kernels import bring_rows
from .row_kernels import (
    block_cols,
    block_count,
    block_width,
    dot_rows,
    load_row,
    load_vector,
    multiples,
    row_sum,
    tile_rows,
    two_dots,
)
from .split_backward_kernels import nothing_waits, split_backward_round
from .stats_kernels import load_stats


@triton.jit(do_not_specialize=["M", "tiles", "threshold"], do_not_specialize_on_alignment=["p_seed"])
def norm_backward_kernel(
    p_dy, p_dy1, p_dr, p_r, p_x, p_x1, p_weight, p_weight1, p_rowscale, p_rowscale1, p_stats, p_seed,
    p_dz, p_dx, p_dx1, p_drowscale, p_drowscale1, p_dweight, p_dbias, p_dweight1, p_dbias1, p_board,
    M, N, tiles, stride_dy, stride_dy1, stride_dr, stride_r, stride_x, stride_x1, stride_partial,
    threshold, scale,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, SLICES: tl.constexpr, PARTS: tl.constexpr,
    LONG: tl.constexpr, LOOPED: tl.constexpr, EVEN_N: tl.constexpr, MULTIPLE: tl.constexpr, VECTOR: tl.constexpr,
    STAGES: tl.constexpr, HOLD: tl.constexpr, DRAWS_FIRST: tl.constexpr, PREFETCH: tl.constexpr, LAG: tl.constexpr,
    RING: tl.constexpr, SPAN: tl.constexpr, EARLY_START: tl.constexpr, EARLY_FINISH: tl.constexpr, IS_RMS: tl.constexpr,
    DROPOUT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Persistent programs, each striding over tiles of ROWS rows. With g = dy · weight + dy1 · weight1:

        dz      = rstd · (g − x̂ · mean(g · x̂) − mean(g)) + dr           the last mean for LayerNorm only
        dx      = dropout(dz) · rowscale;   drowscale = Σ_cols dropout(dz) · x          likewise dx1, drowscale1
        dweight = Σ_rows dy · x̂;            dbias     = Σ_rows dy                       likewise dweight1, dbias1

    p_dz serves every input whose gradient is dz itself. The weight gradients are fp32 [groups, N], a partial sum each, rows
    stride_partial apart: finish_weight_gradients_kernel adds them up in a fixed order. A group is the SLICES programs that
    share a row; they exchange its two sums over the columns on p_board.
    """
    if EARLY_FINISH:
        # The sum over partials may take its place on the GPU now: it reads nothing before its own wait.
        gdc_launch_dependents()
    if EARLY_START:
        gdc_wait()  # as in forward: nothing may be read or written above
    N, stride_dy, stride_dy1, stride_dr, stride_r, stride_x, stride_x1, stride_partial = multiples(
        (N, stride_dy, stride_dy1, stride_dr, stride_r, stride_x, stride_x1, stride_partial), MULTIPLE
    )
    slice_id = tl.program_id(0) % SLICES
    group = tl.program_id(0) // SLICES
    groups = tl.num_programs(0) // SLICES
    partial = group.to(tl.int64) * stride_partial
    seed = 0
    if DROPOUT:
        seed = tl.load(p_seed)
    share = 1.0 / N
    # Where only the residual stream has a gradient, the norm has no part in it.
    UPSTREAM: tl.constexpr = (p_dy is not None) or (p_dy1 is not None)

    if not LOOPED:
        first_col = slice_id * BLOCK_N
        if HOLD:
            b_weight = load_vector(p_weight, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, 1.0, OFFSET)
        b_weight1 = load_vector(p_weight1, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, 1.0, OFFSET)
        b_dweight = zero_row(ROWS, BLOCK_N, TAIL_N, SPAN)
        b_dbias = zero_row(ROWS, BLOCK_N, TAIL_N, SPAN)
        b_dweight1 = zero_row(ROWS, BLOCK_N, TAIL_N, SPAN)
        b_dbias1 = zero_row(ROWS, BLOCK_N, TAIL_N, SPAN)
        if SLICES > 1:
            tl.static_assert(TAIL_N == 0, "a split row is one block in each program")
            tl.static_assert(p_dy1 is None and p_x is None and p_x1 is None, "its programs exchange the sums of one norm alone")
            waiting = nothing_waits(p_r, p_dy, ROWS, BLOCK_N, LAG)
            for turn in tl.range(0, tl.cdiv(tiles - group, groups) + LAG, num_stages=STAGES):
                if PREFETCH:
                    # r and dy of the tile whose copy this round ends by starting, dr of the one that is finished beside it.
                    ahead = turn + STAGES - 1
                    columns = BLOCK_N if EVEN_N else tl.minimum(BLOCK_N, N - first_col)
                    bring_rows(p_r, group + ahead * groups, M, stride_r, first_col, columns, ROWS)
                    bring_rows(p_dy, group + ahead * groups, M, stride_dy, first_col, columns, ROWS)
                    if STAGES > LAG or ahead >= LAG:
                        bring_rows(p_dr, group + (ahead - LAG) * groups, M, stride_dr, first_col, columns, ROWS)
                waiting, b_dweight, b_dbias = split_backward_round(
                    p_dy, p_dr, p_r, p_weight, p_rowscale, p_rowscale1, p_stats, seed, p_dz, p_dx, p_dx1, p_dweight, p_dbias,
                    p_board, b_weight if HOLD else None, waiting, b_dweight, b_dbias, turn, group, groups, slice_id, first_col,
                    M, N, stride_dy, stride_dr, stride_r, threshold, scale, share,
                    ROWS, BLOCK_N, SLICES, PARTS, LAG, RING, LONG, EVEN_N, VECTOR, SPAN, DRAWS_FIRST, IS_RMS, DROPOUT, OFFSET,
                )  # fmt: skip
        else:
            for tile in tl.range(group, tiles, groups, num_stages=STAGES):
                if PREFETCH:
                    coming = tile + (STAGES - 1) * groups
                    bring_rows(p_dr, coming, M, stride_dr, first_col, N, ROWS)
                    if UPSTREAM:
                        bring_rows(p_r, coming, M, stride_r, first_col, N, ROWS)
                        bring_rows(p_dy, coming, M, stride_dy, first_col, N, ROWS)
                        bring_rows(p_dy1, coming, M, stride_dy1, first_col, N, ROWS)
                rows = tile_rows(tile, ROWS, LONG)
                m_row = rows < M
                # Not with a row scale, where rows with a scale of 0 need no draws.
                DRAWN: tl.constexpr = DRAWS_FIRST and p_rowscale is None and p_dx is not None
                DRAWN1: tl.constexpr = DRAWS_FIRST and p_rowscale1 is None and p_dx1 is not None
                b_draws = draw_row(seed, rows, first_col, threshold, BLOCK_N, TAIL_N, VECTOR, 0, DRAWN)
                b_draws1 = draw_row(seed, rows, first_col, threshold, BLOCK_N, TAIL_N, VECTOR, 1, DRAWN1)
                b_dz = load_row(p_dr, rows, m_row, stride_dr, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR)
                if UPSTREAM:
                    b_r = load_row(p_r, rows, m_row, stride_r, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR)
                    b_dy = load_row(p_dy, rows, m_row, stride_dy, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR)
                    b_dy1 = load_row(p_dy1, rows, m_row, stride_dy1, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR)
                    b_rstd, b_mean = load_stats(p_stats, rows, m_row, IS_RMS)
                    b_xhat = normalise(b_r, b_mean, b_rstd, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, IS_RMS)
                    if p_dbias is not None:
                        b_dbias = add_rows(b_dbias, b_dy)
                    if p_dbias1 is not None:
                        b_dbias1 = add_rows(b_dbias1, b_dy1)
                    if p_dweight1 is not None:
                        b_dweight1 = add_product(b_dweight1, b_dy1, b_xhat)
                    if p_dweight is not None:
                        b_dweight = add_product(b_dweight, b_dy, b_xhat)
                    if not HOLD:
                        b_weight = load_vector(p_weight, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, 1.0, OFFSET)
                    b_g = weighted_sum(b_dy, b_weight, b_dy1, b_weight1, p_dy is not None, p_dy1 is not None)
                    if IS_RMS:
                        b_c1 = dot_rows(b_g, b_xhat, SPAN)
                        b_c2 = tl.zeros([ROWS], tl.float32)
                    else:
                        b_c1, b_c2 = two_dots(b_g, b_xhat, SPAN)
                    b_dz = add_norm_gradient(b_dz, b_g, b_xhat, -share * b_c1, -share * b_c2, b_rstd, p_dr is not None, IS_RMS)
                b_ds, b_ds1 = store_input_gradients(
                    p_dz, p_dx, p_dx1, p_drowscale, p_drowscale1, p_x, p_x1, p_rowscale, p_rowscale1, seed, b_draws, b_draws1,
                    b_dz, rows, m_row, first_col, N, stride_x, stride_x1, threshold, scale,
                    ROWS, BLOCK_N, TAIL_N, EVEN_N, VECTOR, DROPOUT,
                )  # fmt: skip
                store_rowscale_gradients(p_drowscale, p_drowscale1, b_ds, b_ds1, rows, m_row)
        if p_dweight is not None:
            store_partial(p_dweight + partial, b_dweight, first_col, N, BLOCK_N, TAIL_N, VECTOR)
        if p_dbias is not None:
            store_partial(p_dbias + partial, b_dbias, first_col, N, BLOCK_N, TAIL_N, VECTOR)
        if p_dweight1 is not None:
            store_partial(p_dweight1 + partial, b_dweight1, first_col, N, BLOCK_N, TAIL_N, VECTOR)
        if p_dbias1 is not None:
            store_partial(p_dbias1 + partial, b_dbias1, first_col, N, BLOCK_N, TAIL_N, VECTOR)
    else:
        for tile in tl.range(group, tiles, groups, num_stages=1):
            rows = tile_rows(tile, ROWS, LONG)
            m_row = rows < M
            b_c1 = tl.zeros([ROWS], tl.float32)
            b_c2 = tl.zeros([ROWS], tl.float32)
            if UPSTREAM:
                b_rstd, b_mean = load_stats(p_stats, rows, m_row, IS_RMS)
                for first_col in tl.range(0, N, BLOCK_N, num_stages=1):
                    b_r = load_row(p_r, rows, m_row, stride_r, first_col, N, BLOCK_N, 0, False, VECTOR)
                    b_dy = load_row(p_dy, rows, m_row, stride_dy, first_col, N, BLOCK_N, 0, False, VECTOR)
                    b_dy1 = load_row(p_dy1, rows, m_row, stride_dy1, first_col, N, BLOCK_N, 0, False, VECTOR)
                    b_xhat = normalise(b_r, b_mean, b_rstd, first_col, N, BLOCK_N, 0, False, VECTOR, IS_RMS)
                    b_weight = load_vector(p_weight, first_col, N, BLOCK_N, 0, False, VECTOR, 1.0, OFFSET)
                    b_weight1 = load_vector(p_weight1, first_col, N, BLOCK_N, 0, False, VECTOR, 1.0, OFFSET)
                    b_g = weighted_sum(b_dy, b_weight, b_dy1, b_weight1, p_dy is not None, p_dy1 is not None)
                    b_c1 += dot_rows(b_g, b_xhat, SPAN)
                    if not IS_RMS:
                        b_c2 += row_sum(b_g, SPAN)
            b_ds = tl.zeros([ROWS], tl.float32)
            b_ds1 = tl.zeros([ROWS], tl.float32)
            for first_col in tl.range(0, N, BLOCK_N, num_stages=1):
                b_dz = load_row(p_dr, rows, m_row, stride_dr, first_col, N, BLOCK_N, 0, False, VECTOR)
                if UPSTREAM:
                    b_r = load_row(p_r, rows, m_row, stride_r, first_col, N, BLOCK_N, 0, False, VECTOR)
                    b_dy = load_row(p_dy, rows, m_row, stride_dy, first_col, N, BLOCK_N, 0, False, VECTOR)
                    b_dy1 = load_row(p_dy1, rows, m_row, stride_dy1, first_col, N, BLOCK_N, 0, False, VECTOR)
                    b_xhat = normalise(b_r, b_mean, b_rstd, first_col, N, BLOCK_N, 0, False, VECTOR, IS_RMS)
                    b_weight = load_vector(p_weight, first_col, N, BLOCK_N, 0, False, VECTOR, 1.0, OFFSET)
                    b_weight1 = load_vector(p_weight1, first_col, N, BLOCK_N, 0, False, VECTOR, 1.0, OFFSET)
                    first = tile == group  # this program's first rows find nothing to add to
                    if p_dweight is not None:
                        accumulate(p_dweight + partial, b_dy[0] * b_xhat[0], first_col, N, first)
                    if p_dbias is not None:
                        accumulate(p_dbias + partial, b_dy[0], first_col, N, first)
                    if p_dweight1 is not None:
                        accumulate(p_dweight1 + partial, b_dy1[0] * b_xhat[0], first_col, N, first)
                    if p_dbias1 is not None:
                        accumulate(p_dbias1 + partial, b_dy1[0], first_col, N, first)
                    b_g = weighted_sum(b_dy, b_weight, b_dy1, b_weight1, p_dy is not None, p_dy1 is not None)
                    b_dz = add_norm_gradient(b_dz, b_g, b_xhat, -share * b_c1, -share * b_c2, b_rstd, p_dr is not None, IS_RMS)
                b_block_ds, b_block_ds1 = store_input_gradients(
                    p_dz, p_dx, p_dx1, p_drowscale, p_drowscale1, p_x, p_x1, p_rowscale, p_rowscale1, seed, (), (), b_dz,
                    rows, m_row, first_col, N, stride_x, stride_x1, threshold, scale,
                    ROWS, BLOCK_N, 0, False, VECTOR, DROPOUT,
                )  # fmt: skip
                b_ds += b_block_ds
                b_ds1 += b_block_ds1
            store_rowscale_gradients(p_drowscale, p_drowscale1, b_ds, b_ds1, rows, m_row)
            # A partial sum may be read back by another thread than wrote it.
            tl.debug_barrier()


@triton.jit
def zero_row(ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, SPAN: tl.constexpr):
    """Where weight gradients are summed: fp32 blocks [width] from SPAN columns on, where a thread holds all rows of its
    columns and can add them at once, else [ROWS, width]."""
    b_row = ()
    for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
        if block_width(i, BLOCK_N, TAIL_N) >= SPAN:
            b_row += (tl.zeros([block_width(i, BLOCK_N, TAIL_N)], tl.float32),)
        else:
            b_row += (tl.zeros([ROWS, block_width(i, BLOCK_N, TAIL_N)], tl.float32),)
    return b_row


@triton.jit
def store_partial(p, b_row, first_col, N, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, VECTOR: tl.constexpr):
    """Stores the sum over the rows of a tile."""
    for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
        cols = block_cols(i, first_col, BLOCK_N, TAIL_N, VECTOR)
        b = b_row[i] if len(b_row[i].shape) == 1 else tl.sum(b_row[i], 0)
        tl.store(p + cols, b, mask=cols < N)


@triton.jit
def accumulate(p, b, first_col, N, first):
    """Adds the sum over the rows of a tile to a partial sum in memory, or starts it where there is none yet."""
    cols = first_col + tl.arange(0, b.shape[1])
    b_earlier = tl.load(p + cols, mask=(cols < N) & (first == 0), other=0.0)
    tl.store(p + cols, b_earlier + tl.sum(b, 0), mask=cols < N)


@triton.jit(do_not_specialize=["PARTIALS"])
def finish_weight_gradients_kernel(
    p_partial, p_out, PARTIALS, WIDTH,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, MULTIPLE: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """out [WIDTH] = the sum over rows of partial [PARTIALS, WIDTH], in a fixed order."""
    if EARLY_START:
        gdc_wait()  # for all programs of backward; this kernel lets nobody begin early, so what follows it comes after both
    WIDTH = multiples((WIDTH,), MULTIPLE)[0]
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_sum = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for first in tl.range(0, PARTIALS, BLOCK_P):
        rows = first + tl.arange(0, BLOCK_P)
        m = (rows < PARTIALS)[:, None] & (cols < WIDTH)[None, :]
        b_sum += tl.load(p_partial + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :], mask=m, other=0.0)
    tl.store(p_out + cols, tl.sum(b_sum, 0), mask=cols < WIDTH)
