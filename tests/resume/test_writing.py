"""A disk that is full leaves whole checkpoints, and which steps have one."""

import shlex

import pytest

from measure.files import StorageError
from tests.ranks import train_together
from tests.resume.stops import AUTO, in_step
from tests.runs import bits, no_space, train_here
from training import checkpoint, storage
from training.step import TrainingStep

MINUTES = ["checkpoint.keep=99", "eval.every=0", "logging.every=1"]  # and checkpoint.every=0, the default


def test_a_full_disk_stops_the_run_with_whole_checkpoints_and_advice_that_works(tiny, tmp_path, monkeypatch):
    overrides, run = [*tiny, *AUTO, "eval.every=0"], tmp_path / "a run"
    train_here(overrides, tmp_path / "whole")
    for step, kept, advice in ((2, [], "There is no checkpoint yet: make room"), (8, [6], "Earlier checkpoints are whole")):
        full = pytest.raises(StorageError, match=rf"can't be written: No space left on device\. {advice}")
        with in_step(step, lambda _: monkeypatch.setattr(checkpoint, "serialize", no_space)), full as error:
            train_here(overrides, run)
        monkeypatch.undo()
        assert [storage.step_of(path) for path in storage.checkpoints(run)] == kept
    train_here(shlex.split(str(error.value).partition("go on: python train.py ")[2]), run)
    assert bits(run) == bits(tmp_path / "whole")


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [([], [10, 20, 30]), (["checkpoint.minutes=15"], [15, 30]), (["checkpoint.minutes=0"], [30])],
)
def test_a_checkpoint_is_made_by_time_too(tiny, tmp_path, monkeypatch, overrides, steps):
    minutes, original = [], TrainingStep.__call__
    monkeypatch.setattr(TrainingStep, "__call__", lambda *given: (minutes.append(1), original(*given))[1])
    monkeypatch.setattr("training.checkpoint.monotonic", lambda: 60.0 * len(minutes))  # of a minute each; the default is 10
    train_here([*tiny, *MINUTES, *overrides], tmp_path / "run")
    assert [storage.step_of(path) for path in reversed(storage.checkpoints(tmp_path / "run"))] == steps


def test_ranks_agree_on_checkpoints_by_time(tiny, tmp_path):
    """Of 20 ms, which end at other moments on each rank: one that saved alone would wait for the other to its timeout."""
    told = train_together(2, [*tiny, *MINUTES, "checkpoint.minutes=0.00033"], tmp_path / "run")
    assert [one["ended"] for one in told] == [None, None] and len(storage.checkpoints(tmp_path / "run")) > 1
