"""An ablation in several processes: what varies between them is in the interval."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

import ablate
from ablation import processes, records
from measure.comparison import FUSED
from measure.statistics import mean_interval
from tests.ablation import results

SPEEDUPS = (1.20, 1.25, 1.18)


def reports(tmp_path, speedups=SPEEDUPS):
    made = []
    for number, speedup in enumerate(speedups):
        cell = results.cell({}, "eager", speedup, kernels=True, seed=number)
        code = {"modules": {"a.py": "1"}, "kernels": {"a_kernel": [str(number)]}, "backward": "one thread"}
        records.save(records.Ablation([cell], [results.parity_of({})], {}, "", "", True, code=code), tmp_path)
        made.append(json.loads((tmp_path / "report.json").read_text()))
    return made


def test_the_interval_is_that_of_the_processes_and_no_process_s_own(tmp_path):
    found = processes.speedups(made := reports(tmp_path))
    (pair,) = (one for one in found if (one["base"], one["arm"]) == ("torch", FUSED))
    own = [one["cells"][0]["pairs"]["torch"][FUSED]["speedup"] for one in made]
    expected = mean_interval([math.log(one["median"]) for one in own])
    assert pair["speedup"]["low"] == pytest.approx(math.exp(expected.low)) and pair["processes"] == [
        one["median"] for one in own
    ]
    assert pair["speedup"]["high"] - pair["speedup"]["low"] > 5 * max(one["high"] - one["low"] for one in own)


@pytest.mark.parametrize(("speedups", "none"), [((1.20, 1.21, 1.20), False), ((1.0, 1.08, 0.93), True)])
def test_a_difference_that_another_process_does_not_have_is_none(tmp_path, speedups, none):
    made = reports(tmp_path, speedups)
    said = " ".join(processes.report(processes.speedups(made), made).split())
    assert ("no difference found" in said) == none and "Between processes its standard deviation is 0.0" in said
    assert "fused over fused" not in said and "Parity holds" in said


def test_each_process_has_its_folder_the_first_measures_parity_and_the_worst_code_is_returned(tmp_path, monkeypatch):
    made, started = reports(tmp_path), []

    def run(command):
        started.append(command[2:])
        folder = Path(command[3].removeprefix("folder="))
        folder.mkdir()
        (folder / "report.json").write_text(json.dumps(made[len(started) - 1]))
        return SimpleNamespace(returncode=int(len(started) == 1))

    made[0]["parity"][0]["holds"] = False
    monkeypatch.setattr(processes.subprocess, "run", run)
    assert processes.ablate(["model=gpt2"], 3, tmp_path) == 1
    assert json.loads((tmp_path / "report.json").read_text())["code"]["kernels"] == {"a_kernel": ["0", "1", "2"]}
    assert [command[1] for command in started] == [f"folder={tmp_path}/process_{number}" for number in (1, 2, 3)]
    assert ["ablate.parity_seeds=0" in command for command in started] == [False, True, True]
    assert (tmp_path / "report.md").read_text().startswith("# 3 processes") and "model=gpt2" in started[0]


@pytest.mark.parametrize("part", [None, {"cells": [], "parity": [], "unfinished": "1 of 3 parts"}])
def test_a_process_that_a_full_disk_ends_is_not_one_whose_parity_fails(tmp_path, monkeypatch, part):
    started = []

    def run(command):
        started.append(command)
        folder = Path(next(text for text in command if text.startswith("folder=")).removeprefix("folder="))
        folder.mkdir()
        if part:
            (folder / "report.json").write_text(json.dumps(part))
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(processes.subprocess, "run", run)
    assert processes.ablate([], 3, tmp_path) == 1
    assert len(started) == 1 and not (tmp_path / "report.md").exists()


def test_its_processes_have_the_options_of_the_command(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(processes.subprocess, "run", lambda command: started.append(command) or SimpleNamespace(returncode=2))
    options = ["--config-dir", str(tmp_path), "ablate.processes=2", f"folder={tmp_path}/run", "device=cpu"]
    assert ablate.main(options) == 2
    assert started[0][2:].count("--config-dir") == 1 and str(tmp_path) in started[0]
