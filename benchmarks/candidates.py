"""Which tiles are worth measuring for a line of the table: what `tune` chooses from."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.cases import BACKWARD, FORWARD, Setting
from ops import tiling
from ops.tiling import Tile, Work

# Backward: the bytes of the tiles to come that a multiprocessor has asked for, within which `all_tiles` looks. With less it
# waits for memory; with more, half of the multiprocessors may be served half again as fast as the others, and the kernel ends
# with the slow half (NOTES.md, "Bytes in flight"). Tiles of one stage are tried besides.
IN_FLIGHT_BYTES = (16 * 1024, 120 * 1024)


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    direction: str
    norm: str
    work: str
    vector: int
    width: int
    weight_dtype: torch.dtype = torch.bfloat16

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.direction, self.norm, self.work, self.vector

    @property
    def case(self) -> str:
        return {"norm": "", "add": "add_", "dropout": "dropout_add_"}[self.work] + self.norm

    @property
    def traffic(self) -> Work:
        residual = 0 if self.work == "norm" else 16 // self.vector
        return Work(
            rms=self.norm == "rms",
            residual=self.work != "norm",
            dropout=self.work == "dropout",
            vector=self.vector,
            loaded_bytes=2 + residual if self.direction == FORWARD else 2 + (2 * residual or 2),
            weight_bytes=0 if self.direction == FORWARD else self.weight_dtype.itemsize,
            splittable=True,
            light_weights=self.weight_dtype.itemsize <= 2,
        )

    @property
    def setting(self) -> Setting:
        residual = None if self.work == "norm" else torch.float32 if self.vector == 4 else torch.bfloat16
        return Setting(residual_dtype=residual, weight_dtype=self.weight_dtype)

    @property
    def present(self) -> Tile:
        """The tile that a launch on an H200 takes."""
        return {FORWARD: tiling.forward_tile, BACKWARD: tiling.backward_tile}[self.direction](self.width, self.traffic)


def near_tiles(cell: Cell) -> Iterator[Tile]:
    """The tiles of this width for other work and of its neighbours for this, this cell's with one thing changed or in other
    blocks, and the ways to read a row twice."""
    own = cell.present
    near = dict.fromkeys([own, *(entry(key, cell.width) for key in tiling.TABLE if key[0] == cell.direction)])
    near |= dict.fromkeys(over_row(cell.width, entry(cell.key, width)) for width in (cell.width // 2, 2 * cell.width))
    drawing = cell.work == "dropout" and cell.direction == BACKWARD
    averaging = cell.norm == "ln" and cell.direction == FORWARD
    bounds = range(32, 129, 8) if cell.direction == FORWARD else range(64, 241, 8)
    changes: tuple[tuple[str, tuple], ...] = (
        ("rows", (own.rows // 2, own.rows * 2)),
        ("warps", (own.warps // 2, own.warps * 2)),
        (
            "programs_per_sm",
            (1, 2, 3, 4, 6, 8, 12) if own.slices > 1 else (1, 2, 3, 4) if cell.direction == BACKWARD else (0, 2, 4),
        ),
        ("stages", (1, 2, 3, 4, 5, 6) if own.programs_per_sm else (1,)),
        ("hold_weights", (False, True)),
        # Finer than the counts of programs that fit: the compiler orders instructions otherwise under each bound.
        ("max_registers", (0, *bounds) if own.slices == 1 else ()),
        ("columns", (0, 8) if cell.vector == 4 and own.slices == 1 else ()),
        ("lag", (1, 2) if own.slices > 1 else ()),
        ("draws_first", (False, True) if drawing else ()),
        ("one_pass", (False, True) if averaging else ()),
        ("past_l1", (False, True) if cell.direction == FORWARD else ()),
        ("prefetch_l2", (False, True) if cell.direction == BACKWARD or own.slices > 1 else ()),
        ("prefetch_ahead", (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0) if cell.direction == FORWARD else ()),
    )
    for field, values in changes:
        near |= dict.fromkeys(replace(own, **{field: value}) for value in values)
        if own.max_registers:  # what a bound leaves is too little for most other tiles
            near |= dict.fromkeys(replace(own, **{"max_registers": 0, field: value}) for value in values)
    if own.slices == 1:
        tiles = (own, replace(own, warps=own.warps * 2), replace(own, max_registers=0))
        shapes = [replace(tile, block_n=b, tail_n=t) for tile in tiles for b, t in _blocks(cell)]
        near |= dict.fromkeys([*shapes, *_loops(cell)])
        if cell.direction == FORWARD:  # what one shape gains by it, another may not
            near |= dict.fromkeys(replace(tile, prefetch_ahead=ahead) for tile in shapes for ahead in (0.5, 1.0, 2.0))
    else:
        variants = itertools.product((own.stages - 1, own.stages, own.stages + 1), (1, 2))
        near |= dict.fromkeys(replace(own, stages=stages, lag=lag, prefetch_l2=True) for stages, lag in variants)
    near |= dict.fromkeys(_prefetching(cell))
    if not drawing:  # to a neighbour with dropout it is a choice, here the same kernel twice
        near = dict.fromkeys(replace(tile, draws_first=False) for tile in near)
    if cell.vector == 8:  # likewise columns: eight are what it has
        near = dict.fromkeys(replace(tile, columns=0) for tile in near)
    whole = dict.fromkeys(
        replace(
            t,
            one_pass=t.one_pass and averaging and _whole(t, cell),
            past_l1=t.past_l1 and _whole(t, cell),
            prefetch_l2=t.prefetch_l2 and (t.slices > 1 or cell.direction == BACKWARD),
            prefetch_ahead=t.prefetch_ahead if _whole(t, cell) and t.programs_per_sm == 0 else 0.0,
        )
        for t in near
    )
    return (tile for tile in whole if tile == own or sensible(tile, cell))


def all_tiles(cell: Cell) -> Iterator[Tile]:
    """Every shape of tile, with most rows, warps, stages and programs that were the best of some cell, and the near ones.

    None but near ones have rows brought into L2: for another shape that is found so, run the tuner again with it in the table.
    """
    return iter(dict.fromkeys([*near_tiles(cell), *(tile for tile in _shapes(cell) if sensible(tile, cell))]))


def _shapes(cell: Cell) -> Iterator[Tile]:
    width, forward = cell.width, cell.direction == FORWARD
    rows, warps = (1, 2, 4, 8, 16, 32, 64) if width <= 512 else (1, 2, 4), (1, 2, 4, 8, 16, 32)
    if width <= 32768 and forward:
        for (block_n, tail_n), r, w, hold in itertools.product(_blocks(cell), rows, warps, (False, True)):
            yield Tile(r, block_n, tail_n, 1, w, 1, 0, hold)
            for stages, programs in itertools.product((2, 3), (1, 2, 4, 8, 16)):
                if 8 <= w * programs <= 64:
                    yield Tile(r, block_n, tail_n, 1, w, stages, programs, hold)
    elif width <= 32768:
        holds = (False, True) if width >= 2048 else (True,)
        numbers = itertools.product(_blocks(cell), rows, warps, (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 6, 8, 16), holds)
        for (block_n, tail_n), r, w, stages, programs, hold in numbers:
            tile = Tile(r, block_n, tail_n, 1, w, stages, programs, hold)
            wanted = stages == 1 or IN_FLIGHT_BYTES[0] <= in_flight(tile, cell) <= IN_FLIGHT_BYTES[1]
            if 2 <= w * programs <= 32 and wanted:
                for draws_first in (False, True) if cell.work == "dropout" else (False,):
                    for columns in (0, 8) if cell.vector == 4 else (0,):
                        yield replace(tile, draws_first=draws_first, columns=columns)
    if width >= 4096:
        counts = (1, 2, 3, 4, 6, 8, 12)
        for block_n, r, w, programs in itertools.product((512, 1024, 2048, 4096), (1, 2, 4, 8), (1, 2, 4, 8, 16), counts):
            if 8 <= w * programs <= 16 and block_n < width:
                for lag in (1, 2):
                    yield Tile(r, block_n, 0, -(-width // block_n), w, 3, programs, True, lag=lag)


def _blocks(cell: Cell) -> list[tuple[int, int]]:
    """block_n and tail_n of the ways to hold a row."""
    width = cell.width
    blocks = [(tiling.one_block(width), 0), tiling.row_blocks(width)]
    for block_n in (128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        count = -(-width // block_n)  # of equal blocks, the last of which may reach past the row's end
        if 2 <= count <= 8:
            blocks.append((block_n, (count - 1) * block_n))
    return list(dict.fromkeys(blocks))


def in_flight(tile: Tile, cell: Cell) -> int:
    """Bytes that the programs of a multiprocessor have asked for when all their stages are full."""
    columns = min(tile.block_n + tile.tail_n, cell.width)
    return (tile.stages - 1) * tile.programs_per_sm * tile.rows * columns * cell.traffic.loaded_bytes


def _loops(cell: Cell) -> Iterator[Tile]:
    """The ways to read a forward row twice. With dropout, whose draws would be made twice, none came near the others."""
    if cell.direction == FORWARD and cell.work != "dropout":
        for block_n, elements in itertools.product((1024, 2048, 4096, 8192, 16384), (4, 8, 16, 32)):
            if block_n < cell.width:
                # The compiler takes 32 for most, and up to 64 were up to 3 % faster; nobody knows why.
                for max_registers in (0, 36, 40, 48, 56, 64) if elements <= 16 else (0,):
                    yield Tile(1, block_n, 0, 1, block_n // (32 * elements), 1, 0, False, max_registers)


def _prefetching(cell: Cell) -> Iterator[Tile]:
    """Rows brought into L2, one in a program and one program on each multiprocessor: such tiles of backward gained most."""
    if cell.direction == BACKWARD and cell.width >= 1024:
        blocks = ((tiling.one_block(cell.width), 0), tiling.row_blocks(cell.width))
        for (block_n, tail_n), warps, stages, hold in itertools.product(blocks, (4, 8, 16, 32), (1, 2, 3, 4), (False, True)):
            yield Tile(1, block_n, tail_n, 1, warps, stages, 1, hold, draws_first=True, prefetch_l2=True)


def over_row(width: int, tile: Tile) -> Tile:
    """The tile of another width with the blocks of this one."""
    if tile.slices > 1:
        return replace(tile, slices=-(-width // tile.block_n))
    block_n, tail_n = tiling.row_blocks(width)
    return replace(tile, block_n=block_n, tail_n=tail_n)


def sensible(tile: Tile, cell: Cell) -> bool:
    """Whether it can run, and a thread has neither too little to do nor more than its registers hold."""
    if tile.rows < 1 or not 1 <= tile.warps <= 32:
        return False
    elements = tile.rows * (tile.block_n + tile.tail_n) / (32 * tile.warps)
    persistent = tile.programs_per_sm > 0
    held = tile.hold_weights or cell.direction == BACKWARD  # forward would stage them with each tile of a split row
    return (
        (4 if cell.width <= 512 or tile.looped(cell.width) else 8) <= elements <= (64 if cell.direction == FORWARD else 40)
        and tile.warps * max(1, tile.programs_per_sm) <= 64
        and (tile.stages > 1 or not persistent or cell.width >= 4096)
        and (persistent or (cell.direction == FORWARD and tile.stages == 1))
        and (tile.max_registers == 0 or tile.max_registers > elements)
        and not (tile.hold_weights and tile.looped(cell.width))
        and (tile.slices == 1 or (tile.slices <= 256 and persistent and tile.stages > 1 and held))
    )


def _whole(tile: Tile, cell: Cell) -> bool:
    """Whether a program holds whole rows."""
    return tile.slices == 1 and not tile.looped(cell.width)


def entry(key: tuple[str, str, str, int], width: int) -> Tile:
    """What the table has for this width."""
    entries = tiling.TABLE[key]
    return tiling.over(width, *next((entry for entry in entries if width <= entry[0]), entries[-1]), key[-1])
