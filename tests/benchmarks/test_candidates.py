import pytest

from benchmarks import tune
from benchmarks.candidates import Cell, all_tiles, near_tiles
from benchmarks.cases import BACKWARD, DIRECTIONS
from ops import tiling
from ops.tiling import Tile

CELLS = [
    Cell(direction, norm, work, vector, width)
    for direction in DIRECTIONS
    for norm in tune.NORMS
    for work, vector in (("norm", 8), ("add", 8), ("add", 4), ("dropout", 8), ("dropout", 4))
    for width in (32, 768, 1600, 5120, 16384, 65536)
]


@pytest.mark.parametrize("tiles", [near_tiles, all_tiles])
def test_candidates_cover_the_row_or_loop_forward_and_there_is_something_to_choose_from(tiles):
    for cell in CELLS[:: 7 if tiles is all_tiles else 1]:
        candidates = list(tiles(cell))
        assert len(candidates) > 3, cell
        looping = [tile for tile in candidates if tile.looped(cell.width)]
        assert not looping or (cell.direction == "forward" and all(tile.tail_n == 0 for tile in looping)), cell


def test_the_present_tile_of_every_cell_is_among_the_near_ones():
    for key, entries in tiling.TABLE.items():
        for width, tile in entries:
            assert tile in list(near_tiles(Cell(*key, width))), (key, width)


def test_rows_read_twice_are_offered_to_every_entry_that_has_them_also_when_it_has_another_tile(monkeypatch):
    loops = [(key, width, tile) for key, entries in tiling.TABLE.items() for width, tile in entries if tile.looped(width)]
    assert {key[2] for key, _, _ in loops} == {"norm", "add"}
    for key, width, tile in loops:
        with monkeypatch.context() as patch:
            whole = Tile(1, tiling.one_block(width), 0, 1, 8, 1, 0, False)
            patch.setitem(tiling.TABLE, key, tuple((w, whole if w == width else t) for w, t in tiling.TABLE[key]))
            assert tile in list(near_tiles(Cell(*key, width))), (key, width)


def test_backward_is_always_persistent():
    assert all(tile.programs_per_sm > 0 for cell in CELLS if cell.direction == BACKWARD for tile in near_tiles(cell))


def test_draws_come_first_only_where_backward_draws_and_there_both_ways_are_tried():
    for cell in CELLS:
        found = {tile.draws_first for tile in near_tiles(cell)}
        assert found == ({False, True} if cell.direction == BACKWARD and cell.work == "dropout" else {False}), cell
