"""How the norm kernels hold rows: as tuples of equal blocks side by side in registers.

A row of N columns is BLOCKS blocks of BLOCK_N columns, of which the last may reach past the row's end and is masked there.
Every thread holds VECTOR neighbouring columns of a block, or several times as many where a block is wider than all threads side
by side. So 2304 columns may be three blocks of 1024 columns on four warps, and 768 three of 256 on one warp for each row.
Rows that no program can hold are read one block at a time: by a loop (`Variant.LOOPED`), or each block by a program of its own
(`Variant.SLICES`). Their functions pass `at.first_col`, the first column of their block.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import INTERPRET
from .nvidia import pair_of, prefetch_rows, widen, word_of


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for. Fields in the order of their interest: the work, the tile, the machine."""

    N: int  # columns in a row
    NORM: int  # a value of `reference.Norm`
    DROPOUT: bool
    OFFSET: float  # added to weight and weight1: 1.0 where they are zero-centred
    STREAM_DTYPE: Any  # Triton's dtype of the residual stream r
    ROWS: int  # in a tile
    BLOCK_N: int  # columns in a block, a power of two
    VECTOR: int  # neighbouring columns in a thread: 16 bytes of the widest tensor
    STRIDE_UNIT: int  # a power of two by which the kernel's strides were divided, so that the compiler knows their alignment
    LOOPED: bool = False  # a row is read block by block, twice
    SLICES: int = 1  # programs that share a row, one block each
    STAGES: int = 1  # tiles in flight in backward, the one at work included
    EARLY_WEIGHTS: bool = False  # forward reads the weights before the rows
    PREFETCH: bool = False  # rows of a later tile are brought into L2
    EARLY_START: bool = False  # programmatic dependent launch: the kernel waits for the one before by itself
    WANTED: tuple[bool, ...] = ()  # which of dweight, dbias, dweight1, dbias1 backward sums up

    def __post_init__(self) -> None:
        if not INTERPRET:  # a kernel is to find constants in them; the interpreter takes plain values
            for field in fields(self):
                object.__setattr__(self, field.name, tl.constexpr(getattr(self, field.name)))


