"""How the norm kernels hold rows: as tuples of equal blocks side by side in registers.

A row of N columns is BLOCKS blocks of BLOCK_N columns, of which the last may reach past the row's end and is masked there.
Every thread holds VECTOR neighbouring columns of a block, or several times as many where a block is wider than all threads side
by side. So 2304 columns may be three blocks of 1024 columns on four warps, and 768 three of 256 on one warp for each row.
Rows that no program can hold are read one block at a time: by a loop (`Variant.LOOPED`), or each block by a program of its own
(`Variant.SLICES`). Their functions pass `at.first_col`, the first column of their block.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .constants import Constants
from .nvidia import prefetch_rows, widen

LOG2E = tl.constexpr(1.4426950408889634)


class Weights(NamedTuple):
    """One thing for each weight of a norm: those of y, those of y1, those of the branch norm."""

    weight: Any
    bias: Any
    weight1: Any
    bias1: Any
    branch_weight: Any
    branch_bias: Any


@dataclass(frozen=True)
class Variant(Constants):
    """What a kernel is compiled for. Fields in the order of their interest: the work, the tile, the machine."""

    N: int  # columns in a row
    NORM: int  # a value of `reference.Norm`
    BRANCH: bool  # x goes through a norm of its own
    BRANCH_NORM: int
    RESIDUAL_SCALE: float
    DROPOUT: bool
    OFFSET: float  # added to the weights: 1.0 where they are zero-centred
    STREAM_DTYPE: Any  # Triton's dtype of the residual stream r
    ROWS: int  # in a tile
    BLOCK_N: int  # columns in a block, a power of two
    VECTOR: int  # neighbouring columns in a thread: 16 bytes of the widest tensor
    LOOPED: bool = False  # a row is read block by block, twice
    SLICES: int = 1  # programs that share a row, one block each
    STAGES: int = 1  # tiles in flight in backward, the one at work included
    EARLY_WEIGHTS: bool = False  # forward reads the weights before the rows
    PREFETCH: bool = False  # rows of a later tile are brought into L2
    EARLY_START: bool = False  # programmatic dependent launch: the kernel waits for the one before by itself
    WANTED: Weights | None = None  # bool: whose gradients backward sums up


@triton.constexpr_function
def blocks(VARIANT):
    """How many blocks of a row a program holds."""
    return 1 if VARIANT.LOOPED or VARIANT.SLICES > 1 else -(-VARIANT.N // VARIANT.BLOCK_N)


@triton.constexpr_function
def reaches_outside(i, VARIANT):
    """Whether block i may reach past the row's end."""
    return VARIANT.N % VARIANT.BLOCK_N != 0 and i == blocks(VARIANT) - 1


class Place(NamedTuple):
    """Where a program works: its rows and the first column of its first block."""

    rows: tl.tensor  # int64 [ROWS]
    m_row: tl.tensor  # int1 [ROWS]: rows that are there
    first_col: tl.tensor


@triton.jit
def place(tile, first_col, M, VARIANT: tl.constexpr):
    """The rows of a tile. A tile beyond the last, or before the first, has none."""
    rows = tl.full([VARIANT.ROWS], tile, tl.int64) * VARIANT.ROWS + tl.arange(0, VARIANT.ROWS)
    return Place(rows, (rows >= 0) & (rows < M), first_col)


@triton.jit
def block_start(i: tl.constexpr, at, VARIANT: tl.constexpr):
    """The first column of block i, a multiple of 8."""
    return at.first_col + i * VARIANT.BLOCK_N


@triton.jit
def block_cols(i: tl.constexpr, at, VARIANT: tl.constexpr):
    """int32 [BLOCK_N]: the columns of block i."""
    return block_start(i, at, VARIANT) + tl.max_contiguous(tl.arange(0, VARIANT.BLOCK_N), VARIANT.VECTOR)


@triton.jit
def block_mask(i: tl.constexpr, at, VARIANT: tl.constexpr):
    """int1 [ROWS, BLOCK_N], or [ROWS, 1] where the block lies inside the row."""
    m = at.m_row[:, None]
    if reaches_outside(i, VARIANT):
        m = m & (block_cols(i, at, VARIANT) < VARIANT.N)[None, :]
    return m


@triton.jit
def zero_outside(b, i: tl.constexpr, at, VARIANT: tl.constexpr):
    """Block i with zeros past the row's end."""
    if reaches_outside(i, VARIANT):
        b = tl.where((block_cols(i, at, VARIANT) < VARIANT.N)[None, :], b, 0.0)
    return b


