"""Tiles of every shape at widths for the interpreter, and what it takes to run them there."""

from dataclasses import replace

import triton
import triton.language as tl

from ops.kernels.exchange import LAP_BIT
from ops.tiling import Device, Tile, Work

SHAPES = ["one block", "equal blocks", "looped", "split"]


def tile_for(n: int, shape: str, **fields) -> Tile:
    """A tile of this shape for rows of n columns: 33 is 64, 3 · 16, 16 at a time, or 16 in each of three programs."""
    whole = max(32, triton.next_power_of_2(n))
    block_n = whole if shape == "one block" else max(16, whole // 4)
    slices = triton.cdiv(n, block_n) if shape == "split" else 1
    return Tile(
        **{"rows": 2, "warps": 4, "stages": 2, "programs_per_sm": 1} | fields,
        block_n=block_n,
        slices=slices,
        looped=shape == "looped",
    )


def fitted(tile: Tile, n: int, work: Work, device: Device, direction: str) -> Tile:
    """The tile as the rule could give it: looped where this work can't be split, prefetch only for a GPU that can."""
    tile = replace(tile, prefetch=tile.prefetch and device.since_sm_90)
    if direction == "forward_tile":
        return replace(tile, stages=1, programs_per_sm=0, slices=1, looped=tile.looped or tile.slices > 1)
    if tile.slices > 1 and work.splittable:
        return replace(tile, rows=1)
    return replace(tile, slices=1, looped=tile.looped or tile.slices > 1)


@triton.jit
def read_at_once(p_words, laps, m):
    """`wait_for_words` without the wait: what would be waited for is no number."""
    words = tl.load(p_words, mask=m, other=0)
    return tl.where(m & ((words & LAP_BIT) != laps), -1, words)


class TwiceIfSplit:
    """A kernel for the interpreter, whose programs run one after another and can't wait for each other: the first time they
    publish their sums and make nothing of those of others, the second time they find all of them."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        def start(*arguments, **options):
            for _ in range(2 if arguments[-1].SLICES > 1 else 1):
                self.kernel[grid](*arguments, **options)

        return start
