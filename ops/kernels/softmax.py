"""Softmax and log-softmax of rows, forward and backward.

    z = scale · x + mask;   m = max_j z_j;   s = Σ_j exp(z_j − m)
    softmax      y = exp(z − m) / s            dz = y (dy − Σ_j y_j dy_j)
    log-softmax  y = z − m − log s             dz = dy − exp(y) Σ_j dy_j            dx = scale · dz

A boolean mask is 0 where true, and −∞ where false, where x has no gradient. Rows lie in registers as `rows` describes; of
rows that are too wide the first block does, and the rest is read twice.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .constants import Constants
from .cross_entropy import INF, join_sums
from .nvidia import widen
from .rows import (
    LOG2E,
    Place,
    block_cols,
    block_mask,
    blocks,
    load_rows,
    offsets,
    place,
    prefetch_tile,
    reaches_outside,
    row_sum,
)


@dataclass(frozen=True)
class SoftmaxVariant(Constants):
    """What a kernel is compiled for."""

    N: int  # columns in a row
    LOG: bool
    ROWS: int  # in a tile
    BLOCK_N: int  # columns in a block, a power of two
    VECTOR: int  # neighbouring columns in a thread
    LOOPED: bool = False  # all blocks but the first are read twice
    MASK_COLS: int = 1  # from a column of the mask to the next: 0 where one value is for the whole row
    PREFETCH: bool = False
    SLICES: int = 1  # of `rows`: no program shares a row


class Pointers(NamedTuple):
    x: Any  # [M, N]
    mask: Any  # its rows lie as MaskRows says; None: there is none
    y: Any


class BackwardPointers(NamedTuple):
    y: Any
    dy: Any
    mask: Any  # the boolean one, if there was one
    dx: Any


class MaskRows(NamedTuple):
    """Row r of x has row s0 · (r / (n1 n2)) + s1 · (r / n2 mod n1) + s2 · (r mod n2) of the mask."""

    n1: Any
    n2: Any
    s0: Any
    s1: Any
    s2: Any


@triton.jit(do_not_specialize=["M", "scale", "distance"])
def softmax_kernel(p, mask_rows, M, scale, distance, VARIANT: tl.constexpr):
    """A program for each tile of VARIANT.ROWS rows."""
    tile = tl.program_id(0)
    if VARIANT.PREFETCH:
        prefetch_tile(p.x, tile + distance, 0, VARIANT.N, M, VARIANT)
    at = place(tile, 0, M, VARIANT)
    b_z = scores(p.x, p.mask, mask_rows, scale, at, VARIANT)
    b_max = b_z[0]
    for i in tl.static_range(1, blocks(VARIANT)):
        b_max = tl.maximum(b_max, b_z[i])
    if VARIANT.LOOPED:
        b_sum = tl.where(b_max == -INF, 0.0, 1.0)
        for first_col in tl.range(VARIANT.BLOCK_N, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
            b_rest = scores(p.x, p.mask, mask_rows, scale, Place(at.rows, at.m_row, first_col), VARIANT)[0]
            b_max, b_sum = join_sums(b_max, b_sum, b_rest, tl.where(b_rest == -INF, 0.0, 1.0))
        m, s = tl.reduce((b_max, b_sum), 1, join_sums)
    else:
        m = tl.max(b_max, 1)
    b_e = ()
    for i in tl.static_range(blocks(VARIANT)):
        b_e += (tl.exp2((b_z[i] - m[:, None]) * LOG2E),)
    if not VARIANT.LOOPED:
        s = row_sum(b_e)
    if VARIANT.LOG:
        shift = tl.log(s.to(tl.float64)).to(tl.float32)
    else:
        shift = 1.0 / s
    for i in tl.static_range(blocks(VARIANT)):
        if VARIANT.LOG:
            b_y = b_z[i] - m[:, None] - shift[:, None]
        else:
            b_y = b_e[i] * shift[:, None]
        tl.store(p.y + offsets(i, at, VARIANT), b_y.to(p.y.dtype.element_ty), mask=block_mask(i, at, VARIANT))
    if VARIANT.LOOPED:
        for first_col in tl.range(VARIANT.BLOCK_N, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
            here = Place(at.rows, at.m_row, first_col)
            b_y = scores(p.x, p.mask, mask_rows, scale, here, VARIANT)[0] - m[:, None]
            if VARIANT.LOG:
                b_y -= shift[:, None]
            else:
                b_y = tl.exp2(b_y * LOG2E) * shift[:, None]
            tl.store(p.y + offsets(0, here, VARIANT), b_y.to(p.y.dtype.element_ty), mask=block_mask(0, here, VARIANT))


@triton.jit
def scores(p_x, p_mask, mask_rows, scale, at, VARIANT: tl.constexpr):
    """z: fp32 blocks, -inf past the row's end."""
    b_x = load_rows(p_x, at, VARIANT)
    b_z = ()
    for i in tl.static_range(len(b_x)):
        b = b_x[i] * scale
        if p_mask is not None:
            b_mask = load_mask(p_mask, mask_rows, i, at, VARIANT)
            if p_mask.dtype.element_ty.primitive_bitwidth <= 8:
                b = tl.where(b_mask != 0, b, -INF)
            else:
                b += b_mask.to(tl.float32)
        if reaches_outside(i, VARIANT):
            b = tl.where((block_cols(i, at, VARIANT) < VARIANT.N)[None, :], b, -INF)
        b_z += (b,)
    return b_z


