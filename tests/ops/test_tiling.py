import pytest

from ops import tiling


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("n", [1, 31, 32, 768, 1024, 1600, 4096, 5120, 8192, 8193, 16385, 32768, 65536, 262144])
def test_every_width_has_a_tile_that_covers_it_or_loops(n, residual):
    for tile, widest in (
        (tiling.forward_tile(n, residual), tiling.FORWARD_SINGLE_TILE),
        (tiling.backward_tile(n, residual), tiling.BACKWARD_SINGLE_TILE),
    ):
        assert tile.block_n & (tile.block_n - 1) == 0 and tile.rows & (tile.rows - 1) == 0
        assert tile.block_n >= 8, "one Philox call serves eight columns"
        assert tile.block_n >= n or (n > widest and tile.rows == 1)
        assert tile.rows * tile.block_n <= 32 * tile.warps * 64, "more than 64 fp32 values a thread and tile spill"
