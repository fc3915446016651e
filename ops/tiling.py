"""Tile shapes: which launch a width gets, by one rule. Plain data, importable and testable without a GPU or Triton."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Tile:
    rows: int  # in a tile
    block_n: int  # columns in a block, a power of two; a row is as many blocks as it needs, the last one masked
    warps: int
    stages: int = 1  # backward: tiles in flight, the one at work included; those to come wait in shared memory
    programs_per_sm: int = 0  # backward: persistent programs; 0 in forward, where each tile has a program
    slices: int = 1  # backward: programs that share a row, one block each
    looped: bool = False  # the row is read twice, a block at a time
    hold_weights: bool = True  # backward: the weights stay in registers from tile to tile
    early_weights: bool = False  # forward: the weights are read before the rows
    prefetch: bool = False  # rows of a later tile are brought into L2
    prefetch_programs: int = 0  # forward: how many programs later that tile is


@dataclass(frozen=True)
class Work:
    """What a launch does to each column, as far as it decides the tile."""

    centres: bool  # the norm subtracts the mean: two sums a row, and usually a bias
    dropout: bool
    row_bytes: int  # read for each element of a tile's rows
    vector: int  # neighbouring columns in a thread: elements in 16 bytes of the widest tensor
    heavy: bool = False  # weights in fp32
    second: bool = False  # two norms of the same rows
    splittable: bool = True  # backward: no sums but those of one norm


class Device(NamedTuple):
    """What tiles are fitted to on another GPU than an H200."""

    multiprocessors: int
    shared_memory: int  # bytes that one multiprocessor has for its programs
    threads: int  # that one multiprocessor runs at a time
    warp_size: int
    cooperative: bool  # launches whose programs wait for each other; there is inline PTX in it, so NVIDIA only
    since_sm_90: bool  # programmatic dependent launch and prefetch into L2


H200 = Device(multiprocessors=132, shared_memory=232448, threads=2048, warp_size=32, cooperative=True, since_sm_90=True)


def forward_tile(n: int, work: Work, device: Device = H200) -> Tile:
    """The forward launch for rows of n features."""
    return Tile(1, 1024, 4)


def backward_tile(n: int, work: Work, device: Device = H200) -> Tile:
    """The backward launch for rows of n features."""
    return Tile(1, 1024, 4, 3, 2)


def most_registers(tile: Tile) -> int | None:
    """That a thread may have if all programs of a split row are to be resident; None: as many as there are."""
    most = REGISTERS // (tile.warps * 32 * tile.programs_per_sm) // 8 * 8
    return most if most < 255 else None


REGISTERS = 65536  # of 32 bits in a multiprocessor, on every GPU that Triton compiles for