@triton.jit
def load_mask(p_mask, r, i: tl.constexpr, at, VARIANT: tl.constexpr):
    """Block i. r: MaskRows."""
    o_row = at.rows // (r.n1 * r.n2) * r.s0 + at.rows // r.n2 % r.n1 * r.s1 + at.rows % r.n2 * r.s2
    cols = block_cols(i, at, VARIANT) * VARIANT.MASK_COLS
    return tl.load(p_mask + o_row[:, None] + cols[None, :], mask=block_mask(i, at, VARIANT), other=0)


@triton.jit(do_not_specialize=["M", "scale", "distance"])
def softmax_backward_kernel(p, mask_rows, M, scale, distance, VARIANT: tl.constexpr):
    """A program for each tile of VARIANT.ROWS rows."""
    tile = tl.program_id(0)
    if VARIANT.PREFETCH:
        prefetch_tile(p.y, tile + distance, 0, VARIANT.N, M, VARIANT)
        prefetch_tile(p.dy, tile + distance, 0, VARIANT.N, M, VARIANT)
    at = place(tile, 0, M, VARIANT)
    b_y = load_narrow(p.y, at, VARIANT)
    b_dy = load_narrow(p.dy, at, VARIANT)
    b_terms = ()
    for i in tl.static_range(blocks(VARIANT)):
        b_terms += (term(b_y[i], b_dy[i], VARIANT),)
    if VARIANT.LOOPED:
        b_sum = term(b_y[0], b_dy[0], VARIANT)
        for first_col in tl.range(VARIANT.BLOCK_N, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
            here = Place(at.rows, at.m_row, first_col)
            b_sum += term(load_narrow(p.y, here, VARIANT)[0], load_narrow(p.dy, here, VARIANT)[0], VARIANT)
        s = tl.sum(b_sum, 1)
    else:
        s = row_sum(b_terms)
    for i in tl.static_range(blocks(VARIANT)):
        b_dx = input_gradient(b_y[i], b_dy[i], s, scale, p.mask, mask_rows, i, at, VARIANT)
        tl.store(p.dx + offsets(i, at, VARIANT), b_dx.to(p.dx.dtype.element_ty), mask=block_mask(i, at, VARIANT))
    if VARIANT.LOOPED:
        for first_col in tl.range(VARIANT.BLOCK_N, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
            here = Place(at.rows, at.m_row, first_col)
            b_y_rest, b_dy_rest = load_narrow(p.y, here, VARIANT)[0], load_narrow(p.dy, here, VARIANT)[0]
            b_dx = input_gradient(b_y_rest, b_dy_rest, s, scale, p.mask, mask_rows, 0, here, VARIANT)
            tl.store(p.dx + offsets(0, here, VARIANT), b_dx.to(p.dx.dtype.element_ty), mask=block_mask(0, here, VARIANT))


@triton.jit
def load_narrow(p, at, VARIANT: tl.constexpr):
    """Blocks in their own dtype, in which two rows take as few registers as one in fp32; zero where masked."""
    b_row = ()
    for i in tl.static_range(blocks(VARIANT)):
        b_row += (tl.load(p + offsets(i, at, VARIANT), mask=block_mask(i, at, VARIANT), other=0.0),)
    return b_row


@triton.jit
def term(b_y, b_dy, VARIANT: tl.constexpr):
    """What is summed up over a row; past its end both are 0."""
    if VARIANT.LOG:
        b = widen(b_dy)
    else:
        b = widen(b_y) * widen(b_dy)
    return b


@triton.jit
def input_gradient(b_y, b_dy, s, scale, p_mask, mask_rows, i: tl.constexpr, at, VARIANT: tl.constexpr):
    b_y, b_dy = widen(b_y), widen(b_dy)
    if VARIANT.LOG:
        b = b_dy - tl.exp2(b_y * LOG2E) * s[:, None]
    else:
        b = b_y * (b_dy - s[:, None])
    if p_mask is not None:  # y does not tell: it is NaN in a row that is hidden throughout, and -inf in fp16 soon
        b = tl.where(load_mask(p_mask, mask_rows, i, at, VARIANT) != 0, b, 0.0)
    return b * scale
