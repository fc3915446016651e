"""The forward kernel of the norm."""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..records import OPERANDS, Outputs
from .dropout import drop
from .norms import centres, deviation, normalised, spread, statistic, store_stats
from .nvidia import keep_order, widen
from .rows import (
    Place,
    Weights,
    block_mask,
    block_start,
    blocks,
    load_rows,
    load_scale,
    load_weight,
    mean,
    offsets,
    place,
    prefetch_tile,
    row_sum,
    zero_outside,
)

# The tensors, as the records have them; absent ones are None.
Pointers = namedtuple("Pointers", (*OPERANDS, *Outputs._fields))


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

    z = dropout(x · rowscale) + dropout(x1 · rowscale1) + residual;   r = round(z)
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
    if VARIANT.EARLY_WEIGHTS:
        for i in tl.static_range(blocks(VARIANT)):
            weights += (block_weights(p, i, at, VARIANT),)
        keep_order()
    # What is loaded here stays in registers up to its output: the row, or its first block where the rest is read twice.
    b_r = residual_stream(p, seed, n, at, VARIANT, p.r, p.mask, p.mask1)
    b_mean = tl.zeros([VARIANT.ROWS], tl.float32)
    if centres(VARIANT.NORM):
        b_mean = mean(row_sum(b_r), min(VARIANT.N, blocks(VARIANT) * VARIANT.BLOCK_N))
    b_terms = ()
    for i in tl.static_range(blocks(VARIANT)):
        b_terms += (spread(zero_outside(deviation(b_r[i], b_mean, VARIANT.NORM), i, at, VARIANT), VARIANT.NORM),)
    b_spread = row_sum(b_terms)
    if VARIANT.LOOPED:
        b_spread, b_mean = add_rest(p, seed, n, at, b_spread, b_mean, VARIANT)
    b_rstd, b_mean = statistic(p, b_spread, b_mean, n.eps, VARIANT)
    # Block by block: the weights of one wait for the stores of the one before, and so take no registers from it.
    for i in tl.static_range(blocks(VARIANT)):
        if not VARIANT.EARLY_WEIGHTS:
            weights += (block_weights(p, i, at, VARIANT),)
        store_outputs(p, b_r[i], weights[i], b_mean, b_rstd, i, at, VARIANT)
    if VARIANT.LOOPED:
        for first_col in tl.range(VARIANT.BLOCK_N, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
            here = Place(at.rows, at.m_row, first_col)
            b_rest = residual_stream(p, seed, n, here, VARIANT, p.r, p.mask, p.mask1)
            store_outputs(p, b_rest[0], block_weights(p, 0, here, VARIANT), b_mean, b_rstd, 0, here, VARIANT)
    store_stats(p, b_rstd, b_mean, at, VARIANT)


@triton.jit
def add_rest(p, seed, n, at, b_spread, b_shift, VARIANT: tl.constexpr):
    """The spread and the mean of rows of which one block is summed up: its spread and its mean, the shift.

    Nothing is written here, so residual_out may be the residual's own buffer. A norm that centres sums d = r - shift:
    Σ (r - mean)² = Σ d² - (Σ d)² / N loses few digits then.
    """
    b_sum = tl.zeros([VARIANT.ROWS], tl.float32)
    for first_col in tl.range(VARIANT.BLOCK_N, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
        here = Place(at.rows, at.m_row, first_col)
        b_r = residual_stream(p, seed, n, here, VARIANT, None, None, None)
        b_d = zero_outside(deviation(b_r[0], b_shift, VARIANT.NORM), 0, here, VARIANT)
        b_spread += tl.sum(spread(b_d, VARIANT.NORM), 1)
        b_sum += tl.sum(b_d, 1)
    b_mean = b_shift
    if centres(VARIANT.NORM):
        b_delta = mean(b_sum, VARIANT.N)
        b_mean += b_delta
        b_spread -= b_delta * b_delta * VARIANT.N
    return b_spread, b_mean


@triton.jit
def residual_stream(p, seed, n, at, VARIANT: tl.constexpr, p_r, p_mask, p_mask1):
    """r = dropout(x · rowscale) + dropout(x1 · rowscale1) + residual, rounded to the dtype of the stream: fp32 blocks
    [ROWS, BLOCK_N]. Stores r and the masks where there are pointers for them."""
    # All loads are issued before the first use.
    b_scale = load_scale(p.rowscale, at)
    b_x = load_rows(p.x, rows_to_read(at, b_scale), VARIANT)
    b_scale1 = load_scale(p.rowscale1, at)
    b_x1 = load_rows(p.x1, rows_to_read(at, b_scale1), VARIANT)
    b_residual = load_rows(p.residual, at, VARIANT)
    b_rounded = ()
    for i in tl.static_range(blocks(VARIANT)):
        b_z = branch(b_x[i], b_scale, seed, p_mask, n, i, at, VARIANT, 0)
        if p.x1 is not None:
            b_z += branch(b_x1[i], b_scale1, seed, p_mask1, n, i, at, VARIANT, 1)
        if p.residual is not None:
            b_z += b_residual[i]
        # Rounded before it is normalised: backward and all who read the stream see only that.
        b_rounded += (b_z.to(VARIANT.STREAM_DTYPE),)
    if p_r is not None:
        for i in tl.static_range(blocks(VARIANT)):
            tl.store(p_r + offsets(i, at, VARIANT), b_rounded[i], mask=block_mask(i, at, VARIANT))
    b_r = ()
    for i in tl.static_range(blocks(VARIANT)):
        b_r += (widen(b_rounded[i]),)
    return b_r


@triton.jit
def branch(b, b_scale, seed, p_mask, n, i: tl.constexpr, at, VARIANT: tl.constexpr, STREAM: tl.constexpr):
    """dropout(b · rowscale), fp32."""
    if b_scale is not None:
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
    """The fields of Weights for block i, as `load_weight` gives each. A tuple, as Triton 3.6 forgets names inside of tuples."""
    return (
        load_weight(p.weight, i, at, VARIANT, VARIANT.OFFSET),
        load_weight(p.bias, i, at, VARIANT),
        load_weight(p.weight1, i, at, VARIANT, VARIANT.OFFSET),
        load_weight(p.bias1, i, at, VARIANT),
    )


@triton.jit
def store_outputs(p, b_r, weights, b_mean, b_rstd, i: tl.constexpr, at, VARIANT: tl.constexpr):
    """Stores y and y1 of block i."""
    w = Weights(weights[0], weights[1], weights[2], weights[3])
    b_xhat = normalised(b_r, b_mean, b_rstd, VARIANT.NORM)
    m = block_mask(i, at, VARIANT)
    tl.store(p.y + offsets(i, at, VARIANT), affine(b_xhat, w.weight, w.bias), mask=m)
    if p.y1 is not None:
        tl.store(p.y1 + offsets(i, at, VARIANT), affine(b_xhat, w.weight1, w.bias1), mask=m)


@triton.jit
def affine(b, b_weight, b_bias):
    """b · weight + bias; an empty tuple is 1 and 0."""
    if len(b_weight) > 0:
        b = b * b_weight[0]
    if len(b_bias) > 0:
        b = b + b_bias[0]
    return b


@triton.jit
def prefetch_inputs(p, tile, M, VARIANT: tl.constexpr):
    """Brings the rows of a tile into L2. Not those of an input with row scales: a row whose scale is 0 is not read."""
    if p.rowscale is None:
        prefetch_tile(p.x, tile, 0, VARIANT.N, M, VARIANT)
    if p.rowscale1 is None:
        prefetch_tile(p.x1, tile, 0, VARIANT.N, M, VARIANT)
    prefetch_tile(p.residual, tile, 0, VARIANT.N, M, VARIANT)
