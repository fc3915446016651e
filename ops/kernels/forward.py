"""The forward kernel of the norm."""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .dropout import drop
from .norms import centres, deviation, inverse, spread
from .nvidia import keep_order, narrow, widen
from .rows import (
    Place,
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
    store_stats,
    zero_outside,
)


class Pointers(NamedTuple):
    """Tensors of M rows of N, but for the weights and biases [N] and what is said; absent ones are None."""

    x: tl.tensor
    residual: tl.tensor
    x1: tl.tensor
    weight: tl.tensor
    bias: tl.tensor
    weight1: tl.tensor
    bias1: tl.tensor
    rowscale: tl.tensor  # [M]
    rowscale1: tl.tensor
    y: tl.tensor
    r: tl.tensor
    y1: tl.tensor
    mask: tl.tensor  # bool
    mask1: tl.tensor
    stats: tl.tensor  # fp32 [M, 2]: rstd and mean


class Numbers(NamedTuple):
    M: tl.tensor  # rows
    eps: tl.tensor
    threshold: tl.tensor  # of dropout: a draw below it is dropped
    scale: tl.tensor  # of what dropout keeps
    distance: tl.tensor  # how many programs later the prefetched rows are read


# A new number of rows, probability or seed must compile nothing. The numbers come one by one, as Triton would specialise those
# of a tuple whatever it is told.
@triton.jit(do_not_specialize=list(Numbers._fields), do_not_specialize_on_alignment=["p_seed"])
def norm_forward_kernel(p, p_seed, stride, M, eps, threshold, scale, distance, HOW: tl.constexpr):
    """A program for each tile of HOW.ROWS rows, of

    z = dropout(x · rowscale) + dropout(x1 · rowscale1) + residual;   r = round(z)
    x̂ = normalised r;   y = x̂ · (weight + OFFSET) + bias;   y1 likewise with weight1, bias1
    """
    n = Numbers(M, eps, threshold, scale, distance)
    if HOW.EARLY_START:
        gdc_wait()  # for the kernel before; nothing may be read or written above
    seed = 0
    if HOW.DROPOUT:
        seed = tl.load(p_seed)
    tile = tl.program_id(0)
    if HOW.PREFETCH:
        prefetch_inputs(p, stride, tile + n.distance, n.M, HOW)
    at = place(tile, 0, n.M, HOW)
    weights = ()
    if HOW.EARLY_WEIGHTS:
        for i in tl.static_range(blocks(HOW)):
            weights += (block_weights(p, i, at, HOW),)
        keep_order()
    # What is loaded here stays in registers up to its output: the row, or its first block where the rest is read twice.
    b_r = residual_stream(p, seed, stride, n, at, HOW, p.r, p.mask, p.mask1)
    b_mean = tl.zeros([HOW.ROWS], tl.float32)
    if centres(HOW.NORM):
        b_mean = mean(row_sum(b_r), min(HOW.N, blocks(HOW) * HOW.BLOCK_N))
    b_terms = ()
    for i in tl.static_range(blocks(HOW)):
        b_terms += (spread(zero_outside(deviation(b_r[i], b_mean, HOW.NORM), i, at, HOW), HOW.NORM),)
    b_spread = row_sum(b_terms)
    if HOW.LOOPED:
        b_spread, b_mean = add_rest(p, seed, stride, n, at, b_spread, b_mean, HOW)
    b_rstd = inverse(b_spread, HOW.N, n.eps, HOW.NORM)
    # Block by block: the weights of one wait for the stores of the one before, and so take no registers from it.
    for i in tl.static_range(blocks(HOW)):
        if not HOW.EARLY_WEIGHTS:
            weights += (block_weights(p, i, at, HOW),)
        store_outputs(p, b_r[i], weights[i], b_mean, b_rstd, i, at, HOW)
    if HOW.LOOPED:
        for first_col in tl.range(HOW.BLOCK_N, HOW.N, HOW.BLOCK_N, num_stages=1):
            here = Place(at.rows, at.m_row, first_col)
            b_rest = residual_stream(p, seed, stride, n, here, HOW, p.r, p.mask, p.mask1)
            store_outputs(p, b_rest[0], block_weights(p, 0, here, HOW), b_mean, b_rstd, 0, here, HOW)
    store_stats(p.stats, b_rstd, b_mean, at)


