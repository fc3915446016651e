"""A disk that is full and a thread that writes leave a whole checkpoint."""

import shlex
import signal
import threading

import pytest

import train
from tests.ranks import train_together
from tests.resume.stops import AUTO, in_step, spoil, stop_with
from tests.runs import bits, no_space, train_here
from training import checkpoint, storage
from training.metrics import NonFiniteError
from training.storage import StorageError

MINUTES = ["checkpoint.keep=99", "eval.every=0", "logging.every=1"]  # and checkpoint.every=0, the default


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_full_disk_stops_the_run_with_whole_checkpoints_and_advice_that_works(tiny, tmp_path, monkeypatch, background):
    overrides, run = [*tiny, *AUTO, f"checkpoint.background={background}", "eval.every=0"], tmp_path / "a run"
    train_here(overrides, tmp_path / "whole")
    for step, kept, advice in ((2, [], "There is no checkpoint yet: make room"), (8, [6], "Earlier checkpoints are whole")):
        full = pytest.raises(StorageError, match=rf"can't be written: No space left on device\. {advice}")
        with in_step(step, lambda _: monkeypatch.setattr(checkpoint, "serialize", no_space)), full as error:
            train_here(overrides, run)
        monkeypatch.undo()
        assert [storage.step_of(path) for path in storage.checkpoints(run)] == kept
    train_here(shlex.split(str(error.value).partition("go on: python train.py ")[2]), run)
    assert bits(run) == bits(tmp_path / "whole")


def test_a_signal_while_a_thread_writes_waits_for_it(tiny, tmp_path):
    overrides = [*tiny, *AUTO, "checkpoint.background=true", "checkpoint.every=1"]
    assert stop_with(signal.SIGTERM, 4, overrides, tmp_path / "run") == 143
    assert storage.newest(tmp_path / "run") == (tmp_path / "run" / "checkpoints" / storage.name(4), [])


def test_a_step_waits_for_the_copy_alone_and_the_copy_is_of_its_own_step(tiny, tmp_path, monkeypatch):
    """The thread starts to write when two more steps are done; what it writes is still step 3's."""
    overrides = [*tiny, *AUTO, "checkpoint.every=3", "checkpoint.keep=99", "train.steps=6"]
    go, write = threading.Event(), checkpoint.serialize
    monkeypatch.setattr(checkpoint, "serialize", lambda tensors: go.wait(60) and write(tensors))
    with in_step(6, lambda _: go.set()):
        train_here([*overrides, "checkpoint.background=true"], tmp_path / "run")
    monkeypatch.undo()
    train_here(overrides, tmp_path / "plain")
    for name in ("model.safetensors", "training.safetensors"):
        files = [tmp_path / run / "checkpoints" / storage.name(3) / name for run in ("run", "plain")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_full_disk_in_the_thread_is_told_of_also_where_nan_ends_the_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "serialize", no_space)
    with in_step(8, spoil), pytest.raises(NonFiniteError, match=r"NaN(.|\n)*step_00000006 can't be written: No space left"):
        train_here([*tiny, *AUTO, "checkpoint.background=true", "eval.every=0"], tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [([], [10, 20, 30]), (["checkpoint.minutes=15"], [15, 30]), (["checkpoint.minutes=0"], [30])],
)
def test_a_checkpoint_is_made_by_time_too(tiny, tmp_path, monkeypatch, overrides, steps):
    minutes, original = [], train.training_step
    monkeypatch.setattr(train, "training_step", lambda *given: (minutes.append(1), original(*given))[1])
    monkeypatch.setattr("training.checkpoint.monotonic", lambda: 60.0 * len(minutes))  # of a minute each; the default is 10
    train_here([*tiny, *MINUTES, *overrides], tmp_path / "run")
    assert [storage.step_of(path) for path in reversed(storage.checkpoints(tmp_path / "run"))] == steps


def test_ranks_agree_on_checkpoints_by_time(tiny, tmp_path):
    """Of 20 ms, which end at other moments on each rank: one that saved alone would wait for the other to its timeout."""
    told = train_together(2, [*tiny, *MINUTES, "checkpoint.minutes=0.00033"], tmp_path / "run")
    assert [one["ended"] for one in told] == [None, None] and len(storage.checkpoints(tmp_path / "run")) > 1
