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


@pytest.fixture
def reports(tmp_path):
    """reports(speed-ups of processes): what each has found."""

    def reports(speedups=(1.20, 1.25, 1.18)):
        made = []
        for number, speedup in enumerate(speedups):
            cell = results.cell({}, "eager", speedup, kernels=True, seed=number)
            code = {"modules": {"a.py": "1"}, "kernels": {"a_kernel": [str(number)]}, "backward": "one thread"}
            records.save(records.Ablation([cell], [results.parity_of({})], {}, "", "", True, code=code), tmp_path)
            made.append(json.loads((tmp_path / "report.json").read_text()))
        return made

    return reports


@pytest.fixture
def started(monkeypatch):
    """started(report of each process, exit code of the first): the processes that it starts, by their arguments."""

    def started(reports, code):
        commands = []

        def run(command):
            commands.append(command[2:])
            folder = Path([word for word in command if word.startswith("folder=")][-1].removeprefix("folder="))
            folder.mkdir(parents=True)
            if report := reports[len(commands) - 1]:
                (folder / "report.json").write_text(json.dumps(report))
            return SimpleNamespace(returncode=code if len(commands) == 1 else 0)

        monkeypatch.setattr(processes.subprocess, "run", run)
        return commands

    return started


def test_the_interval_is_that_of_the_processes_and_no_process_s_own(reports):
    found = processes.speedups(made := reports())
    (pair,) = (one for one in found if (one["base"], one["arm"]) == ("torch", FUSED))
    own = [one["cells"][0]["pairs"]["torch"][FUSED]["speedup"] for one in made]
    expected = mean_interval([math.log(one["median"]) for one in own])
    assert pair["speedup"]["low"] == pytest.approx(math.exp(expected.low))
    assert pair["processes"] == [one["median"] for one in own]
    assert pair["speedup"]["high"] - pair["speedup"]["low"] > 5 * max(one["high"] - one["low"] for one in own)


@pytest.mark.parametrize(("speedups", "none"), [((1.20, 1.21, 1.20), False), ((1.0, 1.08, 0.93), True)])
def test_a_difference_that_another_process_does_not_have_is_none(reports, speedups, none):
    made = reports(speedups)
    said = " ".join(processes.report(processes.speedups(made), made).split())
    assert ("no difference found" in said) == none and "Between processes its standard deviation is 0.0" in said


def test_each_process_has_its_folder_the_first_measures_parity_and_the_worst_code_is_returned(tmp_path, reports, started):
    made = reports()
    made[0]["parity"][0]["holds"] = False
    commands, options = started(made, 1), ["--config-dir", str(tmp_path), "device=cpu"]
    assert ablate.main([*options, "ablate.processes=3", f"folder={tmp_path}/run"]) == 1
    assert json.loads((tmp_path / "run/report.json").read_text())["code"]["kernels"] == {"a_kernel": ["0", "1", "2"]}
    for number, command in enumerate(commands, 1):
        assert f"folder={tmp_path}/run/process_{number}" in command and set(options) < set(command)
        assert ("ablate.parity_seeds=0" in command) == (number > 1)
    assert len(commands) == 3 and (tmp_path / "run/report.md").read_text().startswith("# 3 processes")


@pytest.mark.parametrize("part", [None, {"cells": [], "parity": [], "unfinished": "1 of 3 parts"}])
def test_a_process_that_a_full_disk_ends_is_not_one_whose_parity_fails(tmp_path, started, part):
    commands = started([part], 1)
    assert processes.ablate([], 3, tmp_path) == 1
    assert len(commands) == 1 and not (tmp_path / "report.md").exists()
