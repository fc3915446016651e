"""Tile shapes: which launch a width gets. Plain data, importable and testable without a GPU or Triton.

The kernels work on tiles of `rows` × `block_n` elements. A row that fits one tile is held in registers between its statistics
and its output; a wider row is looped over in blocks of `block_n` columns and read twice, the second time from L2.

The thresholds were measured on an H200 (bf16, 32768 rows) with the kernels in `kernels.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardTile:
    rows: int  # rows in a tile
    block_n: int  # columns in a tile: a power of two
    warps: int


@dataclass(frozen=True)
class BackwardTile:
    rows: int  # rows in a tile; weight gradients are kept in registers as [rows, block_n]
    block_n: int  # columns in a tile: a power of two
    warps: int
    stages: int  # software pipeline depth of the loop over row tiles
    programs_per_sm: int  # persistent programs, each of which writes one partial row of every weight gradient


# Widest row that stays in registers. Forward holds one fp32 tile and what it loads; backward holds three, and from 16384
# columns on it spills (LayerNorm at 16384: half the bandwidth of 8192).
FORWARD_SINGLE_TILE = 32768
BACKWARD_SINGLE_TILE = 8192
LOOPED_BLOCK_N = 4096

MIN_BLOCK_N = 16


def forward_tile(n: int) -> ForwardTile:
    """The forward launch for rows of n features."""
    if n > FORWARD_SINGLE_TILE:
        return ForwardTile(rows=1, block_n=LOOPED_BLOCK_N, warps=8)
    block_n = max(MIN_BLOCK_N, next_power_of_2(n))
    # 4096 elements a tile: 16 bytes of bf16 for each of 128 threads, four times over.
    rows = max(1, min(32, 4096 // block_n))
    return ForwardTile(rows, block_n, warps=max(4, min(16, rows * block_n // 1024)))


def backward_tile(n: int) -> BackwardTile:
    """The backward launch for rows of n features."""
    if n > BACKWARD_SINGLE_TILE:
        return BackwardTile(rows=1, block_n=LOOPED_BLOCK_N, warps=8, stages=1, programs_per_sm=2)
    block_n = max(MIN_BLOCK_N, next_power_of_2(n))
    rows = max(1, min(32, 4096 // block_n))
    # Two programs a SM hide each other's reductions while their tiles are small; wider tiles need a SM's registers alone.
    return BackwardTile(
        rows,
        block_n,
        warps=max(4, min(16, rows * block_n // 512)),
        stages=3,
        programs_per_sm=2 if block_n <= 1024 else 1,
    )


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
