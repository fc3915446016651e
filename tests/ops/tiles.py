"""Tiles of every class at widths for the interpreter, and what it takes to run them there."""

from dataclasses import replace

import triton
import triton.language as tl

from ops import tiling
from ops.board_kernels import LAP_BIT
from ops.tiling import Device, Tile, Work

SHAPES = ["one block", "two blocks", "equal blocks", "looped", "split"]


def tile_for(n: int, shape: str, **fields) -> Tile:
    """A tile of this shape for rows of n columns: 33 is 64, 32 + 16, 3 · 16, 16 at a time, or 16 in each of three programs."""
    whole = max(32, triton.next_power_of_2(n))
    quarter = max(16, whole // 4)
    block_n, tail_n, slices = {
        "one block": (whole, 0, 1),
        "two blocks": (whole // 2, max(16, triton.next_power_of_2(n - whole // 2)), 1),
        "equal blocks": (quarter, (triton.cdiv(n, quarter) - 1) * quarter, 1),
        "looped": (quarter, 0, 1),
        "split": (quarter, 0, triton.cdiv(n, quarter)),
    }[shape]
    given = {"rows": 2, "warps": 4, "stages": 2, "programs_per_sm": 1, "hold_weights": True} | fields
    if slices > 1:
        given["programs_per_sm"] = max(1, given["programs_per_sm"])
    return Tile(block_n=block_n, tail_n=tail_n, slices=slices, **given)


def fitted(tile: Tile, n: int, work: Work, device: Device) -> Tile:
    """The tile as the table would give it: looped where this work can't be split, its stages what there is room for."""
    if tile.slices > 1 and not work.splittable:
        return tile_for(n, "looped", rows=tile.rows)
    return tiling.fit(tile, work, device)


@triton.jit
def read_at_once(arguments, ROWS: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr):
    """`read_words` without the wait: what would be waited for is no number."""
    p_first, lap = arguments[0], arguments[1]
    words = ()
    for i in tl.static_range(ROWS):
        for j in tl.static_range(BLOCKS):
            m = arguments[2 + j] != 0
            word = tl.load(p_first + (i * WORDS + j * LANES), mask=m, other=0)
            words += (tl.where(m & ((word & LAP_BIT) != lap), -1, word),)
    return words


class TwiceIfSplit:
    """A kernel for the interpreter, whose programs run one after another and can't wait for each other: the first time they
    publish their sums and make nothing of those of others, the second time they find all sums on the board, which must not
    come round to a place again."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        def start(*arguments, **constants):
            for _ in range(2 if constants["SLICES"] > 1 else 1):
                self.kernel[grid](*arguments, **constants)

        return start


def interpreted_device(_) -> Device:
    """Eight multiprocessors: two groups or more of the programs of a split row."""
    return replace(tiling.H200, multiprocessors=8, since_sm_90=False)
