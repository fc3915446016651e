"""The statistics of rows that a program holds whole, in two passes or in one. Names as in `forward_kernels`."""

import triton
import triton.language as tl

from .row_kernels import block_cols, gather, inside, reopen, row_sum


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
def evenly_held(BLOCK_N, TAIL_N, EVEN_N, SPAN):
    """Whether all threads hold as many columns of a row, those of each block at the same places, and none past its end."""
    return EVEN_N and (TAIL_N % BLOCK_N == 0 or TAIL_N >= SPAN)


@triton.constexpr_function
def threads_of_row(width, VECTOR, SPAN):
    """How many hold columns of one row of a block."""
    return min(width, SPAN) // VECTOR


@triton.constexpr_function
def columns_of(b_r):
    return sum(b.shape[1] for b in b_r)


@triton.constexpr_function
def lanes(THREADS):
    """Of a warp, those that hold columns of one row. Half of AMD's: there two such sets are merged as if they were warps."""
    return min(THREADS, 32)


@triton.jit
def first_held(b):
    """b[:, 0, :, 0], as a sum of which the compiler sees that all other terms are nothing."""
    m = (tl.arange(0, b.shape[1]) == 0)[None, :, None, None] & (tl.arange(0, b.shape[3]) == 0)[None, None, None, :]
    b_bits = tl.where(m, b.to(tl.int32, bitcast=True), 0)  # of floats it would not: −0 + 0 is another number
    return tl.sum(tl.sum(b_bits, 3), 1).to(tl.float32, bitcast=True)


@triton.jit
def by_thread(b, THREADS: tl.constexpr, VECTOR: tl.constexpr):
    """[ROWS, width] as [ROWS, n, THREADS, VECTOR]: what a thread holds of a row, along two axes."""
    return tl.reshape(b, [b.shape[0], b.shape[1] // (THREADS * VECTOR), THREADS, VECTOR])


@triton.jit
def by_warp(b, THREADS: tl.constexpr):
    """[ROWS, THREADS] as [ROWS, warps, lanes]."""
    return tl.reshape(b, [b.shape[0], THREADS // lanes(THREADS), lanes(THREADS)])


@triton.jit
def merge(count_a, mean_a, m2_a, count_b, mean_b, m2_b):
    """Chan, Golub & LeVeque 1979: the moments of two sets as one, without cancellation."""
    # Counts, because which sets are merged first, and so how large they are, is the compiler's affair.
    count = count_a + count_b
    delta = mean_b - mean_a
    part_b = count_b * (1.0 / count)
    return count, mean_a + delta * part_b, m2_a + m2_b + delta * delta * (count_a * part_b)


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
