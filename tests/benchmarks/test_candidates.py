from dataclasses import replace

import pytest
import torch

from benchmarks import tune
from benchmarks.candidates import IN_FLIGHT_BYTES, Cell, all_tiles, entry, in_flight, near_tiles
from benchmarks.cases import BACKWARD, DIRECTIONS, FORWARD
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


def test_with_weights_in_fp32_the_present_tile_is_the_one_that_launches_take_and_is_among_the_near_ones():
    cells = [
        Cell(*key, width, torch.float32) for key, entries in tiling.TABLE.items() if key[0] == FORWARD for width, _ in entries
    ]
    own = {(cell.norm, cell.work, cell.vector, cell.width): cell.present for cell in cells}
    assert own | tiling.FP32_WEIGHTS == own and any(cell.present != entry(cell.key, cell.width) for cell in cells)
    for cell in cells:
        assert cell.setting.weight_dtype == torch.float32 and cell.present in list(near_tiles(cell)), cell


def test_whatever_is_found_for_weights_in_fp32_is_taken_as_it_is(monkeypatch):
    for norm, work, width in (("ln", "norm", 768), ("rms", "add", 8192), ("rms", "dropout", 64)):
        cell = Cell(FORWARD, norm, work, 8, width, torch.float32)
        for tile in near_tiles(cell):
            monkeypatch.setitem(tiling.FP32_WEIGHTS, (norm, work, 8, width), tile)
            assert tiling.forward_tile(width, cell.traffic) == tiling.fit(tile, cell.traffic, tiling.H200)


def test_rows_read_twice_are_offered_to_every_entry_that_has_them_also_when_it_has_another_tile(monkeypatch):
    loops = [(key, width, tile) for key, entries in tiling.TABLE.items() for width, tile in entries if tile.looped(width)]
    assert {key[2] for key, _, _ in loops} == {"norm", "add"}
    for key, width, tile in loops:
        with monkeypatch.context() as patch:
            whole = Tile(1, tiling.one_block(width), 0, 1, 8, 1, 0, False)
            patch.setitem(tiling.TABLE, key, tuple((w, whole if w == width else t) for w, t in tiling.TABLE[key]))
            assert tile in list(near_tiles(Cell(*key, width))), (key, width)


def test_rows_brought_into_l2_are_offered_to_programs_that_stride_and_of_backward_to_wide_rows_with_one_row_in_each():
    for cell in CELLS:
        tiles = [tile for tile in near_tiles(cell) if tile.prefetch_l2]
        split = entry(cell.key, cell.width).slices > 1
        assert tiles or not (cell.direction == BACKWARD or split), cell
        assert cell.direction == BACKWARD or all(tile.slices > 1 for tile in tiles), cell
        if cell.direction == BACKWARD and 768 < cell.width <= 16384:
            assert {tile.stages for tile in tiles if tile.rows == tile.programs_per_sm == 1} >= {2, 3}, cell


def test_rows_of_later_programs_are_offered_to_forward_of_whole_rows_at_several_distances():
    for cell in CELLS:
        found = [tile for tile in near_tiles(cell) if tile.prefetch_ahead]
        assert cell.direction == FORWARD or not found, cell
        if cell.direction == FORWARD and entry(cell.key, cell.width).slices == 1:
            assert {tile.prefetch_ahead for tile in found} >= {0.5, 1.0, 2.0}, cell
        assert all(tile.slices == 1 and tile.forward_prefetches(cell.width) for tile in found), cell


def test_backward_is_always_persistent():
    assert all(tile.programs_per_sm > 0 for cell in CELLS if cell.direction == BACKWARD for tile in near_tiles(cell))


def test_draws_come_first_only_where_backward_draws_and_there_both_ways_are_tried():
    for cell in CELLS:
        found = {tile.draws_first for tile in near_tiles(cell)}
        assert found == ({False, True} if cell.direction == BACKWARD and cell.work == "dropout" else {False}), cell


def test_backward_looks_within_the_bytes_in_flight_and_at_one_stage_where_rows_are_wide():
    cell = Cell("backward", "ln", "add", 8, 2048)
    tile = Tile(2, 2048, 0, 1, 8, 4, 1, True)
    assert in_flight(tile, cell) == 3 * 2 * 2048 * 6  # dy, r and the stream's gradient, in bf16
    assert in_flight(replace(tile, programs_per_sm=2, stages=1), cell) == 0
    for width in (768, 4096):
        cell = replace(cell, width=width)
        found = set(all_tiles(cell)) - set(near_tiles(cell))
        staged = {in_flight(tile, cell) for tile in found if tile.slices == 1 and tile.stages > 1}
        assert min(staged) >= IN_FLIGHT_BYTES[0]
        assert max(staged) <= IN_FLIGHT_BYTES[1]
        assert any(tile.stages == 1 for tile in found) == (width >= 4096)


def test_columns_are_a_choice_beside_an_fp32_stream_in_both_directions():
    for cell in CELLS:
        found = {tile.columns for tile in near_tiles(cell) if tile.slices == 1}
        assert (8 in found) == (cell.vector == 4 and entry(cell.key, cell.width).slices == 1), cell


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows_of_several_equal_blocks_are_offered(direction):
    cell = Cell(direction, "ln", "add", 4, 5120)
    for tiles in (near_tiles, all_tiles):
        assert {(2048, 4096), (1024, 4096)} <= {(tile.block_n, tile.tail_n) for tile in tiles(cell)}, tiles


def test_rows_read_twice_are_offered_with_bounds_on_registers_where_a_thread_has_little_of_them():
    cell = Cell("forward", "rms", "add", 8, 8192)
    loops = [tile for tile in near_tiles(cell) if tile.looped(cell.width)]
    bounds = {}
    for tile in loops:
        bounds.setdefault(tile.block_n // (32 * tile.warps), set()).add(tile.max_registers)
    assert bounds[8] == bounds[16] == {0, 36, 40, 48, 56, 64}
    assert bounds[32] == {0}


@pytest.mark.parametrize("key", [key for key in tiling.TABLE if key[0] == "backward"], ids=str)
def test_whole_rows_of_the_table_are_found_again_by_shape(key):
    """Without the present table: by `all_tiles`, but for the bound on registers, which is chosen around a tile."""
    for width, tile in tiling.TABLE[key]:
        if tile.slices == 1 and 768 <= width <= 8192:
            shapes = {replace(t, max_registers=0) for t in all_tiles(Cell(*key, width))}
            assert replace(tile, max_registers=0) in shapes, (width, tile)
