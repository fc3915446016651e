"""Modulated norms: gated add, norm, scale and shift of each sample, forward and backward.

    r = residual + gate ⊙ x;   y = (N(r) · weight + bias) ⊙ (1 + scale) + shift      scale, shift, gate: one row a sample

    g = dy ⊙ (1 + scale) · weight;   dz = dr + the gradient of g through the norm    `norms.norm_gradient`
    dresidual = dz;   dx = dz ⊙ gate;   and with P = Σ dy · x̂, Q = Σ dy over the tokens of a sample,
    dshift = Q;   dscale = P · weight + Q · bias;   dgate = Σ dz · x
    dweight = Σ P ⊙ (1 + scale), dbias = Σ Q ⊙ (1 + scale) over the samples

A tile is some tokens of one sample. A program of backward has tiles next to each other, of one sample or of several. At the end
of each sample it stores its sums; `finish_modulated_kernel` adds up those of a sample in a fixed order.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .backward import normalised_rows, weighted
from .forward import Numbers, row_statistics
from .norms import load_stats, normalised, row_sums, store_stats, through_norm
from .nvidia import keep_order, widen
from .rows import (
    Place,
    Variant,
    block_mask,
    block_of,
    blocks,
    load_rows,
    load_weight,
    load_weights,
    offsets,
    plus,
    prefetch_tile,
    times,
)
from .weight_gradients import add_products, store_partials, sum_partials, wanted_before, zero_sums


@dataclass(frozen=True)
class ModulatedVariant(Variant):
    """WANTED: which of P, Q and dgate backward sums up."""

    STEP: int = 1  # scale, shift and gate of two samples lie a multiple of so many elements apart
    SCALE_OFFSET: float = 1.0  # added to scale


class Pointers(NamedTuple):
    x: Any  # [M, N], as are residual, y and r
    residual: Any
    scale: Any  # [samples, N], rows apart, as are shift and gate
    shift: Any
    gate: Any
    weight: Any  # [N]
    bias: Any
    y: Any
    r: Any
    stats: Any  # fp32 [M, statistics of the norm]


class BackwardPointers(NamedTuple):
    dy: Any  # [M, N], as are the three that follow
    dr: Any
    x: Any
    r: Any
    stats: Any
    scale: Any
    gate: Any
    weight: Any
    dx: Any
    dresidual: Any
    partials: Any  # fp32 [programs and samples, sums wanted, N]


class FinishPointers(NamedTuple):
    partials: Any
    scale: Any
    weight: Any
    bias: Any
    dscale: Any  # [samples, N], as are dshift and dgate
    dshift: Any
    dgate: Any
    dweight: Any  # fp32 [samples, N]: of each sample, as is dbias
    dbias: Any


@triton.jit(do_not_specialize=["M", "tokens", "tiles", "distance", "eps", "scale_steps", "shift_steps", "gate_steps"])
def modulated_forward_kernel(
    p, M, tokens, tiles, distance, eps, scale_steps, shift_steps, gate_steps, VARIANT: tl.constexpr
):  # fmt: skip
    """A program for each of the tiles of a sample. Without y it computes r alone. distance: how many tiles later the
    prefetched rows are read; the steps are from a sample to the next."""
    if VARIANT.EARLY_START:
        gdc_wait()  # for the kernel before; nothing may be read or written above
    sample = tl.program_id(0) // tiles
    at = place_of(sample, tl.program_id(0) % tiles, tokens, VARIANT)
    if VARIANT.PREFETCH:
        prefetch_tile(p.x, tl.program_id(0) + distance, 0, VARIANT.N, M, VARIANT)
        prefetch_tile(p.residual, tl.program_id(0) + distance, 0, VARIANT.N, M, VARIANT)
    p_scale = of_sample(p.scale, sample, scale_steps, VARIANT)
    p_shift = of_sample(p.shift, sample, shift_steps, VARIANT)
    p_gate = of_sample(p.gate, sample, gate_steps, VARIANT)
    b_gate = load_weights(p_gate, at, VARIANT)
    maps = ()
    if VARIANT.EARLY_WEIGHTS:
        for i in tl.static_range(blocks(VARIANT)):
            maps += (block_maps(p, p_scale, p_shift, i, at, VARIANT),)
        keep_order()
    b_x = load_rows(p.x, at, VARIANT)
    b_residual = load_rows(p.residual, at, VARIANT)
    b_r = ()
    for i in tl.static_range(blocks(VARIANT)):
        # Rounded before it is normalised: backward and all who read the stream see only that.
        b = plus(times(b_x[i], block_of(b_gate, i)), block_of(b_residual, i)).to(VARIANT.STREAM_DTYPE)
        if p.r is not None:
            tl.store(p.r + offsets(i, at, VARIANT), b, mask=block_mask(i, at, VARIANT))
        b_r += (widen(b),)
    if p.y is not None:
        b_zeros = tl.zeros([VARIANT.ROWS], tl.float32)
        n = Numbers(M, eps, 0, 1.0, distance)
        b_rstd, b_mean = row_statistics(b_r, p, 0, n, at, b_zeros, b_zeros, VARIANT.NORM, False, VARIANT)
        for i in tl.static_range(blocks(VARIANT)):
            if not VARIANT.EARLY_WEIGHTS:
                maps += (block_maps(p, p_scale, p_shift, i, at, VARIANT),)
            b = plus(times(normalised(b_r[i], b_mean, b_rstd, VARIANT.NORM), maps[i][0]), maps[i][1])
            tl.store(p.y + offsets(i, at, VARIANT), plus(times(b, maps[i][2]), maps[i][3]), mask=block_mask(i, at, VARIANT))
        store_stats(p.stats, b_rstd, b_mean, at, VARIANT.NORM)


@triton.jit(do_not_specialize=["M", "tokens", "tiles", "each", "all_tiles", "scale_steps", "gate_steps"])
def modulated_backward_kernel(
    p, M, tokens, tiles, each, all_tiles, scale_steps, gate_steps, VARIANT: tl.constexpr
):  # fmt: skip
    """tiles: of a sample; each: of a program, next to each other."""
    if VARIANT.EARLY_START:
        gdc_launch_dependents()  # the sum over partials may take its place now: it reads nothing before its own wait
        gdc_wait()  # for the kernel before; nothing may be read or written above
    first = tl.program_id(0) * each
    end = tl.minimum(first + each, all_tiles)
    for sample in tl.range(first // tiles, (end - 1) // tiles + 1, num_stages=1):
        at = place_of(sample, 0, tokens, VARIANT)
        b_scale = load_weights(of_sample(p.scale, sample, scale_steps, VARIANT), at, VARIANT, VARIANT.SCALE_OFFSET)
        b_gate = load_weights(of_sample(p.gate, sample, gate_steps, VARIANT), at, VARIANT)
        b_weight = load_weights(p.weight, at, VARIANT)
        b_sums = zero_sums(VARIANT.WANTED, blocks(VARIANT), VARIANT.ROWS, VARIANT.BLOCK_N)
        before = sample * tiles
        for tile in tl.range(tl.maximum(first, before), tl.minimum(end, before + tiles), num_stages=VARIANT.STAGES):
            if VARIANT.PREFETCH:
                prefetch_inputs(p, tile + VARIANT.STAGES - 1, M, VARIANT)
            at = place_of(sample, tile - before, tokens, VARIANT)
            b_dz = load_rows(p.dr, at, VARIANT)
            b_x = load_rows(p.x, at, VARIANT)
            if p.dy is not None:
                b_r = load_rows(p.r, at, VARIANT)
                b_dy = load_rows(p.dy, at, VARIANT)
                b_rstd, b_mean = load_stats(p.stats, None, at, VARIANT.NORM, VARIANT.ROWS)
                b_xhat = normalised_rows(b_r, b_mean, b_rstd, at, VARIANT.NORM, VARIANT)
                b_sums = add_products(b_sums, 0, b_dy, b_xhat)
                b_g = weighted(weighted(b_dy, b_scale, (), (), VARIANT), b_weight, (), (), VARIANT)
                b_c1, b_c2 = row_sums(b_g, b_xhat, VARIANT.NORM)
                b_dz = through_norm(b_dz, b_g, b_r, b_xhat, b_c1, b_c2, b_mean, b_rstd, VARIANT.NORM, VARIANT.N)
            if VARIANT.WANTED[2]:
                b_sums = add_products(b_sums, 2, b_dz, b_x)
            for i in tl.static_range(blocks(VARIANT)):
                o, m = offsets(i, at, VARIANT), block_mask(i, at, VARIANT)
                if p.dresidual is not None:
                    tl.store(p.dresidual + o, b_dz[i], mask=m)
                if p.dx is not None:
                    tl.store(p.dx + o, times(b_dz[i], block_of(b_gate, i)), mask=m)
        # Of two pairs of a program and a sample, the later one has a later place.
        store_partials(p, b_sums, tl.program_id(0) + sample, place_of(sample, 0, tokens, VARIANT), VARIANT)


@triton.jit(do_not_specialize=["tiles", "each", "scale_steps"])
def finish_modulated_kernel(
    p, tiles, each, scale_steps, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, VARIANT: tl.constexpr
):  # fmt: skip
    """A program for each block of columns of each sample. tiles, each: as in backward."""
    if VARIANT.EARLY_START:
        gdc_wait()
    N: tl.constexpr = VARIANT.N
    sample = tl.program_id(0) // tl.cdiv(N, BLOCK_N)
    cols = tl.program_id(0) % tl.cdiv(N, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = cols < N
    program = sample * tiles // each  # the first that has some of its tiles
    count = (sample * tiles + tiles - 1) // each - program + 1
    program += sample  # the first of the places of its sums
    b_product = sample_sum(p, 0, program, count, cols, BLOCK_P, VARIANT)
    b_dy = sample_sum(p, 1, program, count, cols, BLOCK_P, VARIANT)
    b_gate = sample_sum(p, 2, program, count, cols, BLOCK_P, VARIANT)
    o = sample.to(tl.int64) * N + cols
    if p.dscale is not None:
        b = b_product
        if p.weight is not None:
            b *= tl.load(p.weight + cols, mask=m, other=0.0).to(tl.float32)
        if p.bias is not None:
            b += b_dy * tl.load(p.bias + cols, mask=m, other=0.0).to(tl.float32)
        tl.store(p.dscale + o, b, mask=m)
    if p.dshift is not None:
        tl.store(p.dshift + o, b_dy, mask=m)
    if p.dgate is not None:
        tl.store(p.dgate + o, b_gate, mask=m)
    b_scale = tl.full([BLOCK_N], 1.0, tl.float32)
    if p.scale is not None:
        b_scale = tl.load(of_sample(p.scale, sample, scale_steps, VARIANT) + cols, mask=m, other=0.0).to(tl.float32)
        b_scale += VARIANT.SCALE_OFFSET
    if p.dweight is not None:
        tl.store(p.dweight + o, b_product * b_scale, mask=m)
    if p.dbias is not None:
        tl.store(p.dbias + o, b_dy * b_scale, mask=m)


@triton.jit
def sample_sum(p, j: tl.constexpr, first, count, cols, BLOCK_P: tl.constexpr, VARIANT: tl.constexpr):
    """Sum j over the tokens of a sample, fp32; zeros where it is not wanted."""
    b_sum = tl.zeros([cols.shape[0]], tl.float32)
    if VARIANT.WANTED[j]:
        each, which = wanted_before(3, VARIANT.WANTED), wanted_before(j, VARIANT.WANTED)
        b_sum = sum_partials(p.partials, first, count, each, which, cols, VARIANT.N, BLOCK_P)
    return b_sum


@triton.jit
def place_of(sample, tile, tokens, VARIANT: tl.constexpr):
    """The rows of a tile of a sample."""
    of_sample = tile * VARIANT.ROWS + tl.arange(0, VARIANT.ROWS)
    return Place(tl.full([VARIANT.ROWS], sample, tl.int64) * tokens + of_sample, of_sample < tokens, 0)


@triton.jit
def of_sample(p, sample, steps, VARIANT: tl.constexpr):
    """Where scale, shift or gate of a sample begin; None where there are none."""
    p_row = None
    if p is not None:
        p_row = p + tl.full([], sample, tl.int64) * steps * VARIANT.STEP
    return p_row


@triton.jit
def block_maps(p, p_scale, p_shift, i: tl.constexpr, at, VARIANT: tl.constexpr):
    """weight, bias, 1 + scale and shift of block i, as `load_weight` gives each."""
    return (
        load_weight(p.weight, i, at, VARIANT),
        load_weight(p.bias, i, at, VARIANT),
        load_weight(p_scale, i, at, VARIANT, VARIANT.SCALE_OFFSET),
        load_weight(p_shift, i, at, VARIANT),
    )


@triton.jit
def prefetch_inputs(p, tile, M, VARIANT: tl.constexpr):
    """Brings rows of a tile into L2: of later samples they are a little off where a sample is no whole number of tiles."""
    prefetch_tile(p.dr, tile, 0, VARIANT.N, M, VARIANT)
    prefetch_tile(p.x, tile, 0, VARIANT.N, M, VARIANT)
    prefetch_tile(p.dy, tile, 0, VARIANT.N, M, VARIANT)
    if p.dy is not None:
        prefetch_tile(p.r, tile, 0, VARIANT.N, M, VARIANT)
