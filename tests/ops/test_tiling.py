"""The rule for tiles, at every width and for all kinds of work: what must hold whatever is fast."""

from itertools import product

import pytest

from ops.tiling import Work, backward_tile, forward_tile

from .test_launch import DEVICES

WIDTHS = [
    *range(1, 300, 7), *range(320, 16_385, 64),
    1002, 1023, 1025, 12_287, 20_004, 32_768, 40_000, 50_257, 65_536, 262_144, 10**6,
]  # fmt: skip
WORKS = [
    Work(vector, row_bytes, weights, written_bytes, splittable)
    for (row_bytes, vector), written_bytes, weights, splittable in product(
        ((2, 8), (4, 8), (6, 4), (8, 8), (12, 4), (20, 4)), (2, 6), (1, 2, 4), (False, True)
    )
    if not (weights == 4 and splittable)
]


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("choose", [forward_tile, backward_tile])
def test_a_tile_holds_its_rows(choose, name):
    device = DEVICES[name]
    for n, work in product(WIDTHS, WORKS):
        tile = choose(n, work, device)
        blocks = 1 if tile.looped or tile.slices > 1 else -(-n // tile.block_n)
        at = (n, work, tile)
        assert all(size & (size - 1) == 0 for size in (tile.rows, tile.block_n, tile.warps)), at
        assert tile.block_n >= 16 and tile.rows * tile.block_n * blocks < 2**20, at  # Triton's own limit for a tensor
        assert tile.block_n * (blocks - 1) < n, at  # no block without a column
        assert tile.warps * device.warp_size <= 1024 and tile.stages >= 1, at
        assert tile.slices == 1 or (tile.block_n * (tile.slices - 1) < n <= tile.block_n * tile.slices and tile.slices <= 32), (
            at
        )
        if choose is forward_tile:
            assert (tile.slices, tile.stages, tile.programs_per_sm) == (1, 1, 0), at
            assert not tile.prefetch or tile.prefetch_programs > 0, at
        else:
            assert tile.programs_per_sm >= 1, at
            assert tile.programs_per_sm * tile.warps * device.warp_size <= 1024, at


@pytest.mark.parametrize("name", DEVICES)
def test_rows_are_split_and_prefetched_only_where_that_works(name):
    device, split = DEVICES[name], set()
    for n, work in product(WIDTHS, WORKS):
        tiles = forward_tile(n, work, device), backward_tile(n, work, device)
        assert device.since_sm_90 or not any(tile.prefetch for tile in tiles), (n, work)
        if tiles[1].slices > 1:
            assert work.splittable and device.cooperative and tiles[1].rows == 1 and not tiles[1].looped, (n, work)
            assert tiles[1].slices <= device.multiprocessors * tiles[1].programs_per_sm, (n, work)  # all resident
            split.add(n)
    assert bool(split) == device.cooperative


def test_what_is_in_flight_fits_shared_memory():
    for device, n, work in product(DEVICES.values(), WIDTHS, WORKS):
        tile = backward_tile(n, work, device)
        if not tile.looped:
            columns = tile.block_n * (1 if tile.slices > 1 else -(-n // tile.block_n))
            staged = (tile.stages - 1) * tile.rows * columns * work.row_bytes * tile.programs_per_sm
            assert tile.stages == 1 or staged <= device.shared_memory, (n, work, tile)
