"""What forward does with a tile: read and add up, take statistics, finish and store. Names as in `forward_kernels`."""

import triton
import triton.language as tl

from .conversion_kernels import narrow, rounded
from .dropout_kernels import drop_block
from .row_kernels import (
    block_cols,
    block_count,
    block_mask,
    block_start,
    gather,
    inside,
    load_row,
    load_vector_block,
    reopen,
    row_sum,
    store_row,
    unsigned,
)


@triton.jit
def begin_tile(
    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, p_r, p_mask, p_mask1, rows, m_row,
    N, stride_x, stride_x1, stride_residual, stride_r, threshold, scale,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr,
    PACKED: tl.constexpr, ONE_PASS: tl.constexpr, SPAN: tl.constexpr, IN_PLACE: tl.constexpr, RESIDUAL_DTYPE: tl.constexpr,
    IS_RMS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Of whole rows r, stored if it is wanted, the mean, r − mean and Σ (r − mean)²; for RMSNorm r, 0, r and Σ r²."""
    b_r = load_sum(
        p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, p_mask, p_mask1, rows, m_row, 0,
        N, stride_x, stride_x1, stride_residual, threshold, scale,
        BLOCK_N, TAIL_N, EVEN_N, VECTOR, PACKED, RESIDUAL_DTYPE, DROPOUT, "",
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
        tl.store(p_y + rows[:, None] * unsigned(stride_y) + cols[None, :], b_y, mask=m)
        if p_y1 is not None:
            b_y1 = affine(b_xhat, of_block[2], of_block[3], p_weight1 is not None, p_bias1 is not None)
            tl.store(p_y1 + rows[:, None] * unsigned(stride_y1) + cols[None, :], b_y1, mask=m)
    if p_stats is not None:
        store_stats(p_stats, b_rstd, b_mean, rows, m_row & first, M, IS_RMS)


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
def two_pass_moments(
    b_r, N,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, PACKED: tl.constexpr,
    SPAN: tl.constexpr, IS_RMS: tl.constexpr,
):  # fmt: skip
    """mean and Σ (r − mean)², fp32 [ROWS]; for RMSNorm 0 and Σ r²."""
    # Block by block, so that only one at a time is in fp32 where the others wait PACKED.
    b_mean = tl.zeros([b_r[0].shape[0]], tl.float32)
    if not IS_RMS:
        b_terms = ()
        for i in tl.static_range(len(b_r)):
            b_terms = gather(b_terms, reopen(b_r[i], PACKED))
        b_mean = quotient(row_sum(b_terms, SPAN), tl.cast(N, tl.float32))  # one column is a constant
    b_squares = ()
    for i in tl.static_range(len(b_r)):
        b = centre(i, reopen(b_r[i], PACKED), b_mean, 0, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, IS_RMS)
        b_squares = gather(b_squares, b * b)
    return b_mean, row_sum(b_squares, SPAN)


@triton.constexpr_function
def evenly_held(BLOCK_N, TAIL_N, EVEN_N, SPAN):
    """Whether all threads hold as many columns of a row, those of each block at the same places, and none past its end."""
    return EVEN_N and (TAIL_N % BLOCK_N == 0 or TAIL_N >= SPAN)


@triton.jit
def one_pass_moments(b_r, VECTOR: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr):
    """`two_pass_moments` of an evenly held row, with one wait for other warps. What a thread holds is summed around one of its
    elements, what a warp holds around its mean, and those of the warps are merged.

    Σ (r − mean)² = Σ d² − (Σ d)² / n loses up to log₂ n bits, where d = r − one of the n elements that a thread holds (64 at
    most): Σ d² is up to n times as large. So if that one is far from all others, it overflows from 2 · 10¹⁸ on, not 2 · 10¹⁹.
    """
    # The axes follow what a thread and a warp hold. Should the compiler lay a row out otherwise, it is slower and as accurate.
    THREADS: tl.constexpr = threads_of_row(b_r[0].shape[1], VECTOR, SPAN)
    HELD: tl.constexpr = columns_of(b_r) // THREADS
    b_shift = first_held(by_thread(reopen(b_r[0], PACKED), THREADS, VECTOR))
    b_sum = tl.zeros(b_shift.shape, tl.float32)
    b_squares = tl.zeros(b_shift.shape, tl.float32)
    for i in tl.static_range(len(b_r)):
        b_d = by_thread(reopen(b_r[i], PACKED), THREADS, VECTOR) - b_shift[:, None, :, None]
        b_sum += tl.sum(tl.sum(b_d, 3), 1)
        b_squares += tl.sum(tl.sum(b_d * b_d, 3), 1)
    b_delta = b_sum * (1.0 / HELD)

    b_means = by_warp(b_shift + b_delta, THREADS)
    b_mean = tl.sum(b_means, 2) * (1.0 / b_means.shape[2])
    b_deviations = b_means - b_mean[:, :, None]
    b_m2 = tl.sum(by_warp(b_squares - b_sum * b_delta, THREADS) + HELD * (b_deviations * b_deviations), 2)
    b_count = tl.full(b_mean.shape, HELD * b_means.shape[2], tl.float32)
    b_count, b_mean, b_m2 = tl.reduce((b_count, b_mean, b_m2), 1, merge)
    if b_mean.shape[0] == 1:
        # A number has no layout: else the compiler would bring the row into that of the reduction.
        b_mean, b_m2 = tl.full([1], tl.sum(b_mean, 0), tl.float32), tl.full([1], tl.sum(b_m2, 0), tl.float32)
    return b_mean, b_m2


@triton.constexpr_function
def columns_of(b_r):
    return sum(b.shape[1] for b in b_r)


@triton.constexpr_function
def threads_of_row(width, VECTOR, SPAN):
    """How many hold columns of one row of a block."""
    return min(width, SPAN) // VECTOR


@triton.constexpr_function
def lanes(THREADS):
    """Of a warp, those that hold columns of one row. Half of AMD's: there two such sets are merged as if they were warps."""
    return min(THREADS, 32)


@triton.jit
def by_thread(b, THREADS: tl.constexpr, VECTOR: tl.constexpr):
    """[ROWS, width] as [ROWS, n, THREADS, VECTOR]: what a thread holds of a row, along two axes."""
    return tl.reshape(b, [b.shape[0], b.shape[1] // (THREADS * VECTOR), THREADS, VECTOR])


@triton.jit
def by_warp(b, THREADS: tl.constexpr):
    """[ROWS, THREADS] as [ROWS, warps, lanes]."""
    return tl.reshape(b, [b.shape[0], THREADS // lanes(THREADS), lanes(THREADS)])


@triton.jit
def first_held(b):
    """b[:, 0, :, 0], as a sum of which the compiler sees that all other terms are nothing."""
    m = (tl.arange(0, b.shape[1]) == 0)[None, :, None, None] & (tl.arange(0, b.shape[3]) == 0)[None, None, None, :]
    b_bits = tl.where(m, b.to(tl.int32, bitcast=True), 0)  # of floats it would not: −0 + 0 is another number
    return tl.sum(tl.sum(b_bits, 3), 1).to(tl.float32, bitcast=True)


@triton.jit
def merge(count_a, mean_a, m2_a, count_b, mean_b, m2_b):
    """Chan, Golub & LeVeque 1979: the moments of two sets as one, without cancellation."""
    # Counts, because which sets are merged first, and so how large they are, is the compiler's affair.
    count = count_a + count_b
    delta = mean_b - mean_a
    part_b = count_b * (1.0 / count)
    return count, mean_a + delta * part_b, m2_a + m2_b + delta * delta * (count_a * part_b)


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