@triton.jit
def offsets(i: tl.constexpr, at, VARIANT: tl.constexpr):
    """int64 [ROWS, BLOCK_N]: where the elements of block i lie."""
    return at.rows[:, None] * VARIANT.N + block_cols(i, at, VARIANT)[None, :]


@triton.jit
def prefetch_tile(p, tile, first_col, columns, M, VARIANT: tl.constexpr):
    """Brings some columns of the rows of a tile into L2."""
    prefetch_rows(p, tile, M, VARIANT.N, first_col, columns, VARIANT.ROWS)


@triton.jit
def load_rows(p, at, VARIANT: tl.constexpr):
    """fp32 blocks, zero where masked, all loaded before any is used. An empty tuple where there is no tensor, as tuples hold no
    None."""
    b_row = ()
    if p is not None:
        for i in tl.static_range(blocks(VARIANT)):
            b_row += (widen(tl.load(p + offsets(i, at, VARIANT), mask=block_mask(i, at, VARIANT), other=0.0)),)
    return b_row


@triton.jit
def load_weights(p, at, VARIANT: tl.constexpr, OFFSET: tl.constexpr = 0.0):
    """fp32 blocks [1, BLOCK_N] of a weight or bias, OFFSET added; an empty tuple where there is none."""
    b_weights = ()
    for i in tl.static_range(blocks(VARIANT)):
        b_weights += load_weight(p, i, at, VARIANT, OFFSET)
    return b_weights


@triton.jit
def load_weight(p, i: tl.constexpr, at, VARIANT: tl.constexpr, OFFSET: tl.constexpr = 0.0):
    """Block i alone, in a tuple."""
    b_weight = ()
    if p is not None:
        cols = block_cols(i, at, VARIANT)[None, :]
        if reaches_outside(i, VARIANT):
            b = widen(tl.load(p + cols, mask=cols < VARIANT.N, other=0.0))
        else:
            b = widen(tl.load(p + cols))
        if OFFSET != 0.0:
            b += OFFSET
        b_weight = (b,)
    return b_weight


@triton.jit
def block_of(b_row, i: tl.constexpr):
    """Block i alone, in a tuple; an empty tuple where there is none."""
    b = ()
    if len(b_row) > 0:
        b = (b_row[i],)
    return b


@triton.jit
def times(b, b_weight):
    """b · weight; an empty tuple is 1.

    Not one function with `plus`: Triton 3.6 tells calls apart by the tensors in their tuples, not by which tuple they are in. A
    call with a bias alone would run what was compiled for one with a weight alone.
    """
    if len(b_weight) > 0:
        b = b * b_weight[0]
    return b


@triton.jit
def plus(b, b_bias):
    """b + bias; an empty tuple is 0."""
    if len(b_bias) > 0:
        b = b + b_bias[0]
    return b


@triton.jit
def scaled_residual(b, VARIANT: tl.constexpr):
    if VARIANT.RESIDUAL_SCALE != 1.0:
        b = b * VARIANT.RESIDUAL_SCALE
    return b


@triton.jit
def row_sum(b_row):
    """fp32 [ROWS]: the sum over the columns of all blocks. Blocks are added first, so that one reduction is enough."""
    b = b_row[0]
    for i in tl.static_range(1, len(b_row)):
        b += b_row[i]
    return tl.sum(b, 1)


@triton.jit
def as_mask(condition):
    """A comparison of two numbers, for blocks. Triton's interpreter gives it their type, which 3.9 refuses as a mask's."""
    return tl.where(condition, True, False)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def mean(b_sum, N):
    """b_sum / N, exact where that is a float, so that a constant row has its own mean: plain division may be 2 ulp off.

    One Newton step from sum · (1 / N), whose remainder a fused multiply-add gives exactly. tl.div_rn takes more registers.
    """
    b_estimate = b_sum * (1.0 / N)
    return tl.fma(tl.fma(-b_estimate, N * 1.0, b_sum), 1.0 / N, b_estimate)


@triton.jit
def load_scale(p_rowscale, at):
    """fp32 [ROWS]; None where there is no row scale."""
    b_scale = None
    if p_rowscale is not None:
        b_scale = tl.load(p_rowscale + at.rows, mask=at.m_row, other=0.0).to(tl.float32)
    return b_scale


@triton.jit
def tanh(x):
    """To 2 ulp. Below 0.3 by the series, where the difference in the other formula has few digits."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    q = x * x
    near = x + x * q * (-1 / 3 + q * (2 / 15 + q * (-17 / 315 + q * (62 / 2835))))
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0.0, -far, far))
