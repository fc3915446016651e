"""A run that goes on has one record: metrics without holes or repeats, one W&B run, its checkpoints, its results."""

import signal

import pytest

from model import GPT
from tests.resume.stops import AUTO, train_until
from tests.runs import FakeWandb, read_json, train_here
from training import checkpoint, storage
from training import metrics as training_metrics
from training.checkpoint import Validation


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
    monkeypatch.setattr("training.metrics.evaluate", evaluations(1.0, 3.0, 2.0))
    half = train_here([*tiny, "train.steps=5", "eval.every=0"], tmp_path / "half")[0].folder
    before, changed = kept(), ["train.steps=15", "eval.every=10", f"resume={half}", "resume_with_changes=true"]
    summary, metrics = train_here([*tiny, *changed], tmp_path / "rest")
    assert kept() == before
    assert [line["step"] for line in metrics if "val/loss" in line] == [10, 15]
    assert summary.best.loss == 2.0  # of this folder, whose best checkpoint is its own
    assert checkpoint.read(summary.folder / "best").step == 15
    assert read_json(summary.folder / "run.json")["wandb_id"] != read_json(half / "run.json")["wandb_id"]


def evaluations(*values):
    """A stand-in for `evaluate`, whose losses are these."""
    left = iter(values)
    return lambda *_, **__: Validation(loss := next(left), loss)


def test_the_newest_checkpoints_are_kept_and_the_best(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("training.metrics.evaluate", evaluations(3.0, 1.0, 2.0))
    train_here([*tiny, "checkpoint.every=3", "checkpoint.keep=3"], tmp_path / "run")
    assert [storage.step_of(path) for path in storage.checkpoints(tmp_path / "run")] == [30, 27, 24, 20]
    assert [checkpoint.read(tmp_path / "run" / name).step for name in ("best", "last")] == [20, 30]


def test_an_evaluation_that_was_made_up_for_before_a_kill_is_in_the_metrics_once(tiny, tmp_path, monkeypatch):
    original = training_metrics.evaluate
    monkeypatch.setattr("training.metrics.evaluate", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit):
        train_here([*tiny, *AUTO], tmp_path / "run")  # at step 10
    monkeypatch.setattr("training.metrics.evaluate", original)
    train_until(12, [*tiny, *AUTO], tmp_path / "run")  # the checkpoint of step 10 still owes it
    _, metrics = train_here([*tiny, *AUTO], tmp_path / "run")
    assert [line["step"] for line in metrics if "val/loss" in line] == [10, 20, 30]


def test_a_signal_in_the_last_sample_keeps_the_summary_and_the_run_makes_it_up(tiny, tmp_path, monkeypatch, capsys):
    number = signal.SIGTERM
    fake, run = FakeWandb(monkeypatch), tmp_path / "run"
    overrides = [*tiny, *AUTO, "train.steps=5", "logging.wandb=offline", "logging.group=g"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=str(128 + number)):
        patch.setattr(GPT, "generate", lambda *_, **__: signal.raise_signal(number))
        train_here(overrides, run)
    fake.finish.assert_called_once_with(exit_code=128 + number)
    said, first = capsys.readouterr(), fake.arguments
    assert f"stopped after step 5; to go on: {storage.resume_command(run)}" in said.out
    assert read_json(run / "summary.json")["final"]["loss"] > 0 and not (run / "sample.txt").exists()
    summary, _ = train_here(overrides, run)
    assert (run / "sample.txt").read_text() == summary.sample != ""
    assert fake.arguments["id"] == first["id"] and fake.arguments["group"] == first["group"] == "g"
    assert (first["resume"], fake.arguments["resume"]) == (None, "allow")
