"""What forward does with a tile: read and add up, take statistics, finish and store. Names as in `forward_kernels`."""

import triton
import triton.language as tl

from .conversion_kernels import narrow, rounded
from .dropout_kernels import drop_block
from .moments_kernels import centre, evenly_held, one_pass_moments, two_pass_moments
from .row_kernels import (
    L1_AND_L2,
    L2_ALONE,
    NO_HINT,
    block_cols,
    block_count,
    block_mask,
    block_start,
    block_width,
    load_row,
    load_vector_block,
    reopen,
    store_row,
    unsigned,
)
from .stats_kernels import store_stats


@triton.jit
def begin_tile(
    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, p_r, p_mask, p_mask1, rows, m_row,
    N, stride_x, stride_x1, stride_residual, stride_r, threshold, scale,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr,
    PACKED: tl.constexpr, ONE_PASS: tl.constexpr, PAST_L1: tl.constexpr, SPAN: tl.constexpr, IN_PLACE: tl.constexpr,
    RESIDUAL_DTYPE: tl.constexpr, IS_RMS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Of whole rows r, stored if it is wanted, the mean, r − mean and Σ (r − mean)²; for RMSNorm r, 0, r and Σ r²."""
    b_r = load_sum(
        p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, p_mask, p_mask1, rows, m_row, 0,
        N, stride_x, stride_x1, stride_residual, threshold, scale,
        BLOCK_N, TAIL_N, EVEN_N, VECTOR, PACKED, RESIDUAL_DTYPE, DROPOUT, NO_HINT, L2_ALONE if PAST_L1 else L1_AND_L2,
    )  # fmt: skip
    if IN_PLACE:
        # Threads may hold a column twice: all must have read it before one of them writes.
        tl.debug_barrier()
    if p_r is not None:
        store_row(p_r, b_r, rows, m_row, stride_r, 0, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR)
    if ONE_PASS and evenly_held(BLOCK_N, TAIL_N, EVEN_N, SPAN):
        b_mean, b_m2 = one_pass_moments(b_r, VECTOR, PACKED, SPAN)
    else:
        b_mean, b_m2 = two_pass_moments(b_r, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, PACKED, SPAN, IS_RMS)
    b_centred = ()
    for i in tl.static_range(len(b_r)):
        b_centred += (centre(i, reopen(b_r[i], PACKED), b_mean, 0, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, IS_RMS),)
    return b_r, b_mean, b_centred, b_m2


@triton.jit
def finish_tile(
    p_y, p_y1, p_stats, p_weight, p_bias, p_weight1, p_bias1, weights, b_row, b_mean, b_rstd,
    rows, m_row, first, first_col, N, stride_y, stride_y1,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, SPAN: tl.constexpr,
    LOADED: tl.constexpr, PACKED: tl.constexpr, BIAS_PAST_L1: tl.constexpr, IS_RMS: tl.constexpr, OFFSET: tl.constexpr,
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
                i, p_weight, p_bias, p_weight1, p_bias1, p_y1, first_col, N,
                BLOCK_N, TAIL_N, EVEN_N, VECTOR, BIAS_PAST_L1, SPAN, b_mean.shape[0], OFFSET,
            )  # fmt: skip
        b_xhat = reopen(b_row[i], PACKED)
        if PACKED and not IS_RMS:
            b_xhat -= b_mean[:, None]
        b_xhat *= b_rstd[:, None]
        b_y = affine(b_xhat, of_block[0], of_block[1], p_weight is not None, p_bias is not None)
        tl.store(p_y + rows[:, None] * unsigned(stride_y) + cols[None, :], b_y, mask=m)
        if p_y1 is not None:
            b_y1 = affine(b_xhat, of_block[2], of_block[3], p_weight1 is not None, p_bias1 is not None)
            tl.store(p_y1 + rows[:, None] * unsigned(stride_y1) + cols[None, :], b_y1, mask=m)
    if p_stats is not None:
        store_stats(p_stats, b_rstd, b_mean, rows, m_row & first, IS_RMS)


@triton.jit
def load_sum(
    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, p_mask, p_mask1, rows, m_row, first_col,
    N, stride_x, stride_x1, stride_residual, threshold, scale,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, PACKED: tl.constexpr,
    RESIDUAL_DTYPE: tl.constexpr, DROPOUT: tl.constexpr, EVICTION: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """dropout(x · rowscale) + dropout(x1 · rowscale1) + residual as the residual dtype rounds it, in blocks of fp32, or of that
    dtype if PACKED. EVICTION: the hint to the caches about the inputs; CACHE: which of them keep those."""
    UNTOUCHED: tl.constexpr = (
        p_x1 is None and p_residual is None and p_rowscale is None and not DROPOUT and p_x.dtype.element_ty == RESIDUAL_DTYPE
    )
    # All loads are issued before the first use.
    b_scale = load_scale(p_rowscale, rows, m_row)
    m_rowx = scaled_rows(m_row, b_scale, p_rowscale)
    RAW: tl.constexpr = UNTOUCHED and PACKED
    b_x = load_row(p_x, rows, m_rowx, stride_x, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, RAW, EVICTION, CACHE)
    if p_x1 is not None:
        b_scale1 = load_scale(p_rowscale1, rows, m_row)
        m_row1 = scaled_rows(m_row, b_scale1, p_rowscale1)
        b_x1 = load_row(p_x1, rows, m_row1, stride_x1, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, False, EVICTION, CACHE)
    if p_residual is not None:
        b_residual = load_row(
            p_residual, rows, m_row, stride_residual, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, False, EVICTION, CACHE
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
def load_weights(
    p_weight, p_bias, p_weight1, p_bias1, p_y1, first_col, N,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, BIAS_PAST_L1: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Of each block (weight, bias), and (weight1, bias1) behind them where there is a y1."""
    weights = ()
    for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
        weights += (
            load_block_weights(
                i, p_weight, p_bias, p_weight1, p_bias1, p_y1, first_col, N,
                BLOCK_N, TAIL_N, EVEN_N, VECTOR, BIAS_PAST_L1, SPAN, ROWS, OFFSET,
            ),
        )  # fmt: skip
    return weights


@triton.jit
def load_block_weights(
    i: tl.constexpr, p_weight, p_bias, p_weight1, p_bias1, p_y1, first_col, N,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, BIAS_PAST_L1: tl.constexpr,
    SPAN: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    # Where warps lie along the rows, each reads all of the weights, as many times as there are rows: read once, they would be
    # handed round through shared memory.
    TIMES: tl.constexpr = ROWS if block_width(i, BLOCK_N, TAIL_N) < SPAN else 1
    BIAS_CACHE: tl.constexpr = L2_ALONE if BIAS_PAST_L1 else L1_AND_L2
    of_block = (
        load_vector_block(i, p_weight, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, 1.0, OFFSET, TIMES),
        load_vector_block(i, p_bias, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, 0.0, 0.0, TIMES, BIAS_CACHE),
    )
    if p_y1 is not None:
        of_block += (
            load_vector_block(i, p_weight1, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, 1.0, OFFSET, TIMES),
            load_vector_block(i, p_bias1, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, 0.0, 0.0, TIMES, BIAS_CACHE),
        )
    return of_block


@triton.jit
def affine(b_xhat, b_weight, b_bias, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """x̂ · weight + bias."""
    b = b_xhat
    if WEIGHT:
        b = b * b_weight
    if BIAS:
        b = b + b_bias
    return b
