"""python compare.py: it leaves a report, goes on after a kill, and refuses the folder of another study."""

import json
import shutil

import pytest
import torch

import compare
from data import load_corpus
from measure.store import Store
from study.arms import study_of
from study.runs import CONTROL, FRESH, RACE, SEARCH, Runs
from study.timing import OWN_AGAIN
from tests.runs import precision, read_json

KEYS = ["norm.kind=layernorm,rmsnorm", "optim.lr=1e-3,3e-3,1e-2", "seed=1", "train.steps=8", "eval.every=4"]
SWEEP = [*KEYS, "compare.fresh=2", "compare.race_steps=4", "compare.diverged=9", "compare.timing_cycles=6"]


@pytest.fixture(scope="module")
def studied(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("studied") / "study"
    assert compare.main([*tiny, *SWEEP, f"folder={folder}"]) == 0
    return folder


@pytest.fixture
def no_pictures(monkeypatch):
    """They would take longer than the runs."""
    for name in ("differences", "rates", "depth"):
        monkeypatch.setattr(f"study.plots.{name}", lambda *_: False)


def test_it_leaves_a_report_and_pictures(studied):
    text = (studied / "report.md").read_text()
    assert "no difference was found" in text or ": loss lower, " in text or ": loss higher, " in text
    assert "torch / own (95 %)" in text
    for name in ("differences", "rates", "depth"):
        assert (studied / f"{name}.png").stat().st_size > 1e4
    runs, found = results(studied), read_json(studied / "report.json")
    stages = [run["stage"] for run in runs]
    assert [stages.count(of) for of in (RACE, FRESH, CONTROL)] == [2 * 3, 2 * 2, 2] and stages.count(SEARCH) >= 2 * 2
    assert found["results"] == runs
    assert {"ops/norm.py", "study/engine.py", "training/step.py"} <= found["code"]["modules"].keys()
    ended = [run for run in runs if run["stage"] != RACE]
    assert all([seen["step"] for seen in run["probes"]] == [2, 4, 6, 8] for run in ended)
    assert [list(of) for of in found["times"].values()] == [
        ["fused", OWN_AGAIN, "torch"],
        ["fused", OWN_AGAIN, "torch", "baseline norm.kind=layernorm"],
    ]
    assert all(len(blocks) == 2 * 6 and min(blocks) > 0 for of in found["times"].values() for blocks in of.values())


def results(folder):
    """The runs that a folder keeps."""
    lines = map(json.loads, (folder / "runs.jsonl").read_text().splitlines())
    return [{name: of for name, of in line.items() if name != "sum"} for line in lines if "evaluated" in line]


def test_the_keys_of_an_arm_may_change_until_it_has_a_run(tiny, tmp_path):
    def opened(beta2):
        study = study_of([*tiny, f"optim.beta2={beta2}"])
        corpus = load_corpus(study.cfg.data, study.cfg.tokenizer, context=study.cfg.model.context)
        return Runs(study, precision(torch.float32), corpus, Store(tmp_path / "runs.jsonl", {"card": "this"}))

    opened(0.9)
    runs = opened(0.95)
    runs.keep(runs.study.baseline, {"arm": runs.study.baseline.name, "times": {}})
    with pytest.raises(ValueError, match=r"this configuration is of something else: optim\.beta2=0\.9, there 0\.95"):
        opened(0.9)


def test_killed_it_goes_on_with_the_same_command_and_grows_with_another(studied, tiny, tmp_path, capsys, no_pictures):
    folder, lines, before = tmp_path / "study", (studied / "runs.jsonl").read_bytes(), results(studied)
    shutil.copytree(studied, folder)
    (folder / "runs.jsonl").write_bytes(lines[: lines.rindex(b"\n", 0, len(lines) // 2) + 20])  # of a line its beginning
    command = [*tiny, *SWEEP, f"folder={folder}", "resume=auto"]
    assert compare.main(command) == 0
    assert results(folder) == before
    times = read_json(folder / "report.json")["times"]
    grows = ["norm.kind=layernorm,rmsnorm,dyt", "compare.fresh=3", "compare.baseline='norm.kind=rmsnorm'"]
    assert compare.main([*command, *grows]) == 0
    grown, found = results(folder), read_json(folder / "report.json")["times"]
    assert found["norm.kind=rmsnorm"] == times["norm.kind=rmsnorm"], "which is not timed beside itself"
    for arm in ("layernorm", "dyt"):
        assert list(found[f"norm.kind={arm}"]) == ["fused", OWN_AGAIN, "torch", "baseline norm.kind=rmsnorm"]
    assert grown[: len(before)] == before
    more = [(run["arm"], run["stage"]) for run in grown[len(before) :]]
    assert more.count(("norm.kind=layernorm", FRESH)) == 1 and more.count(("norm.kind=dyt", FRESH)) == 3
    assert ("norm.kind=layernorm", SEARCH) not in more
    assert compare.main([*command, "optim.lr=1e-3"]) == 2
    assert "several rates=false, there true" in capsys.readouterr().err
    assert compare.main([*command, "optim.beta2=0.9"]) == 2
    assert "runs.jsonl: norm.kind=layernorm is of something else: optim.beta2=0.9, there 0.99. " in capsys.readouterr().err


def test_runs_of_other_code_versions_or_cards_are_not_mixed(studied, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("measure.store.modules_hash", lambda *_: "other")
    assert compare.main([*tiny, *SWEEP, f"folder={studied}", "resume=auto"]) == 2
    assert "runs.jsonl is of something else: code=other, there " in capsys.readouterr().err
