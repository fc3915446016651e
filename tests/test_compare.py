"""python compare.py: its runs are train.py's, it goes on after a kill, it refuses what it can't compare."""

import json
import os
import random
import re
import subprocess
import sys
import time

import pytest

import compare
from study.runs import read
from tests.runs import ROOT, train_here

SWEEP = ["norm.kind=layernorm,rmsnorm", "optim.lr=1e-3,3e-3", "seed=1,2"]


def table(folder):
    """The report and the runs."""
    data = json.loads((folder / "report.json").read_text())
    return data["report"], data["results"]


@pytest.fixture(scope="module")
def studied(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("studied") / "study"
    assert compare.main([*tiny, *SWEEP, f"folder={folder}"]) == 0
    return folder


@pytest.mark.parametrize("more", [[], ["model.dropout=0.1", "train.accumulation=2"], ["optim.kind=muon"]])
def test_a_run_is_that_of_train_py(tiny, tmp_path, more):
    assert compare.main([*tiny, *more, "norm.kind=rmsnorm", "optim.lr=3e-3", "seed=2", f"folder={tmp_path / 'study'}"]) == 0
    summary, _ = train_here([*tiny, *more, "norm.kind=rmsnorm", "optim.lr=3e-3", "seed=2"], tmp_path / "run")
    [run] = [run for run in read(tmp_path / "study" / "runs.jsonl").results if run.seed == 2]
    assert (run.last, run.best) == (summary.final.loss, summary.best.loss)


def test_it_leaves_a_report_and_pictures(studied):
    text = (studied / "report.md").read_text()
    assert "no difference was found" in text or "loss lower by" in text or "loss higher by" in text
    assert (studied / "rates.png").stat().st_size > 1e4 and (studied / "depth.png").stat().st_size > 1e4
    assert len(read(studied / "runs.jsonl").results) == 2 * 2 * 2 + 2  # and A/A


def test_killed_at_random_moments_it_ends_with_the_same_table(studied, tiny, tmp_path):
    folder, moments = tmp_path / "study", random.Random(0)
    command = [sys.executable, str(ROOT / "compare.py"), *tiny, *SWEEP, f"folder={folder}", "resume=auto"]
    lines = folder / "runs.jsonl"
    for _ in range(10):  # each life makes about one run
        had = lines.stat().st_size if lines.is_file() else 0
        process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
        while process.poll() is None and (lines.stat().st_size if lines.is_file() else 0) == had:
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.3))
        process.kill()
        process.wait()
    assert subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode == 0
    assert table(folder) == table(studied)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["study=qk_nrom"], "Did you mean qk_norm"),
        (["optim.lr=fast,slow"], "optim.lr takes numbers"),
        (["compare.baseline=x", "norm.kind=layernorm,rmsnorm"], "no such arm"),
        (["seed=1,1"], "twice"),
        (["compare.timing_cycles=3"], "takes 0, which times nothing, or 6 and more"),
    ],
)
def test_it_refuses_what_it_cant_compare(tiny, wrong, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compare.main([*tiny, *wrong]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_folder_of_another_study_is_refused(studied, tiny, capsys):
    assert compare.main([*tiny, *SWEEP[:2], "seed=1,2,3", f"folder={studied}", "resume=auto"]) == 2
    assert "another study: its seeds differ" in capsys.readouterr().err
