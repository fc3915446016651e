from dataclasses import replace

import pytest
import torch

from benchmarks import tune
from benchmarks.cases import BACKWARD, DIRECTIONS, FORWARD
from benchmarks.timing import Outcome
from benchmarks.tune import Cell
from ops import tiling
from ops.tiling import Tile

CELLS = [
    Cell(direction, norm, work, vector, width)
    for direction in DIRECTIONS
    for norm in tune.NORMS
    for work, vector in (("norm", 8), ("add", 8), ("add", 4), ("dropout", 8), ("dropout", 4))
    for width in (32, 768, 1600, 5120, 16384, 65536)
]


@pytest.mark.parametrize("tiles", [tune.near_tiles, tune.all_tiles])
def test_candidates_cover_the_row_or_loop_forward_and_there_is_something_to_choose_from(tiles):
    for cell in CELLS[:: 7 if tiles is tune.all_tiles else 1]:
        candidates = list(tiles(cell))
        assert len(candidates) > 3, cell
        looping = [tile for tile in candidates if tile.looped(cell.width)]
        assert not looping or (cell.direction == "forward" and all(tile.tail_n == 0 for tile in looping)), cell


def test_the_present_tile_of_every_cell_is_among_the_near_ones():
    for key, entries in tiling.TABLE.items():
        for width, tile in entries:
            assert tile in list(tune.near_tiles(Cell(*key, width))), (key, width)


def test_the_printed_table_is_the_table():
    namespace = {"Tile": Tile}
    exec(
        tune.format_table(tiling.TABLE).replace("TABLE: dict[tuple[str, str, str, int], tuple[tuple[int, Tile], ...]]", "T"),
        namespace,
    )
    assert namespace["T"] == tiling.TABLE


def test_what_was_found_takes_its_place_and_the_rest_stays():
    cell, tile = Cell(FORWARD, "rms", "add", 8, 1024), Tile(7, 1024, 0, 1, 4, 1, 0, False, 96)
    table = tune.merged({cell: tile})
    assert dict(table[cell.key])[1024] == tile
    assert {key: entries for key, entries in table.items() if key != cell.key} == {
        key: entries for key, entries in tiling.TABLE.items() if key != cell.key
    }
    assert "0, False, 96)),  # 0.90" in tune.format_table(table, {(*cell.key, 1024): 0.9})


@pytest.mark.parametrize(("faster_by", "taken"), [(0.05, True), (0.001, False)])
def test_a_tile_takes_the_place_of_the_present_one_only_if_it_is_faster_by_more_than_chance(faster_by, taken, monkeypatch):
    cell, device = Cell(FORWARD, "rms", "norm", 8, 64), torch.device("cpu")
    present = tune.entry(cell.key, cell.width)
    others = [replace(present, warps=warps) for warps in (1, 2, 8, 16, 32) if warps != present.warps]
    measured = []

    def measure(contenders, device, **_):
        """Rounds differ by 2 %. The last of the others is the fastest by the median, the rest are slow."""
        measured.append({contender.name for contender in contenders})
        us = {str(present): [100 + i % 3 for i in range(11)]}
        us |= {str(tile): [150.0] * 11 for tile in others}
        us[str(others[-1])] = [(100 + (i + 1) % 3) * (1 - faster_by) for i in range(11)]
        return {contender.name: Outcome(us[contender.name]) for contender in contenders}

    monkeypatch.setattr(tune, "measure", measure)
    found = tune.fastest(cell, [*others, present], device, copy=4000)
    assert found.tile == (others[-1] if taken else present)
    assert str(present) in measured[-1] and found.share > 0
    assert [line.split(":")[0] for line in tune.replaced({cell: found})] == (["# forward rms norm 8 64"] if taken else [])


def test_backward_is_always_persistent():
    assert all(tile.programs_per_sm > 0 for cell in CELLS if cell.direction == BACKWARD for tile in tune.near_tiles(cell))


def test_draws_come_first_only_where_backward_draws_and_there_both_ways_are_tried():
    for cell in CELLS:
        found = {tile.draws_first for tile in tune.near_tiles(cell)}
        assert found == ({False, True} if cell.direction == BACKWARD and cell.work == "dropout" else {False}), cell


@pytest.mark.parametrize("argument", [["--width", "0"], ["--norm", "batch"], ["--processes", "none"]])
def test_wrong_arguments_are_refused(argument, capsys):
    with pytest.raises(SystemExit) as stop:
        tune._parser().parse_args(argument)
    assert stop.value.code == 2 and argument[0] in capsys.readouterr().err
