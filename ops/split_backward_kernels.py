"""Backward of rows that are split over programs: a round of the loop over tiles, as `board_kernels` has it."""

import triton
import triton.language as tl

from .board_kernels import another_round, board_place, collect, lay_by, nothing_by, publish, put, sum_parts, take_up
from .input_gradient_kernels import draw_row, store_input_gradients
from .norm_gradient_kernels import add_norm_gradient, add_product, add_rows, normalise, weighted_sum
from .row_kernels import add_pairs, load_row, load_vector_block, tile_rows
from .stats_kernels import load_stats


@triton.jit
def split_backward_round(
    p_dy, p_dr, p_r, p_weight, p_rowscale, p_rowscale1, p_stats, seed, p_dz, p_dx, p_dx1, p_dweight, p_dbias, p_board,
    b_weight, waiting, b_dweight, b_dbias, turn, group, groups, slice_id, first_col,
    M, N, stride_dy, stride_dr, stride_r, threshold, scale, share,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, PARTS: tl.constexpr, LAG: tl.constexpr,
    RING: tl.constexpr, LONG: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, SPAN: tl.constexpr,
    DRAWS_FIRST: tl.constexpr, IS_RMS: tl.constexpr, DROPOUT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Loads a tile and publishes its sums over these columns; finishes the tile LAG rounds before it, the first that waits.

    Returns what waits for the next round, and what the weight gradients have come to. b_weight: None to load it.
    """
    tl.static_assert(LAG == 1 or LAG == 2)
    rows = tile_rows(group + turn * groups, ROWS, LONG)
    m_row = rows < M
    before = rows - LAG * groups * ROWS
    m_before = (before >= 0) & (before < M)
    # Not with a row scale, where rows with a scale of 0 need no draws.
    DRAWN: tl.constexpr = DRAWS_FIRST and p_rowscale is None and p_dx is not None
    DRAWN1: tl.constexpr = DRAWS_FIRST and p_rowscale1 is None and p_dx1 is not None
    b_draws = draw_row(seed, before, first_col, threshold, BLOCK_N, 0, VECTOR, 0, DRAWN)
    b_draws1 = draw_row(seed, before, first_col, threshold, BLOCK_N, 0, VECTOR, 1, DRAWN1)

    b_r = load_row(p_r, rows, m_row, stride_r, first_col, N, BLOCK_N, 0, EVEN_N, VECTOR)
    b_dy = load_row(p_dy, rows, m_row, stride_dy, first_col, N, BLOCK_N, 0, EVEN_N, VECTOR)
    b_rstd, b_mean = load_stats(p_stats, rows, m_row, IS_RMS)
    # Multiplied out, (r − mean) · rstd is an instruction less; where that loses digits, rounding r to 16 bits has lost more,
    # but for a row of one number throughout, whose x̂ is then a rounding and not 0. Past the row's end, where dy is zero, it is
    # −mean · rstd, finite unless that overflows.
    EXACT: tl.constexpr = p_r.dtype.element_ty == tl.float32
    if IS_RMS or EXACT:
        b_xhat = normalise(b_r, b_mean, b_rstd, first_col, N, BLOCK_N, 0, EVEN_N, VECTOR, IS_RMS)
    else:
        b_xhat = (b_r[0] * b_rstd[:, None] - (b_mean * b_rstd)[:, None],)
    if b_weight is None:
        b_weight = (load_vector_block(0, p_weight, first_col, N, BLOCK_N, 0, EVEN_N, VECTOR, 1.0, OFFSET),)
    if p_dbias is not None:
        b_dbias = add_rows(b_dbias, b_dy)
    if IS_RMS:
        if p_dweight is not None:
            b_dweight = add_product(b_dweight, b_dy, b_xhat)
        b_c1 = sum_parts(b_dy[0] * b_weight[0] * b_xhat[0], PARTS, SPAN)
        b_c2 = tl.zeros([ROWS, PARTS], tl.float32)
    else:
        # g itself is wanted rounds later; its sums are had from dy · x̂, which the weight gradient needs too.
        b_product = (b_dy[0] * b_xhat[0],)
        if p_dweight is not None:
            b_dweight = add_rows(b_dweight, b_product)
        b_c1 = sum_parts(b_product[0] * b_weight[0], PARTS, SPAN)
        b_c2 = sum_parts(b_dy[0] * b_weight[0], PARTS, SPAN)
    p_words, lap = board_place(p_board, group, turn, ROWS, SLICES * PARTS, RING)
    publish(p_words, lap, b_c1, b_c2, slice_id, SLICES, BLOCK_N < SPAN)

    b_r_before = (take_up(waiting[0], p_r.dtype.element_ty),)
    b_dy_before = (take_up(waiting[1], p_dy.dtype.element_ty),)
    if LAG == 2:
        waiting = (another_round(waiting[2]), another_round(waiting[3]))
    else:
        waiting = ()
    waiting += (lay_by(b_r[0], p_r.dtype.element_ty), lay_by(b_dy[0], p_dy.dtype.element_ty))
    b_dz = load_row(p_dr, before, m_before, stride_dr, first_col, N, BLOCK_N, 0, EVEN_N, VECTOR)
    b_rstd, b_mean = load_stats(p_stats, before, m_before, IS_RMS)
    p_words, lap = board_place(p_board, group, turn - LAG, ROWS, SLICES * PARTS, RING)
    b_c1, b_c2 = add_up(collect(p_words, lap, turn >= LAG, ROWS, SLICES * PARTS), IS_RMS)
    b_g = weighted_sum(b_dy_before, b_weight, (), (), True, False)
    b_slope = -share * b_rstd * b_c1
    b_offset = -share * b_c2
    if EXACT and not IS_RMS:
        b_r_before = (b_r_before[0] - b_mean[:, None],)
    elif not IS_RMS:
        b_offset -= b_slope * b_mean
    b_dz = add_norm_gradient(b_dz, b_g, b_r_before, b_slope, b_offset, b_rstd, p_dr is not None, IS_RMS)
    store_input_gradients(
        p_dz, p_dx, p_dx1, None, None, None, None, p_rowscale, p_rowscale1, seed, b_draws, b_draws1, b_dz,
        before, m_before, first_col, N, 0, 0, threshold, scale, ROWS, BLOCK_N, 0, EVEN_N, VECTOR, DROPOUT,
    )  # fmt: skip
    return waiting, b_dweight, b_dbias


@triton.jit
def nothing_waits(p_r, p_dy, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LAG: tl.constexpr):
    """What waits before the first round: r and dy of LAG tiles, the earliest first."""
    waiting = ()
    for _ in tl.static_range(LAG):
        waiting += (nothing_by(ROWS, BLOCK_N, p_r.dtype.element_ty), nothing_by(ROWS, BLOCK_N, p_dy.dtype.element_ty))
    return waiting


@triton.jit
def add_up(found, IS_RMS: tl.constexpr):
    """Σ g · x̂ and Σ g of each row, fp32 [ROWS]; zeros for the second with RMSNorm."""
    b_c1 = tl.zeros([len(found)], tl.float32)
    b_c2 = tl.zeros([len(found)], tl.float32)
    for i in tl.static_range(len(found)):
        first, second = found[i][0]
        for j in tl.static_range(1, len(found[i])):
            first += found[i][j][0]
            second += found[i][j][1]
        if IS_RMS:
            c1 = tl.sum(first)
        else:
            c1, c2 = tl.reduce((first, second), 0, add_pairs)
            b_c2 = put(b_c2, i, c2)
        b_c1 = put(b_c1, i, c1)
    return b_c1, b_c2
