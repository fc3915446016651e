"""The activation of an MLP, forward and backward: a bias is added, a function applied, and of a gated one the value multiplied.

    z = x + bias;   y = φ(z)                               dx = dy φ′(z)
    gated           y = φ(z) · v,  v = value + value_bias   dx = dy v φ′(z),   dvalue = dy φ(z);   biases: sums over the rows

Nothing of forward is kept but its inputs. A program has a tile of rows and columns; in backward with a bias it goes through
many tiles below each other and stores their sum.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .constants import Constants
from .nvidia import widen
from .rows import LOG2E, affine

GELU, GELU_TANH, SILU, RELU2 = (tl.constexpr(kind) for kind in range(4))  # of `activation.Activation`


@dataclass(frozen=True)
class ActivationVariant(Constants):
    """What a kernel is compiled for."""

    N: int  # columns of y
    ACTIVATION: int
    GATED: bool
    PACKED: bool  # x has the value behind the gate in each row, and its bias too
    ROWS: int  # in a tile
    BLOCK_N: int  # columns in it
    VECTOR: int  # neighbouring columns in a thread
    X_STEP: int  # rows of x lie a multiple of so many elements apart
    VALUE_STEP: int
    WANTED: tuple[bool, bool] = (False, False)  # the sums that backward makes: of dx, of dvalue


class Pointers(NamedTuple):
    x: Any  # [M, N], or [M, 2N] where packed
    value: Any  # [M, N]; None where packed or not gated
    bias: Any  # [N] or [2N]
    value_bias: Any  # [N]
    y: Any  # [M, N]


class BackwardPointers(NamedTuple):
    dy: Any  # [M, N]
    x: Any
    value: Any
    bias: Any
    value_bias: Any
    dx: Any  # like x
    dvalue: Any
    partials: Any  # fp32 [groups, sums wanted, N]


@triton.jit(do_not_specialize=["M", "x_steps", "value_steps"])
def activation_kernel(p, M, x_steps, value_steps, VARIANT: tl.constexpr):
    """x_steps, value_steps: how many steps a row is from the next."""
    cols = tile_cols(VARIANT)
    b_bias, b_value_bias = load_biases(p, cols, VARIANT)
    rows, m = tile_rows(tl.program_id(0) // column_blocks(VARIANT), cols, M, VARIANT)
    b_x, b_value = load_arguments(p, rows, cols, m, x_steps, value_steps, VARIANT)
    b_y, _ = activated(affine(b_x, (), b_bias), VARIANT)
    if VARIANT.GATED:
        b_y *= affine(b_value, (), b_value_bias)
    tl.store(p.y + rows[:, None] * VARIANT.N + cols[None, :], b_y.to(p.y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["M", "x_steps", "value_steps", "tiles", "groups"])
def activation_backward_kernel(p, M, x_steps, value_steps, tiles, groups, VARIANT: tl.constexpr):
    """tiles: below each other. Program i of a block of columns has tiles i, i + groups, …"""
    cols = tile_cols(VARIANT)
    b_bias, b_value_bias = load_biases(p, cols, VARIANT)
    b_sum = tl.zeros([VARIANT.ROWS, VARIANT.BLOCK_N], tl.float32)
    b_value_sum = tl.zeros([VARIANT.ROWS, VARIANT.BLOCK_N], tl.float32)
    group = tl.program_id(0) // column_blocks(VARIANT)
    for tile in tl.range(group, tiles, groups):
        rows, m = tile_rows(tile, cols, M, VARIANT)
        b_dy = widen(tl.load(p.dy + rows[:, None] * VARIANT.N + cols[None, :], mask=m, other=0.0))
        b_x, b_value = load_arguments(p, rows, cols, m, x_steps, value_steps, VARIANT)
        b_phi, b_slope = activated(affine(b_x, (), b_bias), VARIANT)
        p_dx = p.dx
        if p_dx is not None:
            p_dx += rows[:, None] * ((1 + VARIANT.PACKED) * VARIANT.N) + cols[None, :]
        if VARIANT.GATED:
            b_dvalue = b_dy * b_phi
            b_dy *= affine(b_value, (), b_value_bias)
            if p.dvalue is not None:
                o_dvalue = rows[:, None] * VARIANT.N + cols[None, :]
                tl.store(p.dvalue + o_dvalue, b_dvalue.to(p.dvalue.dtype.element_ty), mask=m)
            elif VARIANT.PACKED and p_dx is not None:
                tl.store(p_dx + VARIANT.N, b_dvalue.to(p.dx.dtype.element_ty), mask=m)
            if VARIANT.WANTED[1]:
                b_value_sum += b_dvalue
        b_dx = b_dy * b_slope
        if p_dx is not None:
            tl.store(p_dx, b_dx.to(p.dx.dtype.element_ty), mask=m)
        if VARIANT.WANTED[0]:
            b_sum += b_dx
    p_sum = p.partials
    if p_sum is not None:
        p_sum += group.to(tl.int64) * (wanted(VARIANT) * VARIANT.N) + cols
        if VARIANT.WANTED[0]:
            tl.store(p_sum, tl.sum(b_sum, 0), mask=cols < VARIANT.N)
        if VARIANT.WANTED[1]:
            tl.store(p_sum + VARIANT.WANTED[0] * VARIANT.N, tl.sum(b_value_sum, 0), mask=cols < VARIANT.N)


@triton.constexpr_function
def column_blocks(VARIANT):
    return -(-VARIANT.N // VARIANT.BLOCK_N)


@triton.constexpr_function
def wanted(VARIANT):
    """How many sums there are."""
    return sum(VARIANT.WANTED)


@triton.jit
def tile_cols(VARIANT: tl.constexpr):
    """int32 [BLOCK_N]: the columns of this program."""
    first_col = tl.program_id(0) % column_blocks(VARIANT) * VARIANT.BLOCK_N
    return first_col + tl.max_contiguous(tl.arange(0, VARIANT.BLOCK_N), VARIANT.VECTOR)


@triton.jit
def tile_rows(tile, cols, M, VARIANT: tl.constexpr):
    """int64 [ROWS], and what of the tile is there: int1 [ROWS, BLOCK_N], or [ROWS, 1] where all columns are."""
    rows = tl.full([VARIANT.ROWS], tile, tl.int64) * VARIANT.ROWS + tl.arange(0, VARIANT.ROWS)
    m = (rows < M)[:, None]
    if VARIANT.N % VARIANT.BLOCK_N != 0:
        m = m & (cols < VARIANT.N)[None, :]
    return rows, m


@triton.jit
def load_arguments(p, rows, cols, m, x_steps, value_steps, VARIANT: tl.constexpr):
    """x, of which the gate is the first half where packed, and the value, or x once more: fp32 [ROWS, BLOCK_N]."""
    p_x = p.x + rows[:, None] * (x_steps.to(tl.int64) * VARIANT.X_STEP) + cols[None, :]
    b_x = tl.load(p_x, mask=m, other=0.0)
    b_value = b_x
    if VARIANT.PACKED:
        b_value = tl.load(p_x + VARIANT.N, mask=m, other=0.0)
    elif VARIANT.GATED:
        p_value = p.value + rows[:, None] * (value_steps.to(tl.int64) * VARIANT.VALUE_STEP) + cols[None, :]
        b_value = tl.load(p_value, mask=m, other=0.0)
    return widen(b_x), widen(b_value)


@triton.jit
def load_biases(p, cols, VARIANT: tl.constexpr):
    """That of x and that of the value, as `rows.affine` takes them."""
    b_bias = load_bias(p.bias, 0, cols, VARIANT)
    b_value_bias = load_bias(p.value_bias, 0, cols, VARIANT)
    if VARIANT.PACKED:
        b_value_bias = load_bias(p.bias, VARIANT.N, cols, VARIANT)
    return b_bias, b_value_bias


@triton.jit
def load_bias(p_bias, before, cols, VARIANT: tl.constexpr):
    """In a tuple, fp32 [1, BLOCK_N]; an empty one where there is none."""
    b_bias = ()
    if p_bias is not None:
        b_bias = (widen(tl.load(p_bias + before + cols[None, :], mask=(cols < VARIANT.N)[None, :], other=0.0)),)
    return b_bias


@triton.jit
def activated(b, VARIANT: tl.constexpr):
    """φ(z) and φ′(z), fp32. `activation.reference` has the same in PyTorch."""
    if VARIANT.ACTIVATION == GELU:
        b_share = 0.5 + 0.5 * tl.erf(b * 0.7071067811865476)
        b_phi = b * b_share
        b_slope = b_share + b * tl.exp2(b * b * (-0.5 * LOG2E)) * 0.3989422804014327  # 1/√(2π)
    elif VARIANT.ACTIVATION == GELU_TANH:
        # (1 + tanh u) / 2 = σ(2u), u = √(2/π) (z + 0.044715 z³)
        b_square = b * b
        b_share = sigmoid(b * (1.5957691216057308 + 0.07135481282553533 * b_square))
        b_phi = b * b_share
        b_inner = b * (1.5957691216057308 + 0.21406443847660598 * b_square)
        b_slope = b_share + (b_share - b_share * b_share) * b_inner
    elif VARIANT.ACTIVATION == SILU:
        b_share = sigmoid(b)
        b_phi = b * b_share
        b_slope = b_share + b_phi * (1.0 - b_share)
    else:
        tl.static_assert(VARIANT.ACTIVATION == RELU2, "unknown activation")
        b_positive = tl.where(b < 0.0, 0.0, b)  # keeps NaN, as PyTorch's relu does
        b_phi = b_positive * b_positive
        b_slope = 2.0 * b_positive
    return b_phi, b_slope


@triton.jit
def sigmoid(b):
    return 1.0 / (1.0 + tl.exp2(b * -LOG2E))
