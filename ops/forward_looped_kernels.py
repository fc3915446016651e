"""Forward over rows wider than a tile. Names as in `forward_kernels`."""

import triton
import triton.language as tl

from .forward_tile_kernels import finish_tile, load_sum
from .moments_kernels import centre, quotient
from .row_kernels import L1_AND_L2, add_pairs, row_sum, store_row, tile_rows, valid


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
    # LayerNorm: sums of d = r − shift, the mean of the first columns. Σ (r − mean)² = Σ d² − (Σ d)² / N then loses few digits:
    # Σ d² is at most N / BLOCK_N times as large.
    b_shift = tl.zeros([ROWS], tl.float32)
    if not IS_RMS:
        b_r = load_sum(
            p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, None, None, rows, m_row, 0,
            N, stride_x, stride_x1, stride_residual, threshold, scale,
            BLOCK_N, 0, EVEN_N, VECTOR, False, RESIDUAL_DTYPE, DROPOUT, "evict_last", L1_AND_L2,
        )  # fmt: skip
        b_shift = quotient(row_sum(b_r, SPAN), tl.minimum(BLOCK_N, N).to(tl.float32))
    b_terms = tl.zeros([ROWS, BLOCK_N], tl.float32)
    b_squares = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for first_col in tl.range(0, N, BLOCK_N, num_stages=1):
        b_r = load_sum(
            p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, None, None, rows, m_row, first_col,
            N, stride_x, stride_x1, stride_residual, threshold, scale,
            BLOCK_N, 0, EVEN_N, VECTOR, False, RESIDUAL_DTYPE, DROPOUT, "evict_last", L1_AND_L2,
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
            BLOCK_N, 0, EVEN_N, VECTOR, False, RESIDUAL_DTYPE, DROPOUT, "evict_first", L1_AND_L2,
        )  # fmt: skip
        if IN_PLACE:
            tl.debug_barrier()
        if p_r is not None:
            store_row(p_r, b_r, rows, m_row, stride_r, first_col, N, BLOCK_N, 0, EVEN_N, VECTOR)
        b_centred = (centre(0, b_r[0], b_mean, first_col, N, BLOCK_N, 0, EVEN_N, VECTOR, IS_RMS),)
        finish_tile(
            p_y, p_y1, p_stats, p_weight, p_bias, p_weight1, p_bias1, (), b_centred, b_mean, b_rstd,
            rows, m_row, first_col == 0, first_col, N, stride_y, stride_y1,
            BLOCK_N, 0, EVEN_N, VECTOR, SPAN, False, False, False, IS_RMS, OFFSET,
        )  # fmt: skip
