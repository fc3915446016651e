from dataclasses import replace

import pytest
import torch

from ablation.statistics import Interval
from benchmarks import tune
from benchmarks.candidates import Cell, entry
from benchmarks.cases import DIRECTIONS, FORWARD
from benchmarks.timing import Outcome
from ops import tiling
from ops.tiling import Tile


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
    present = entry(cell.key, cell.width)
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


def test_tiles_found_for_weights_in_fp32_join_the_present_ones_or_take_their_places():
    tile = Tile(3, 1024, 0, 1, 4, 1, 0, False)
    new = tune.Found(tile, 0.9, Interval(1.03, 1.02, 1.04))
    cells = [Cell(FORWARD, *key, torch.float32) for key in (("rms", "add", 8, 1024), next(iter(tiling.FP32_WEIGHTS)))]
    printed = tune.format_fp32_weights(dict.fromkeys(cells, new))
    namespace = {"Tile": Tile}
    exec(printed, namespace)
    assert namespace["FP32_WEIGHTS"] == tiling.FP32_WEIGHTS | {(c.norm, c.work, c.vector, c.width): tile for c in cells}
    assert printed.count("False),  # 0.90, 0.87") == 2


def test_only_what_is_2_percent_faster_is_worth_a_line():
    gains = {768: None, 1024: 1.019, 2048: 1.021}
    found = {
        Cell(FORWARD, "rms", "add", 8, width, torch.float32): tune.Found(
            Tile(1, 1024, 0, 1, 4, 1, 0, False), 0.9, gain and Interval(gain, gain, gain)
        )
        for width, gain in gains.items()
    }
    assert [cell.width for cell in tune.worth_a_line(found)] == [2048]


def test_both_directions_are_tuned_and_forward_alone_for_weights_in_fp32():
    light = tune.cells_of(tune.options_of([]))
    assert {(cell.direction, cell.weight_dtype) for cell in light} == {(d, torch.bfloat16) for d in DIRECTIONS}
    heavy = tune.cells_of(tune.options_of(["--weight-dtype", "fp32"]))
    assert {(cell.direction, cell.weight_dtype) for cell in heavy} == {(FORWARD, torch.float32)}


@pytest.mark.parametrize(
    "argument",
    [
        ["--width", "0"],
        ["--norm", "batch"],
        ["--processes", "none"],
        ["--weight-dtype", "fp32", "--direction", "backward"],
        ["--weight-dtype", "fp32", "--width", "640"],
    ],
)
def test_wrong_arguments_are_refused(argument, capsys):
    with pytest.raises(SystemExit) as stop:
        tune.options_of(argument)
    assert stop.value.code == 2 and argument[0] in capsys.readouterr().err.splitlines()[-1]
