"""The forward kernel of the norm."""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..records import OPERANDS, Outputs
from .dropout import drop
from .norms import centres, deviation, inverse, load_scalars, normalised, pointwise, spread, store_stats
from .nvidia import keep_order, widen
from .rows import (
    Place,
    block_mask,
    block_of,
    block_start,
    blocks,
    load_rows,
    load_scale,
    load_weight,
    load_weights,
    mean,
    offsets,
    place,
    plus,
    prefetch_tile,
    row_sum,
    scaled_residual,
    times,
    zero_outside,
)

# The tensors, as the records have them; absent ones are None.
Pointers = namedtuple("Pointers", (*OPERANDS, *Outputs._fields))  # type: ignore[misc]


class Numbers(NamedTuple):
    M: tl.tensor  # rows
    eps: tl.tensor
    threshold: tl.tensor  # of dropout: a draw below it is dropped
    scale: tl.tensor  # of what dropout keeps
    distance: tl.tensor  # how many programs later the prefetched rows are read


# A new number of rows, probability or seed must compile nothing. The numbers come one by one, as Triton would specialise those
# of a tuple whatever it is told.
@triton.jit(do_not_specialize=list(Numbers._fields), do_not_specialize_on_alignment=["p_seed"])
def norm_forward_kernel(p, p_seed, M, eps, threshold, scale, distance, VARIANT: tl.constexpr):
    """A program for each tile of VARIANT.ROWS rows, of

    z = dropout(B(x) · rowscale) + dropout(x1 · rowscale1) + residual_scale · residual;   r = round(z)
    x̂ = normalised r;   y = x̂ · (weight + OFFSET) + bias;   y1 likewise with weight1, bias1
    """
    n = Numbers(M, eps, threshold, scale, distance)
    if VARIANT.EARLY_START:
        gdc_wait()  # for the kernel before; nothing may be read or written above
    seed = 0
    if VARIANT.DROPOUT:
        seed = tl.load(p_seed)
    tile = tl.program_id(0)
    if VARIANT.PREFETCH:
        prefetch_inputs(p, tile + n.distance, n.M, VARIANT)
    at = place(tile, 0, n.M, VARIANT)
    weights = ()
    b_branch_weight = ()
    b_branch_bias = ()
    if VARIANT.EARLY_WEIGHTS:
        b_branch_weight = load_weights(p.branch_weight, at, VARIANT, VARIANT.OFFSET)
        b_branch_bias = load_weights(p.branch_bias, at, VARIANT)
        for i in tl.static_range(blocks(VARIANT)):
            weights += (block_weights(p, i, at, VARIANT),)
        keep_order()
    b_rstd_x = tl.zeros([VARIANT.ROWS], tl.float32)
    b_mean_x = b_rstd_x
    if VARIANT.BRANCH and VARIANT.LOOPED:
        b_x = load_rows(p.x, at, VARIANT)
        b_rstd_x, b_mean_x = row_statistics(b_x, p, seed, n, at, b_rstd_x, b_mean_x, VARIANT.BRANCH_NORM, True, VARIANT)
    # What is loaded here stays in registers up to its output: the row, or its first block where the rest is read twice.
    b_r, b_rstd_x, b_mean_x = residual_stream(
        p, seed, n, at, b_rstd_x, b_mean_x, b_branch_weight, b_branch_bias, VARIANT, p.r, p.mask, p.mask1
    )
    if VARIANT.BRANCH:
        store_stats(p.branch_stats, b_rstd_x, b_mean_x, at, VARIANT.BRANCH_NORM)
    b_rstd, b_mean = row_statistics(b_r, p, seed, n, at, b_rstd_x, b_mean_x, VARIANT.NORM, False, VARIANT)
    if p.rms is not None:
        b_squares, b_peak = magnitudes(b_r, at, VARIANT)
    # Block by block: the weights of one wait for the stores of the one before, and so take no registers from it.
    for i in tl.static_range(blocks(VARIANT)):
        if not VARIANT.EARLY_WEIGHTS:
            weights += (block_weights(p, i, at, VARIANT),)
        store_outputs(p, b_r[i], weights[i], b_mean, b_rstd, i, at, VARIANT)
    if VARIANT.LOOPED:
        for first_col in tl.range(VARIANT.BLOCK_N, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
            here = Place(at.rows, at.m_row, first_col)
            b_rest, _, _ = residual_stream(p, seed, n, here, b_rstd_x, b_mean_x, (), (), VARIANT, p.r, p.mask, p.mask1)
            store_outputs(p, b_rest[0], block_weights(p, 0, here, VARIANT), b_mean, b_rstd, 0, here, VARIANT)
            if p.rms is not None:
                b_more, b_most = magnitudes(b_rest, here, VARIANT)
                b_squares += b_more
                b_peak = tl.maximum(b_peak, b_most)
    if p.rms is not None:
        tl.store(p.rms + at.rows, tl.sqrt(b_squares / VARIANT.N), mask=at.m_row)
        tl.store(p.peak + at.rows, b_peak, mask=at.m_row)
    store_stats(p.stats, b_rstd, b_mean, at, VARIANT.NORM)


@triton.jit
def row_statistics(
    b_row, p, seed, n, at, b_rstd_x, b_mean_x, NORM: tl.constexpr, OF_X: tl.constexpr, VARIANT: tl.constexpr
):  # fmt: skip
    """rstd and mean, fp32 [ROWS], of rows that are held, or of which the first block is: of x, or else of the stream."""
    if pointwise(NORM):
        b_rstd, b_mean = load_scalars(p.branch_scalars if OF_X else p.scalars, NORM, VARIANT.ROWS)
    else:
        b_mean = tl.zeros([VARIANT.ROWS], tl.float32)
        if centres(NORM):
            b_mean = mean(row_sum(b_row), min(VARIANT.N, blocks(VARIANT) * VARIANT.BLOCK_N))
        b_terms = ()
        for i in tl.static_range(blocks(VARIANT)):
            b_terms += (spread(zero_outside(deviation(b_row[i], b_mean, NORM), i, at, VARIANT), NORM),)
        b_spread = row_sum(b_terms)
        if VARIANT.LOOPED:
            b_spread, b_mean = add_rest(p, seed, n, at, b_spread, b_mean, b_rstd_x, b_mean_x, NORM, OF_X, VARIANT)
        b_rstd = inverse(b_spread, VARIANT.N, n.eps, NORM)
    return b_rstd, b_mean


@triton.jit
def magnitudes(b_row, at, VARIANT: tl.constexpr):
    """The sum of squares and the largest magnitude of rows, fp32 [ROWS]."""
    b_squares = ()
    b_peak = tl.zeros([VARIANT.ROWS], tl.float32)
    for i in tl.static_range(blocks(VARIANT)):
        b = zero_outside(b_row[i], i, at, VARIANT)
        b_squares += (b * b,)
        b_peak = tl.maximum(b_peak, tl.max(tl.abs(b), 1))
    return row_sum(b_squares), b_peak


@triton.jit
def add_rest(
    p, seed, n, at, b_spread, b_shift, b_rstd_x, b_mean_x, NORM: tl.constexpr, OF_X: tl.constexpr, VARIANT: tl.constexpr
):  # fmt: skip
    """The spread and the mean of rows of which one block is summed up: its spread and its mean, the shift.

    Nothing is written here, so residual_out may be the residual's own buffer. A norm that centres sums d = r - shift:
    Σ (r - mean)² = Σ d² - (Σ d)² / N loses few digits then.
    """
    b_sum = tl.zeros([VARIANT.ROWS], tl.float32)
    for first_col in tl.range(VARIANT.BLOCK_N, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
        here = Place(at.rows, at.m_row, first_col)
        if OF_X:
            b_row = load_rows(p.x, here, VARIANT)
        else:
            b_row, _, _ = residual_stream(p, seed, n, here, b_rstd_x, b_mean_x, (), (), VARIANT, None, None, None)
        b_d = zero_outside(deviation(b_row[0], b_shift, NORM), 0, here, VARIANT)
        b_spread += tl.sum(spread(b_d, NORM), 1)
        b_sum += tl.sum(b_d, 1)
    b_mean = b_shift
    if centres(NORM):
        b_delta = mean(b_sum, VARIANT.N)
        b_mean += b_delta
        b_spread -= b_delta * b_delta * VARIANT.N
    return b_spread, b_mean


@triton.jit
def residual_stream(
    p, seed, n, at, b_rstd_x, b_mean_x, b_branch_weight, b_branch_bias, VARIANT: tl.constexpr, p_r, p_mask, p_mask1
):  # fmt: skip
    """r = dropout(B(x) · rowscale) + dropout(x1 · rowscale1) + residual, rounded to the dtype of the stream: fp32 blocks
    [ROWS, BLOCK_N]. Stores r and the masks where there are pointers for them.

    Also returns rstd and mean of x: found here where whole rows are held, else those given. The weights of the branch may be
    loaded before."""
    # All loads are issued before the first use.
    b_scale = load_scale(p.rowscale, at)
    if VARIANT.BRANCH:
        b_x = load_rows(p.x, at, VARIANT)
    else:
        b_x = load_rows(p.x, rows_to_read(at, b_scale), VARIANT)
    b_scale1 = load_scale(p.rowscale1, at)
    b_x1 = load_rows(p.x1, rows_to_read(at, b_scale1), VARIANT)
    b_residual = load_rows(p.residual, at, VARIANT)
    if VARIANT.BRANCH and not VARIANT.LOOPED:
        b_rstd_x, b_mean_x = row_statistics(b_x, p, seed, n, at, b_rstd_x, b_mean_x, VARIANT.BRANCH_NORM, True, VARIANT)
    b_rounded = ()
    for i in tl.static_range(blocks(VARIANT)):
        b = b_x[i]
        if VARIANT.BRANCH:
            b = normalised(b, b_mean_x, b_rstd_x, VARIANT.BRANCH_NORM)
            if VARIANT.EARLY_WEIGHTS:
                b = plus(times(b, block_of(b_branch_weight, i)), block_of(b_branch_bias, i))
            else:
                weight = load_weight(p.branch_weight, i, at, VARIANT, VARIANT.OFFSET)
                b = plus(times(b, weight), load_weight(p.branch_bias, i, at, VARIANT))
            b = zero_outside(b, i, at, VARIANT)
        b_z = branch(b, b_scale, seed, p_mask, n, i, at, VARIANT, 0)
        if p.x1 is not None:
            b_z += branch(b_x1[i], b_scale1, seed, p_mask1, n, i, at, VARIANT, 1)
        if p.residual is not None:
            b_z += scaled_residual(b_residual[i], VARIANT)
        # Rounded before it is normalised: backward and all who read the stream see only that.
        b_rounded += (b_z.to(VARIANT.STREAM_DTYPE),)
    if p_r is not None:
        for i in tl.static_range(blocks(VARIANT)):
            tl.store(p_r + offsets(i, at, VARIANT), b_rounded[i], mask=block_mask(i, at, VARIANT))
    b_r = ()
    for i in tl.static_range(blocks(VARIANT)):
        b_r += (widen(b_rounded[i]),)
    return b_r, b_rstd_x, b_mean_x


@triton.jit
def branch(b, b_scale, seed, p_mask, n, i: tl.constexpr, at, VARIANT: tl.constexpr, STREAM: tl.constexpr):
    """dropout(b · rowscale), fp32."""
    if b_scale is not None:
        if VARIANT.BRANCH:  # what a norm makes of a row that counts as zeros may be no number
            b = tl.where((b_scale != 0.0)[:, None], b * b_scale[:, None], 0.0)
        else:
            b = b * b_scale[:, None]
    if VARIANT.DROPOUT:
        b = drop(b, seed, p_mask, at, block_start(i, at, VARIANT), block_mask(i, at, VARIANT), n, STREAM, VARIANT)
    return b


@triton.jit
def rows_to_read(at, b_scale):
    """at, without the rows whose scale is 0: those count as zeros, whatever they hold."""
    if b_scale is not None:
        at = Place(at.rows, at.m_row & (b_scale != 0.0), at.first_col)
    return at


@triton.jit
def block_weights(p, i: tl.constexpr, at, VARIANT: tl.constexpr):
    """The first four fields of Weights for block i, as `load_weight` gives each. A tuple, as Triton 3.6 forgets names inside of
    tuples."""
    return (
        load_weight(p.weight, i, at, VARIANT, VARIANT.OFFSET),
        load_weight(p.bias, i, at, VARIANT),
        load_weight(p.weight1, i, at, VARIANT, VARIANT.OFFSET),
        load_weight(p.bias1, i, at, VARIANT),
    )


@triton.jit
def store_outputs(p, b_r, weights, b_mean, b_rstd, i: tl.constexpr, at, VARIANT: tl.constexpr):
    """Stores y and y1 of block i."""
    b_xhat = normalised(b_r, b_mean, b_rstd, VARIANT.NORM)
    m = block_mask(i, at, VARIANT)
    tl.store(p.y + offsets(i, at, VARIANT), plus(times(b_xhat, weights[0]), weights[1]), mask=m)
    if p.y1 is not None:
        tl.store(p.y1 + offsets(i, at, VARIANT), plus(times(b_xhat, weights[2]), weights[3]), mask=m)


@triton.jit
def prefetch_inputs(p, tile, M, VARIANT: tl.constexpr):
    """Brings the rows of a tile into L2. Not those of an input with row scales: a row whose scale is 0 is not read."""
    if p.rowscale is None:
        prefetch_tile(p.x, tile, 0, VARIANT.N, M, VARIANT)
    if p.rowscale1 is None:
        prefetch_tile(p.x1, tile, 0, VARIANT.N, M, VARIANT)
    prefetch_tile(p.residual, tile, 0, VARIANT.N, M, VARIANT)
