"""python compare.py: it leaves a report, goes on after a kill, and refuses the folder of another study."""

import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

import compare
from data import load_corpus
from study.arms import study_of
from study.plan import train_all
from study.runs import FRESH, read
from study.timing import BASELINE, OWN_AGAIN
from tests.runs import ROOT, precision, read_json, wait_until

SWEEP = ["norm.kind=layernorm,rmsnorm", "optim.lr=1e-3", "seed=1,2,3", "train.steps=12", "eval.every=4"]
RUNS = 2 * 3 + 3  # and A/A


@pytest.fixture(scope="module")
def studied(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("studied") / "study"
    assert compare.main([*tiny, *SWEEP, "compare.timing_cycles=6", f"folder={folder}"]) == 0
    return folder


def test_it_leaves_a_report_and_pictures(studied):
    text = (studied / "report.md").read_text()
    assert "no difference was found" in text or ": loss lower, " in text or ": loss higher, " in text
    assert "torch / own (95 %)" in text and text.index("differences.png") < text.index("rates.png")
    assert all((studied / f"{name}.png").stat().st_size > 1e4 for name in ("differences", "rates", "depth"))
    found = read(studied / "runs.jsonl")
    assert len(found.results) == RUNS
    assert read_json(studied / "report.json")["results"] == [asdict(run) for run in found.results]
    assert [seen["step"] for seen in found.results[0].probes] == [3, 6, 9, 12]
    assert [list(of) for of in found.times.values()] == [["fused", OWN_AGAIN, "torch"], ["fused", OWN_AGAIN, "torch", BASELINE]]
    assert all(len(blocks) == 2 * 6 and min(blocks) > 0 for of in found.times.values() for blocks in of.values())


def test_cut_at_random_places_it_ends_with_the_same_runs(studied, tiny, tmp_path):
    study, path = study_of([*tiny, *SWEEP]), tmp_path / "runs.jsonl"
    corpus = load_corpus(study.cfg.data, study.cfg.tokenizer, context=study.cfg.model.context)
    lines, draw = (studied / "runs.jsonl").read_bytes(), random.Random(0)
    for _ in range(5):
        path.write_bytes(lines[: draw.randrange(len(lines))])
        found = train_all(study, precision(torch.float32), corpus, path)
        assert found.results == read(studied / "runs.jsonl").results == read(path).results


def test_killed_it_goes_on_with_the_same_command(studied, tiny, tmp_path):
    folder = tmp_path / "study"
    command = [sys.executable, str(ROOT / "compare.py"), *tiny, *SWEEP, f"folder={folder}", "resume=auto"]
    process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    wait_until(process, (folder / "runs.jsonl").is_file)
    process.kill()
    process.wait()
    assert len(read(folder / "runs.jsonl").results) < RUNS
    assert compare.main(command[2:]) == 0
    assert read(folder / "runs.jsonl").results == read(studied / "runs.jsonl").results


def test_a_study_grows_by_seeds_rates_and_arms_and_makes_no_run_twice(studied, tiny, tmp_path):
    folder = tmp_path / "study"
    shutil.copytree(studied, folder)
    before = (folder / "runs.jsonl").read_text()
    wider = ["norm.kind=layernorm,rmsnorm,dyt", "optim.lr=1e-3,3e-3", "seed=1,2,3,4", "compare.fresh=3", *SWEEP[3:]]
    assert compare.main([*tiny, *wider, f"folder={folder}", "resume=auto"]) == 0
    text = (folder / "runs.jsonl").read_text()
    assert text.startswith(before)
    found = read(folder / "runs.jsonl")
    assert len({(run.arm, run.rate, run.seed, run.stage) for run in found.results}) == len(found.results)
    for arm in ("norm.kind=layernorm", "norm.kind=dyt"):
        assert {(1e-3, seed) for seed in (1, 2, 3, 4)} <= {(run.rate, run.seed) for run in found.of(arm)}
        assert len(found.at(arm, found.best_rate(arm), FRESH)) == 3
    assert len(found.made) == 1 and {"revision", "card", "torch", "triton", "step"} == found.made[0].keys()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ["model.qk_norm=true"],
            "model.qk_norm=true: STUDY has norm.kind=layernorm with model.qk_norm=false. A study grows by arms",
        ),
        (["train.steps=13"], "train.steps=13: STUDY has"),
        ("torch", "has runs of something else: torch another, there "),
        ("step", "has runs of something else: step another, there "),
    ],
)
def test_what_another_study_code_version_or_card_made_is_refused(studied, tiny, change, said, capsys, monkeypatch):
    facts = compare.made_by
    if isinstance(change, str):
        monkeypatch.setattr(compare, "made_by", lambda machine: facts(machine) | {change: "another"})
        change = []
    assert compare.main([*tiny, *SWEEP, *change, f"folder={studied}", "resume=auto"]) == 2
    assert said.replace("STUDY", str(studied)) in capsys.readouterr().err


def test_another_revision_of_the_same_code_is_told(studied, tiny, tmp_path, monkeypatch):
    folder, facts = tmp_path / "study", compare.made_by
    shutil.copytree(studied, folder)
    monkeypatch.setattr(compare, "made_by", lambda machine: facts(machine) | {"revision": "another"})
    assert compare.main([*tiny, *SWEEP, "seed=1,2,3,4", f"folder={folder}", "resume=auto"]) == 0
    assert re.search(r"revisions +.*another", (folder / "report.md").read_text())
