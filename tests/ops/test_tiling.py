"""The rule for tiles, at every width and for all kinds of work: what must hold whatever is fast."""

from itertools import product

import pytest

from ops.tiling import WHOLE_BACKWARD, Work, backward_tile, forward_tile, sample_backward_tile

from .test_launch import DEVICES

WIDTHS = [
    *range(1, 300, 7), *range(320, 16_385, 192),
    1002, 1023, 1025, 12_287, 20_004, 32_768, 40_000, 50_257, 65_536, 262_144, 10**6,
]  # fmt: skip
WORKS = [
    Work(vector, row_bytes, weights, weight_bytes=4 * weights, written_bytes=written_bytes, drops=drops, splittable=splittable)
    for (row_bytes, vector), written_bytes, weights, drops, splittable in product(
        ((2, 8), (4, 8), (6, 4), (8, 8), (12, 4), (20, 4)), (2, 6), (1, 2, 4), (False, True), (False, True)
    )
    if not (weights == 4 and splittable)
]


@pytest.mark.parametrize("name", DEVICES)
def test_a_tile_holds_its_rows_and_asks_for_what_the_device_can(name):
    device, split = DEVICES[name], set()
    for n, work in product(WIDTHS, WORKS):
        forward, backward = forward_tile(n, work, device), backward_tile(n, work, device)
        of_samples = [sample_backward_tile(n, work, device)] if n <= WHOLE_BACKWARD else []
        at = (n, work, forward, backward, of_samples)
        for tile in (forward, backward, *of_samples):
            blocks = 1 if tile.looped or tile.slices > 1 else -(-n // tile.block_n)
            assert all(size & (size - 1) == 0 for size in (tile.rows, tile.block_n, tile.warps)), at
            assert tile.block_n >= 16 and tile.rows * tile.block_n * blocks < 2**20, at  # Triton's own limit for a tensor
            assert tile.block_n * (blocks - 1) < n, at  # no block without a column
            assert tile.warps * device.warp_size <= 1024 and tile.stages >= 1, at
            assert device.since_sm_90 or not tile.prefetch, at
        assert (forward.slices, forward.stages, forward.programs_per_sm) == (1, 1, 0), at
        assert not forward.prefetch or forward.prefetch_programs > 0, at
        for tile in (backward, *of_samples):
            assert tile.programs_per_sm >= 1 and tile.programs_per_sm * tile.warps * device.warp_size <= 1024, at
            # each of a multiprocessor's four parts has its share of their warps
            assert tile.programs_per_sm * tile.warps % 4 == 0 or device.warp_size > 32, at
        if backward.slices > 1:
            assert backward.block_n * (backward.slices - 1) < n <= backward.block_n * backward.slices, at
            assert work.splittable and device.cooperative and backward.rows == 1 and not backward.looped, at
            assert backward.slices <= min(32, device.multiprocessors * backward.programs_per_sm), at  # all resident
            split.add(n)
        if not backward.looped:
            columns = backward.block_n * (1 if backward.slices > 1 else -(-n // backward.block_n))
            staged = (backward.stages - 1) * backward.rows * columns * work.row_bytes * backward.programs_per_sm
            assert backward.stages == 1 or staged <= device.shared_memory, at  # of what is in flight
    assert bool(split) == device.cooperative
