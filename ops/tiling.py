"""Tile shapes: which launch a width gets, by one rule for all widths. Importable and testable without a GPU or Triton.

A thread holds `vector` neighbouring columns of a block: 16 bytes of the widest tensor. A warp is 32 such vectors, and a row
is as many equal blocks as it needs, the last one masked.

    forward     a program holds one row, about 4 vectors a thread; several rows where that is less than 8 KB
    backward    persistent programs, mostly 8 warps on each multiprocessor, with up to 4096 columns in work, or one row
    split       backward rows that do not fit: 1024 columns or more in each of several programs, which exchange their sums
    looped      rows that fit nowhere: read twice, block by block (forward keeps the first block)

docs/kernels.md has the measurements behind each number.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Tile:
    rows: int  # in a tile
    block_n: int  # columns in a block, a power of two
    warps: int  # of a program
    stages: int = 1  # backward: tiles in flight, the one in work included; the others wait in shared memory
    programs_per_sm: int = 0  # backward: persistent programs; 0 in forward, where each tile has a program
    slices: int = 1  # backward: programs that share a row, one block each
    looped: bool = False  # the row is read twice, a block at a time
    early_weights: bool = False  # forward: the weights are loaded before the rows
    prefetch: bool = False  # rows of a later tile are brought into L2
    prefetch_programs: int = 0  # forward: how many programs later that tile is


@dataclass(frozen=True)
class Work:
    """What a launch does to each column, as far as it decides the tile."""

    vector: int  # neighbouring columns in a thread: elements in 16 bytes of the widest tensor
    row_bytes: int  # read for each element of a tile's rows
    weights: int  # forward: weights and biases that are read; backward: sums of weight gradients that are kept
    weight_bytes: int = 0  # forward: of those weights and biases, for each column
    written_bytes: int = 0  # backward: written for each element
    drops: bool = False  # forward: with dropout
    splittable: bool = True  # backward: a row has no sums but those of one norm
    branch: bool = False  # backward: x has a norm of its own, so that a second weight and x̂ take registers


class Device(NamedTuple):
    """Facts of the GPU that bound a tile."""

    multiprocessors: int
    shared_memory: int  # bytes that a program may have
    bandwidth: float  # of its memory, in bytes a second
    warp_size: int
    cooperative: bool  # launches whose programs wait for each other; there is inline PTX in it, so NVIDIA only
    since_sm_90: bool  # programmatic dependent launch and prefetch into L2


H200 = Device(multiprocessors=132, shared_memory=232448, bandwidth=4.9e12, warp_size=32, cooperative=True, since_sm_90=True)

KB, MB = 1024, 1024**2
REGISTERS = 65536  # of 32 bits in a multiprocessor, on every GPU that Triton compiles for
MOST_WARPS = 32  # of a program
MOST_ROWS_PREFETCHED = 4  # of a tile, as each takes some instructions: narrow rows are not prefetched
MOST_SLICES = 32  # a warp collects the sums of a row, each lane those of one program
WHOLE_FORWARD = 32768  # columns that fit the registers of one program: 32 in each of 1024 threads
WHOLE_BACKWARD = 8192  # and in backward, where up to two weight gradients stay there too; half of it with four
WHOLE_LIGHTEST = 12288  # with one weight gradient, and 4 bytes read: the backward of a plain RMSNorm in 16 bits


def forward_tile(n: int, work: Work, device: Device = H200) -> Tile:
    """The forward launch for rows of n features."""
    if n > WHOLE_FORWARD:
        return Tile(1, 128 * work.vector * MOST_WARPS, _warps(MOST_WARPS, device), looped=True)
    # Rows of one warp: about 8 KB a program, so that its start and its stores of statistics are shared by several rows.
    rows = _power_below(8 * KB / (n * work.row_bytes)) if n <= 160 * work.vector else 1
    # Weights loaded early hide their latency behind that of the rows, and take registers meanwhile: too many where a wide row
    # leaves room for few programs. Where the weights are most of what is read, they come late, and a row has fewer warps, so
    # that more programs wait side by side.
    light = 2 * rows * work.row_bytes >= work.weight_bytes
    early = light and n * work.weights <= min(2048 * work.vector, 6144 * work.row_bytes)
    warps = _power_near(rows * n / (128 * work.vector), most=1.25 if light else 1.5 if n <= 4096 else 2)
    if work.drops and work.vector == 4 and warps < MOST_WARPS // 2:
        warps *= 2  # dropout computes much for each column, so more threads share it
    warps = min(warps, rows if rows > 1 else MOST_WARPS)
    # Prefetch slows down a program that has a multiprocessor to itself.
    distance = (1 if early else 4) * MB / (rows * n * work.row_bytes)
    return Tile(
        rows,
        min(_power_above(n), 32 * work.vector * max(1, warps // rows)),
        _warps(warps, device),
        early_weights=early,
        prefetch=device.since_sm_90 and rows <= MOST_ROWS_PREFETCHED and warps < MOST_WARPS,
        prefetch_programs=max(1, round(distance)),
    )


def backward_tile(n: int, work: Work, device: Device = H200) -> Tile:
    """The backward launch for rows of n features."""
    whole = WHOLE_BACKWARD if work.weights <= 2 else WHOLE_BACKWARD // 2
    if n > (WHOLE_LIGHTEST if work.weights == 1 and work.row_bytes <= 4 else whole):
        block_n = max(1024, _power_above(-(-n // MOST_SLICES)))
        if not (work.splittable and device.cooperative and block_n <= 4096):
            warps = MOST_WARPS // 2
            return Tile(1, 32 * work.vector * warps, _warps(warps, device), 1, programs_per_sm=1, looped=True)
        # With dropout there are two gradients to write, for which one warp has too few registers. In fp32 it is two anyway.
        warps = block_n // (512 if work.written_bytes >= 4 else 128 * work.vector)
        split = Tile(1, block_n, warps, 1, max(1, 8 // warps), slices=-(-n // block_n))
        return _persistent(split, block_n, work, device, two_ahead=49)
    warps = _backward_warps(n, work)
    # LayerNorm of 16 bits without a residual takes few registers: twelve warps fit.
    programs = 3 if work.weights == 2 and work.row_bytes == 4 and 1536 <= n <= 3072 else 8 // warps
    rows = _power_below(4096 / (programs * n))
    block_n = _merged(n, min(_power_above(n), 32 * work.vector * warps))
    return _persistent(Tile(rows, block_n, warps, 1, programs), rows * n, work, device)


def sample_backward_tile(n: int, work: Work, device: Device = H200) -> Tile:
    """The backward launch for rows of samples, whose scale and gate are held beside the sums: whole rows alone.

    At least 24 KB of rows are in work on a multiprocessor, by eight to sixteen warps. Wide rows have it to themselves. More
    than two programs cover for each other, and prefetch only takes their bandwidth.
    """
    at_once = 1 if n > 4096 else math.ceil(24 * KB / (n * work.row_bytes))
    programs = min(8, at_once)
    rows, warps = _power_below(at_once / programs), max(2, _power_near(8 / programs, most=1))
    if warps == 2:
        programs += programs % 2  # a multiprocessor has four parts, each with registers of its own for whole warps
    block_n = _merged(n, min(_power_above(n), 32 * work.vector * warps))
    tile = _persistent(Tile(rows, block_n, warps, 1, programs), rows * n, work, device, two_ahead=42)
    return replace(tile, prefetch=tile.prefetch and programs <= 2)


def _merged(n: int, block_n: int) -> int:
    """The same columns in half as many blocks, as long as their number is even."""
    while -(-n // block_n) % 2 == 0 and block_n < 4096:
        block_n *= 2
    return block_n


def _backward_warps(n: int, work: Work) -> int:
    """Four, or eight for wide rows; fewer where those leave more than a quarter of all lanes idle past the row's end."""

    def padded(warps: int) -> int:
        return -(-n // (32 * work.vector * warps)) * 32 * work.vector * warps

    # Two RMSNorms of 4096 columns on four warps would spill 200 bytes a thread.
    warps = 4 if n <= 512 * work.vector and n * work.weights <= (6144 if work.branch else 8192) else 8
    if 3 * padded(warps) <= 4 * n:
        return warps
    return min((w for w in (warps, warps // 2, warps // 4) if padded(w) <= 1024 * w), key=padded)


def most_registers(tile: Tile) -> int | None:
    """That a thread may have if all programs of the launch are to be resident; None: as many as there are."""
    most = REGISTERS // (tile.warps * 32 * tile.programs_per_sm) // 8 * 8
    return most if most < 255 else None


def _persistent(tile: Tile, columns: int, work: Work, device: Device, two_ahead: int = 38) -> Tile:
    """The tile with its stages and prefetch, by the bytes that the tiles of all programs of a multiprocessor take. With more
    than two_ahead KB only one tile is ahead.

    A tile ahead waits in shared memory, and a prefetched tile in L2. Prefetch slows a launch down in three cases: the tiles
    ahead are many bytes for the memory's bandwidth; a tile reads far more than it writes; LayerNorm has three tiles ahead.
    A slower memory is kept busy by fewer tiles ahead, and by far fewer bytes. Programs that share a row wait for each other, so
    they have more.
    """
    size = columns * work.row_bytes * tile.programs_per_sm
    reads_most = work.row_bytes >= 2.5 * work.written_bytes
    scale = 1 if reads_most or tile.slices > 1 else device.bandwidth / H200.bandwidth
    ahead = 3 if size <= 20 * KB * scale else 2 if size <= two_ahead * KB * scale else 1
    staged = tile.programs_per_sm * tile.rows * -(-columns // tile.rows // tile.block_n) * tile.block_n * work.row_bytes
    while ahead and ahead * staged + tile.programs_per_sm * 2 * KB > device.shared_memory:
        ahead -= 1
    prefetch = (
        device.since_sm_90
        and tile.rows <= MOST_ROWS_PREFETCHED
        and ahead * size <= (64 if tile.slices > 1 else 96 * scale**2) * KB
        and (ahead == 1 or not (reads_most or (ahead == 3 and work.weights == 2)))
    )
    return replace(tile, warps=_warps(tile.warps, device), stages=1 + ahead, prefetch=prefetch)


def _warps(warps: int, device: Device) -> int:
    """As many threads in warps of the device's size."""
    return max(1, warps * 32 // device.warp_size)


def _power_above(n: int) -> int:
    """The smallest power of two that is not below n, 16 at least: fewer columns are less than a sector of memory."""
    return max(16, 1 << (n - 1).bit_length())


def _power_below(x: float) -> int:
    """The largest power of two that is not above x, from 1 to 128."""
    return 1 << min(7, max(0, math.floor(math.log2(x))))


def _power_near(x: float, most: float) -> int:
    """The smallest power of two p with x ≤ most · p."""
    return 1 << max(0, math.ceil(math.log2(x / most)))