@triton.constexpr_function
def blocks(HOW):
    """How many blocks of a row a program holds."""
    return 1 if HOW.LOOPED or HOW.SLICES > 1 else -(-HOW.N // HOW.BLOCK_N)


@triton.constexpr_function
def reaches_outside(i, HOW):
    """Whether block i may reach past the row's end."""
    return HOW.N % HOW.BLOCK_N != 0 and i == blocks(HOW) - 1


class Strides(NamedTuple):
    """Of the tensors that are read by rows: from a row to the next, over Variant.STRIDE_UNIT. None where there is no tensor, or
    all rows lie next to each other, as those of outputs do."""

    dy: tl.tensor
    dy1: tl.tensor
    dr: tl.tensor
    r: tl.tensor
    x: tl.tensor
    residual: tl.tensor
    x1: tl.tensor


class Place(NamedTuple):
    """Where a program works: its rows and the first column of its first block."""

    rows: tl.tensor  # int64 [ROWS]
    m_row: tl.tensor  # int1 [ROWS]: rows that are there
    first_col: tl.tensor


@triton.jit
def place(tile, first_col, M, HOW: tl.constexpr):
    """The rows of a tile. A tile beyond the last, or before the first, has none."""
    rows = tl.full([HOW.ROWS], tile, tl.int64) * HOW.ROWS + tl.arange(0, HOW.ROWS)
    return Place(rows, (rows >= 0) & (rows < M), first_col)


@triton.jit
def block_start(i: tl.constexpr, at, HOW: tl.constexpr):
    """The first column of block i, a multiple of 8."""
    return at.first_col + i * HOW.BLOCK_N


@triton.jit
def block_cols(i: tl.constexpr, at, HOW: tl.constexpr):
    """int32 [BLOCK_N]: the columns of block i."""
    return block_start(i, at, HOW) + tl.max_contiguous(tl.arange(0, HOW.BLOCK_N), HOW.VECTOR)


@triton.jit
def block_mask(i: tl.constexpr, at, HOW: tl.constexpr):
    """int1 [ROWS, BLOCK_N], or [ROWS, 1] where the block lies inside the row."""
    m = at.m_row[:, None]
    if reaches_outside(i, HOW):
        m = m & (block_cols(i, at, HOW) < HOW.N)[None, :]
    return m


@triton.jit
def zero_outside(b, i: tl.constexpr, at, HOW: tl.constexpr):
    """Block i with zeros past the row's end."""
    if reaches_outside(i, HOW):
        b = tl.where((block_cols(i, at, HOW) < HOW.N)[None, :], b, 0.0)
    return b


@triton.jit
def offsets(i: tl.constexpr, at, stride, HOW: tl.constexpr):
    """int64 [ROWS, BLOCK_N]: where the elements of block i lie. stride: as of `row_step`."""
    return at.rows[:, None] * row_step(stride, HOW) + block_cols(i, at, HOW)[None, :]


@triton.jit
def row_step(stride, HOW: tl.constexpr):
    """From a row to the next. stride: the same over STRIDE_UNIT; None for N."""
    if stride is None:
        step = HOW.N
    else:
        step = tl.full([], stride, tl.int64) * HOW.STRIDE_UNIT  # the product may take more bits than the stride
    return step


@triton.jit
def prefetch_tile(p, stride, tile, first_col, columns, M, HOW: tl.constexpr):
    """Brings some columns of the rows of a tile into L2."""
    prefetch_rows(p, tile, M, row_step(stride, HOW), first_col, columns, HOW.ROWS)


@triton.jit
def load_rows(p, at, stride, HOW: tl.constexpr):
    """fp32 blocks, zero where masked, all loaded before any is used. An empty tuple where there is no tensor, as tuples hold no
    None."""
    b_row = ()
    if p is not None:
        for i in tl.static_range(blocks(HOW)):
            b_row += (widen(tl.load(p + offsets(i, at, stride, HOW), mask=block_mask(i, at, HOW), other=0.0)),)
    return b_row


@triton.jit
def load_weights(p, at, HOW: tl.constexpr, OFFSET: tl.constexpr = 0.0):
    """fp32 blocks [1, BLOCK_N] of a weight or bias, OFFSET added; an empty tuple where there is none."""
    b_weights = ()
    for i in tl.static_range(blocks(HOW)):
        b_weights += load_weight(p, i, at, HOW, OFFSET)
    return b_weights


@triton.jit
def load_weight(p, i: tl.constexpr, at, HOW: tl.constexpr, OFFSET: tl.constexpr = 0.0):
    """Block i alone, in a tuple."""
    b_weight = ()
    if p is not None:
        cols = block_cols(i, at, HOW)[None, :]
        if reaches_outside(i, HOW):
            b = widen(tl.load(p + cols, mask=cols < HOW.N, other=0.0))
        else:
            b = widen(tl.load(p + cols))
        if OFFSET != 0.0:
            b += OFFSET
        b_weight = (b,)
    return b_weight


@triton.jit
def row_sum(b_row):
    """fp32 [ROWS]: the sum over the columns of all blocks. Blocks are added first, so that one reduction is enough."""
    b = b_row[0]
    for i in tl.static_range(1, len(b_row)):
        b += b_row[i]
    return tl.sum(b, 1)


@triton.jit
def mean(b_sum, N):
    """b_sum / N, exact where that is a float, so that a constant row has its own mean: plain division may be 2 ulp off.

    One Newton step from sum · (1 / N), whose remainder a fused multiply-add gives exactly.
    """
    b_estimate = b_sum * (1.0 / N)
    return tl.fma(tl.fma(-b_estimate, N * 1.0, b_sum), 1.0 / N, b_estimate)


@triton.jit
def store_stats(p_stats, b_rstd, b_mean, at):
    """rstd and mean, fp32 [M, 2], the two of a row as one word: a sector of memory takes as long whatever is written of it."""
    if p_stats is not None:
        words = word_of(b_rstd, b_mean)
        tl.store(p_stats.to(tl.pointer_type(tl.int64)) + at.rows, words, mask=at.m_row)


@triton.jit
def load_stats(p_stats, at):
    """rstd and mean, fp32 [ROWS]."""
    return pair_of(tl.load(p_stats.to(tl.pointer_type(tl.int64)) + at.rows, mask=at.m_row, other=0))


@triton.jit
def load_scale(p_rowscale, at):
    """fp32 [ROWS]; None where there is no row scale."""
    b_scale = None
    if p_rowscale is not None:
        b_scale = tl.load(p_rowscale + at.rows, mask=at.m_row, other=0.0).to(tl.float32)
    return b_scale
