"""The activation of a gated MLP and its product with the value, forward and backward.

    y = φ(gate) · value            dgate = dy value φ′(gate),   dvalue = dy φ(gate)

Nothing of forward is kept but its inputs. A program has a tile of rows and columns.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .constants import Constants
from .nvidia import widen
from .rows import LOG2E

GELU, GELU_TANH, SILU = (tl.constexpr(kind) for kind in range(3))  # of `activation.Activation`


@dataclass(frozen=True)
class ActivationVariant(Constants):
    """What a kernel is compiled for."""

    N: int  # columns of y
    ACTIVATION: int
    PACKED: bool  # x has the value behind the gate in each row
    ROWS: int  # in a tile
    BLOCK_N: int  # columns in it
    VECTOR: int  # neighbouring columns in a thread
    X_STEP: int  # rows of x lie a multiple of so many elements apart
    VALUE_STEP: int


class Pointers(NamedTuple):
    x: Any  # [M, N], or [M, 2N] where packed
    value: Any  # [M, N]; None where packed
    y: Any  # [M, N]


class BackwardPointers(NamedTuple):
    dy: Any  # [M, N]
    x: Any
    value: Any
    dx: Any  # like x
    dvalue: Any


@triton.jit(do_not_specialize=["M", "x_steps", "value_steps"])
def gated_activation_kernel(p, M, x_steps, value_steps, VARIANT: tl.constexpr):
    """x_steps, value_steps: how many steps a row is from the next."""
    rows, cols, m = tile_of(M, VARIANT)
    b_gate, b_value = load_arguments(p, rows, cols, m, x_steps, value_steps, VARIANT)
    b_phi, _ = activated(b_gate, VARIANT)
    b_y = b_phi * b_value
    tl.store(p.y + rows[:, None] * VARIANT.N + cols[None, :], b_y.to(p.y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["M", "x_steps", "value_steps"])
def gated_activation_backward_kernel(p, M, x_steps, value_steps, VARIANT: tl.constexpr):
    rows, cols, m = tile_of(M, VARIANT)
    o_row = rows[:, None] * VARIANT.N + cols[None, :]
    b_dy = widen(tl.load(p.dy + o_row, mask=m, other=0.0))
    b_gate, b_value = load_arguments(p, rows, cols, m, x_steps, value_steps, VARIANT)
    b_phi, b_slope = activated(b_gate, VARIANT)
    p_dx = p.dx
    if p_dx is not None:
        p_dx += rows[:, None] * ((1 + VARIANT.PACKED) * VARIANT.N) + cols[None, :]
        if VARIANT.PACKED:
            tl.store(p_dx + VARIANT.N, (b_dy * b_phi).to(p.dx.dtype.element_ty), mask=m)
        tl.store(p_dx, (b_dy * b_value * b_slope).to(p.dx.dtype.element_ty), mask=m)
    if p.dvalue is not None:
        tl.store(p.dvalue + o_row, (b_dy * b_phi).to(p.dvalue.dtype.element_ty), mask=m)


@triton.jit
def tile_of(M, VARIANT: tl.constexpr):
    """int64 [ROWS] and int32 [BLOCK_N] of this program, and what of the tile is there: int1 [ROWS, BLOCK_N], or [ROWS, 1]
    where all columns are."""
    blocks: tl.constexpr = (VARIANT.N + VARIANT.BLOCK_N - 1) // VARIANT.BLOCK_N
    first_col = tl.program_id(0) % blocks * VARIANT.BLOCK_N
    cols = first_col + tl.max_contiguous(tl.arange(0, VARIANT.BLOCK_N), VARIANT.VECTOR)
    rows = tl.full([VARIANT.ROWS], tl.program_id(0) // blocks, tl.int64) * VARIANT.ROWS + tl.arange(0, VARIANT.ROWS)
    m = (rows < M)[:, None]
    if VARIANT.N % VARIANT.BLOCK_N != 0:
        m = m & (cols < VARIANT.N)[None, :]
    return rows, cols, m


@triton.jit
def load_arguments(p, rows, cols, m, x_steps, value_steps, VARIANT: tl.constexpr):
    """Gate and value: fp32 [ROWS, BLOCK_N]."""
    p_x = p.x + rows[:, None] * (x_steps.to(tl.int64) * VARIANT.X_STEP) + cols[None, :]
    b_gate = tl.load(p_x, mask=m, other=0.0)
    if VARIANT.PACKED:
        p_value = p_x + VARIANT.N
    else:
        p_value = p.value + rows[:, None] * (value_steps.to(tl.int64) * VARIANT.VALUE_STEP) + cols[None, :]
    return widen(b_gate), widen(tl.load(p_value, mask=m, other=0.0))


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
    else:
        tl.static_assert(VARIANT.ACTIVATION == SILU, "unknown activation")
        b_share = sigmoid(b)
        b_phi = b * b_share
        b_slope = b_share + b_phi * (1.0 - b_share)
    return b_phi, b_slope


@triton.jit
def sigmoid(b):
    return 1.0 / (1.0 + tl.exp2(b * -LOG2E))
