"""python compare.py: it leaves a report, goes on after a kill, and refuses the folder of another study."""

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

import compare
from data import load_corpus
from measure.comparison import AGAIN
from measure.store import Store
from study.arms import study_of
from study.runs import train_all
from study.timing import BASELINE
from tests.runs import ROOT, precision, read_json, wait_until

SWEEP = ["norm.kind=layernorm,rmsnorm", "optim.lr=1e-3,3e-3", "seed=1,2", "train.steps=12", "eval.every=4"]


@pytest.fixture(scope="module")
def studied(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("studied") / "study"
    assert compare.main([*tiny, *SWEEP, "compare.timing_cycles=6", f"folder={folder}"]) == 0
    return folder


def test_it_leaves_a_report_and_pictures(studied):
    text = (studied / "report.md").read_text()
    assert "no difference was found" in text or ": loss lower, " in text or ": loss higher, " in text
    assert "torch / own (95 %)" in text and "add rates beyond it" in text
    assert (studied / "rates.png").stat().st_size > 1e4 and (studied / "depth.png").stat().st_size > 1e4
    runs, found = results(studied), read_json(studied / "report.json")
    assert len(runs) == 2 * 2 * 2 + 2  # and A/A
    assert found["results"] == runs
    assert [seen["step"] for seen in runs[0]["probes"]] == [3, 6, 9, 12]
    assert [list(of) for of in found["times"].values()] == [["fused", "torch", AGAIN], ["fused", "torch", AGAIN, BASELINE]]
    assert all(len(blocks) == 2 * 6 and min(blocks) > 0 for of in found["times"].values() for blocks in of.values())


def results(folder):
    """The runs that a folder keeps."""
    path = folder / "runs.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [{name: of for name, of in line.items() if name != "sum"} for line in lines if "evaluated" in line]


def test_cut_at_random_places_it_ends_with_the_same_runs(studied, tiny, tmp_path):
    study, path = study_of([*tiny, *SWEEP, "compare.timing_cycles=6"]), tmp_path / "runs.jsonl"
    corpus = load_corpus(study.cfg.data, study.cfg.tokenizer, context=study.cfg.model.context)
    lines, draw = (studied / "runs.jsonl").read_bytes(), random.Random(0)
    for _ in range(5):
        path.write_bytes(lines[: draw.randrange(len(lines))])
        found = train_all(study, precision(torch.float32), corpus, Store(path, study.facts))
        assert [asdict(run) for run in found.results] == results(studied) == results(tmp_path)


def test_killed_it_goes_on_with_the_same_command(studied, tiny, tmp_path):
    folder = tmp_path / "study"
    command = [sys.executable, str(ROOT / "compare.py"), *tiny, *SWEEP, f"folder={folder}", "resume=auto"]
    process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    wait_until(process, lambda: results(folder))
    process.kill()
    process.wait()
    assert len(results(folder)) < 2 * 2 * 2 + 2
    assert compare.main(command[2:]) == 0
    assert results(folder) == results(studied)


def test_a_folder_of_another_study_is_refused(studied, tiny, capsys):
    assert compare.main([*tiny, *SWEEP, "seed=1,2,3", f"folder={studied}", "resume=auto"]) == 2
    assert "runs.jsonl is of something else: seeds=[1,2,3], there [1,2]. " in capsys.readouterr().err
