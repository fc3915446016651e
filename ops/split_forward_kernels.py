"""Forward of rows that are split over programs: a round of the loop over tiles, as `board_kernels` has it."""

import triton
import triton.language as tl

from .board_kernels import (
    another_round,
    board_place,
    by_part,
    collect,
    lay_by,
    nothing_by,
    part_columns,
    publish,
    put,
    sum_parts,
    take_up,
)
from .forward_tile_kernels import finish_tile, load_sum
from .moments_kernels import centre, quotient
from .row_kernels import L1_AND_L2, NO_HINT, PASSING, block_cols, store_row, tile_rows


@triton.jit
def split_forward_round(
    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, seed,
    p_y, p_y1, p_r, p_stats, p_mask, p_mask1, p_board, weights, waiting, turn, group, groups, slice_id, first_col,
    M, N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r, eps, threshold, scale, share,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, PARTS: tl.constexpr, LAG: tl.constexpr,
    RING: tl.constexpr, LONG: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, SPAN: tl.constexpr, HOLD: tl.constexpr,
    IN_PLACE: tl.constexpr, RESIDUAL_DTYPE: tl.constexpr, IS_RMS: tl.constexpr, DROPOUT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Loads and stores r of a tile and publishes its moments in these columns; finishes the tile LAG rounds before it, the
    first that waits. Returns what waits for the next round."""
    tl.static_assert(LAG == 1 or LAG == 2)
    rows = tile_rows(group + turn * groups, ROWS, LONG)
    m_row = rows < M
    b_r = load_sum(
        p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, p_mask, p_mask1, rows, m_row, first_col,
        N, stride_x, stride_x1, stride_residual, threshold, scale,
        BLOCK_N, 0, EVEN_N, VECTOR, False, RESIDUAL_DTYPE, DROPOUT, NO_HINT, L1_AND_L2,
    )  # fmt: skip
    if IN_PLACE:
        # Threads may hold a column twice: all must have read it before one of them writes.
        tl.debug_barrier()
    b_mean, b_m2 = moments(b_r[0], slice_id, first_col, N, PARTS, EVEN_N, VECTOR, SPAN, IS_RMS)
    p_words, lap = board_place(p_board, group, turn, ROWS, SLICES * PARTS, RING)
    # Where a mask is stored too, the compiler may lay out the columns in another way than SPAN says.
    publish(p_words, lap, b_mean, b_m2, slice_id, SLICES, BLOCK_N < SPAN or p_mask is not None)
    if p_r is not None:
        # Later kernels alone read the stream again: up to 1 % faster (H200, 65536 columns).
        store_row(p_r, b_r, rows, m_row, stride_r, first_col, N, BLOCK_N, 0, EVEN_N, VECTOR, PASSING)

    b_before = take_up(waiting[0], RESIDUAL_DTYPE)
    if LAG == 2:
        waiting = (another_round(waiting[1]),)
    else:
        waiting = ()
    waiting += (lay_by(b_r[0], RESIDUAL_DTYPE),)
    rows -= LAG * groups * ROWS
    m_row = (rows >= 0) & (rows < M)
    p_words, lap = board_place(p_board, group, turn - LAG, ROWS, SLICES * PARTS, RING)
    found = collect(p_words, lap, turn >= LAG, ROWS, SLICES * PARTS)
    b_mean, b_m2 = merge_moments(found, N, share, BLOCK_N, PARTS, SPAN, IS_RMS)
    b_rstd = tl.rsqrt(b_m2 * share + eps)
    b_before = centre(0, b_before, b_mean, first_col, N, BLOCK_N, 0, EVEN_N, VECTOR, IS_RMS)
    finish_tile(
        p_y, p_y1, p_stats, p_weight, p_bias, p_weight1, p_bias1, weights, (b_before,), b_mean,
        b_rstd, rows, m_row, slice_id == 0, first_col, N, stride_y, stride_y1,
        BLOCK_N, 0, EVEN_N, VECTOR, SPAN, HOLD, False, False, IS_RMS, OFFSET,
    )  # fmt: skip
    return waiting


@triton.jit
def nothing_waits(ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LAG: tl.constexpr, RESIDUAL_DTYPE: tl.constexpr):
    """What waits before the first round: r of LAG tiles, the earliest first."""
    waiting = ()
    for _ in tl.static_range(LAG):
        waiting += (nothing_by(ROWS, BLOCK_N, RESIDUAL_DTYPE),)
    return waiting


@triton.jit
def moments(
    b, slice_id, first_col, N,
    PARTS: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, SPAN: tl.constexpr, IS_RMS: tl.constexpr,
):  # fmt: skip
    """mean and Σ (r − mean)² of each part, fp32 [ROWS, PARTS]; for RMSNorm 0 and Σ r²."""
    BLOCK_N: tl.constexpr = b.shape[1]
    if IS_RMS:
        b_mean = tl.zeros([b.shape[0], PARTS], tl.float32)
        b_m2 = sum_parts(b * b, PARTS, SPAN)
    else:
        if EVEN_N:
            b_count = tl.full([1, PARTS], BLOCK_N // PARTS, tl.float32)
        else:
            b_count = part_columns(slice_id * PARTS + tl.arange(0, PARTS), N, BLOCK_N, PARTS, SPAN)[None, :]
        b_mean = quotient(sum_parts(b, PARTS, SPAN), tl.maximum(b_count, 1.0))
        b_centred = by_part(b, PARTS, SPAN) - b_mean[:, None, :, None]
        if not EVEN_N:
            m = (block_cols(0, first_col, BLOCK_N, 0, VECTOR) < N)[None, :]
            b_centred = tl.where(by_part(tl.broadcast_to(m, b.shape), PARTS, SPAN), b_centred, 0.0)
        b_m2 = tl.sum(tl.sum(b_centred * b_centred, 1), 2)
    return b_mean, b_m2


@triton.jit
def merge_moments(found, N, share, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, IS_RMS: tl.constexpr):
    """mean and Σ (r − mean)² of each row, fp32 [ROWS], from those of all its parts.

    As Chan, Golub & LeVeque 1979 merge two sets, without cancellation: means first, by how far they are from one of them, so
    that a constant row has its own mean; then the squares around it.
    """
    LANES: tl.constexpr = found[0][0][0].shape[0]
    counts = (part_columns(tl.arange(0, LANES), N, BLOCK_N, PARTS, SPAN),)
    for j in tl.static_range(1, len(found[0])):
        counts += (part_columns(tl.arange(0, LANES) + j * LANES, N, BLOCK_N, PARTS, SPAN),)
    b_mean = tl.zeros([len(found)], tl.float32)
    b_m2 = tl.zeros([len(found)], tl.float32)
    for i in tl.static_range(len(found)):
        m2 = tl.zeros([LANES], tl.float32)
        if IS_RMS:
            for j in tl.static_range(len(counts)):
                m2 += found[i][j][1]
        else:
            base = tl.max(tl.where(counts[0] > 0.0, found[i][0][0], float("-inf")))
            deviation = tl.zeros([LANES], tl.float32)
            for j in tl.static_range(len(counts)):
                deviation += (found[i][j][0] - base) * counts[j]
            mean = base + tl.sum(deviation) * share
            b_mean = put(b_mean, i, mean)
            for j in tl.static_range(len(counts)):
                away = found[i][j][0] - mean
                m2 += found[i][j][1] + counts[j] * away * away
        b_m2 = put(b_m2, i, tl.sum(m2))
    return b_mean, b_m2
