"""A run that goes on has one record: metrics without holes or repeats, one W&B run, its checkpoints, its results."""

import signal

import pytest

from model import GPT
from tests.resume.stops import AUTO, train_until
from tests.runs import FakeWandb, read_json, train_here
from training import checkpoint, storage
from training.checkpoint import Validation
from training.evaluation import Evaluation


def test_the_metrics_of_a_run_that_goes_on_have_no_repeat_and_no_hole_but_a_damaged_line(tiny, tmp_path):
    run = train_until(16, [*tiny, *AUTO], tmp_path / "run")
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    (run / "metrics.jsonl").write_bytes(b"\n".join([*lines[:2], b"\x00\xff\xfe{torn", *lines[3:], b'{"step": 16, "tra']))
    first = (run / "environment.json").read_bytes()
    _, metrics = train_here([*tiny, *AUTO], run)
    assert (run / "environment.json").read_bytes() == first
    assert (run / "environment_from_00000012.json").is_file(), "each start has its own"
    assert [line["step"] for line in metrics if "train/loss" in line] == [1, 2, *range(4, 31)]
    assert [line["step"] for line in metrics if "val/loss" in line] == [10, 20, 30]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == len(metrics)


def test_a_run_in_another_folder_leaves_the_first_as_it_was(tiny, tmp_path, monkeypatch):
    def kept():
        return {path: path.read_bytes() for path in half.rglob("*") if path.is_file()}

    # the first is of the run that is resumed, and better than what follows
    monkeypatch.setattr(Evaluation, "__call__", evaluations(1.0, 3.0, 2.0))
    half = train_here([*tiny, "train.steps=5", "eval.every=0"], tmp_path / "half")[0].folder
    before, changed = kept(), ["train.steps=15", "eval.every=10", f"resume={half}", "resume_with_changes=true"]
    summary, metrics = train_here([*tiny, *changed], tmp_path / "rest")
    assert kept() == before
    assert [line["step"] for line in metrics if "val/loss" in line] == [10, 15]
    assert summary.best.loss == 2.0  # of this folder, whose best checkpoint is its own
    assert checkpoint.read(summary.folder / "best").step == 15
    assert read_json(summary.folder / "run.json")["wandb_id"] != read_json(half / "run.json")["wandb_id"]


def evaluations(*values):
    """A stand-in for evaluations, whose losses are these."""
    left = iter(values)
    return lambda *_, **__: Validation(loss := next(left), loss)


def test_the_newest_checkpoints_are_kept_and_the_best(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Evaluation, "__call__", evaluations(3.0, 1.0, 2.0))
    train_here([*tiny, "checkpoint.every=3", "checkpoint.keep=3"], tmp_path / "run")
    assert [storage.step_of(path) for path in storage.checkpoints(tmp_path / "run")] == [30, 27, 24, 20]
    assert [checkpoint.read(tmp_path / "run" / name).step for name in ("best", "last")] == [20, 30]


def test_a_signal_in_the_last_sample_stops_the_command_after_it_and_the_same_wandb_run_goes_on(tiny, tmp_path, monkeypatch):
    fake, run, generate = FakeWandb(monkeypatch), tmp_path / "run", GPT.generate
    overrides = [*tiny, *AUTO, "train.steps=5", "logging.wandb=offline", "logging.group=g", "sample.prompt=the"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="143"):
        patch.setattr(GPT, "generate", lambda *a, **k: (signal.raise_signal(signal.SIGTERM), generate(*a, **k))[1])
        train_here(overrides, run)
    fake.finish.assert_called_once_with(exit_code=143)
    first = fake.arguments
    assert read_json(run / "summary.json")["final"]["loss"] > 0 and (run / "sample.txt").read_text().startswith("the")
    train_here([*overrides, "train.steps=6", "resume_with_changes=true"], run)
    assert fake.arguments["id"] == first["id"] and fake.arguments["group"] == first["group"] == "g"
    assert (first["resume"], fake.arguments["resume"]) == (None, "allow")