@triton.jit
def add_rest(p, seed, stride, n, at, b_spread, b_shift, HOW: tl.constexpr):
    """The spread and the mean of rows of which one block is summed up: its spread and its mean, the shift.

    Nothing is written here, so residual_out may be the residual's own buffer. A norm that centres sums d = r - shift:
    Σ (r - mean)² = Σ d² - (Σ d)² / N loses few digits then.
    """
    b_sum = tl.zeros([HOW.ROWS], tl.float32)
    for first_col in tl.range(HOW.BLOCK_N, HOW.N, HOW.BLOCK_N, num_stages=1):
        here = Place(at.rows, at.m_row, first_col)
        b_r = residual_stream(p, seed, stride, n, here, HOW, None, None, None)
        b_d = zero_outside(deviation(b_r[0], b_shift, HOW.NORM), 0, here, HOW)
        b_spread += tl.sum(spread(b_d, HOW.NORM), 1)
        b_sum += tl.sum(b_d, 1)
    b_mean = b_shift
    if centres(HOW.NORM):
        b_delta = mean(b_sum, HOW.N)
        b_mean += b_delta
        b_spread -= b_delta * b_delta * HOW.N
    return b_spread, b_mean


@triton.jit
def residual_stream(p, seed, stride, n, at, HOW: tl.constexpr, p_r, p_mask, p_mask1):
    """r = dropout(x · rowscale) + dropout(x1 · rowscale1) + residual, rounded to the dtype of the stream: fp32 blocks
    [ROWS, BLOCK_N]. Stores r and the masks where there are pointers for them."""
    # All loads are issued before the first use.
    b_scale = load_scale(p.rowscale, at)
    b_x = load_rows(p.x, rows_to_read(at, b_scale), stride.x, HOW)
    b_scale1 = load_scale(p.rowscale1, at)
    b_x1 = load_rows(p.x1, rows_to_read(at, b_scale1), stride.x1, HOW)
    b_residual = load_rows(p.residual, at, stride.residual, HOW)
    b_rounded = ()
    for i in tl.static_range(blocks(HOW)):
        b_z = branch(b_x[i], b_scale, seed, p_mask, n, i, at, HOW, 0)
        if p.x1 is not None:
            b_z += branch(b_x1[i], b_scale1, seed, p_mask1, n, i, at, HOW, 1)
        if p.residual is not None:
            b_z += b_residual[i]
        # Rounded before it is normalised: backward and all who read the stream see only that.
        b_rounded += (narrow(b_z, HOW.STREAM_DTYPE),)
    if p_r is not None:
        for i in tl.static_range(blocks(HOW)):
            tl.store(p_r + offsets(i, at, None, HOW), b_rounded[i], mask=block_mask(i, at, HOW))
    b_r = ()
    for i in tl.static_range(blocks(HOW)):
        b_r += (widen(b_rounded[i]),)
    return b_r


@triton.jit
def branch(b, b_scale, seed, p_mask, n, i: tl.constexpr, at, HOW: tl.constexpr, STREAM: tl.constexpr):
    """dropout(b · rowscale), fp32."""
    if b_scale is not None:
        b = b * b_scale[:, None]
    if HOW.DROPOUT:
        b = drop(b, seed, p_mask, at, block_start(i, at, HOW), block_mask(i, at, HOW), n, STREAM, HOW)
    return b


@triton.jit
def rows_to_read(at, b_scale):
    """at, without the rows whose scale is 0: those count as zeros, whatever they hold."""
    if b_scale is not None:
        at = Place(at.rows, at.m_row & (b_scale != 0.0), at.first_col)
    return at


@triton.jit
def block_weights(p, i: tl.constexpr, at, HOW: tl.constexpr):
    """weight, bias, weight1, bias1 of block i, as `load_weight` gives each."""
    return (
        load_weight(p.weight, i, at, HOW, HOW.OFFSET),
        load_weight(p.bias, i, at, HOW),
        load_weight(p.weight1, i, at, HOW, HOW.OFFSET),
        load_weight(p.bias1, i, at, HOW),
    )


@triton.jit
def store_outputs(p, b_r, weights, b_mean, b_rstd, i: tl.constexpr, at, HOW: tl.constexpr):
    """Stores y and y1 of block i."""
    b_xhat = deviation(b_r, b_mean, HOW.NORM) * b_rstd[:, None]
    m = block_mask(i, at, HOW)
    tl.store(p.y + offsets(i, at, None, HOW), affine(b_xhat, weights[0], weights[1]), mask=m)
    if p.y1 is not None:
        tl.store(p.y1 + offsets(i, at, None, HOW), affine(b_xhat, weights[2], weights[3]), mask=m)


@triton.jit
def affine(b, b_weight, b_bias):
    """b · weight + bias; an empty tuple is 1 and 0."""
    if len(b_weight) > 0:
        b = b * b_weight[0]
    if len(b_bias) > 0:
        b = b + b_bias[0]
    return b


@triton.jit
def prefetch_inputs(p, stride, tile, M, HOW: tl.constexpr):
    """Brings the rows of a tile into L2. Not those of an input with row scales: a row whose scale is 0 is not read."""
    if p.rowscale is None:
        prefetch_tile(p.x, stride.x, tile, 0, HOW.N, M, HOW)
    if p.rowscale1 is None:
        prefetch_tile(p.x1, stride.x1, tile, 0, HOW.N, M, HOW)
    prefetch_tile(p.residual, stride.residual, tile, 0, HOW.N, M, HOW)
