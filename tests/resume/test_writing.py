"""A disk that is full and a thread that writes leave a whole checkpoint."""

import errno
import os
import shlex
import signal
import subprocess
import threading
from pathlib import Path

import pytest

import train
from tests.forks import Command
from tests.ranks import train_together
from tests.resume.stops import AUTO, in_step, spoil, stop_with, train_until
from tests.runs import bits, no_space, raising, train_here
from training import checkpoint, storage
from training.checkpoint import TrainState
from training.metrics import NonFiniteError
from training.storage import StorageError


@pytest.fixture
def disk(tmp_path):
    """A small file system, and what gives it another size."""
    folder = tmp_path / "small disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder], check=False).returncode:
        pytest.skip("may not mount a file system here")
    yield folder, lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_answered_with_advice_that_works(tiny, tmp_path, disk):
    folder, resize = disk
    command = [*tiny, "checkpoint.every=4", "checkpoint.keep=9", "eval.every=0", f"folder={folder}/run"]
    full = Command(command, tmp_path).finish()
    assert full.returncode == 1 and "Traceback" not in full.stderr and "resume=" not in full.stderr
    assert "step_00000004 can't be written: No space left on device. There is no checkpoint yet: make room" in full.stderr
    resize("1m")
    full = Command([*command, "resume=auto"], tmp_path).finish()
    assert full.returncode == 1
    assert "Earlier checkpoints are whole. Make room, then go on: python train.py " in full.stderr
    resize("16m")
    program, *arguments = shlex.split(full.stderr.partition("go on: python ")[2].splitlines()[0])
    assert program == "train.py" and Command(arguments, tmp_path).finish().returncode == 0
    assert storage.step_of(storage.checkpoints(folder / "run")[0]) == 30


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_full_disk_stops_the_run_with_its_last_checkpoint_whole(tiny, tmp_path, monkeypatch, background):
    overrides, run = [*tiny, *AUTO, f"checkpoint.background={background}", "eval.every=0"], tmp_path / "run"
    train_here(overrides, tmp_path / "whole")
    with (
        in_step(8, lambda _: monkeypatch.setattr(checkpoint, "write_tensors", no_space)),
        pytest.raises(StorageError, match=r"step_00000012 can't be written: No space left on device.*Earlier checkpoints"),
    ):
        train_here(overrides, run)
    monkeypatch.undo()
    assert storage.newest(run) == (run / "checkpoints" / storage.name(6), [])
    train_here(overrides, run)
    assert bits(run) == bits(tmp_path / "whole")


def test_a_signal_while_a_thread_writes_waits_for_it(tiny, tmp_path):
    overrides = [*tiny, *AUTO, "checkpoint.background=true", "checkpoint.every=1"]
    assert stop_with(signal.SIGTERM, 4, overrides, tmp_path / "run") == 143
    assert storage.newest(tmp_path / "run") == (tmp_path / "run" / "checkpoints" / storage.name(4), [])


def test_a_step_waits_for_the_copy_alone_and_the_copy_is_of_its_own_step(tiny, tmp_path, monkeypatch):
    """The thread starts to write when two more steps are done; what it writes is still step 3's."""
    overrides = [*tiny, *AUTO, "checkpoint.every=3", "checkpoint.keep=99", "train.steps=6"]
    go, original = threading.Event(), TrainState.parts

    def slow(self, config, *, copied):
        parts = original(self, config, copied=copied)
        if self.step != 3:
            return parts
        first = next(iter(parts))
        return parts | {first: lambda file: (go.wait(60), parts[first](file))}

    monkeypatch.setattr(TrainState, "parts", slow)
    with in_step(6, lambda _: go.set()):
        train_here([*overrides, "checkpoint.background=true"], tmp_path / "run")
    monkeypatch.undo()
    train_here(overrides, tmp_path / "plain")
    assert go.is_set()
    for name in ("model.safetensors", "training.safetensors"):
        files = [tmp_path / run / "checkpoints" / storage.name(3) / name for run in ("run", "plain")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_full_disk_in_the_thread_is_told_of_also_where_nan_ends_the_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "write_tensors", no_space)
    with in_step(8, spoil), pytest.raises(NonFiniteError, match=r"NaN(.|\n)*step_00000006 can't be written: No space left"):
        train_here([*tiny, *AUTO, "checkpoint.background=true", "eval.every=0"], tmp_path / "run")


def test_a_file_system_without_links_keeps_checkpoints_and_says_so_once(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Path, "symlink_to", raising(PermissionError(errno.EPERM, "Operation not permitted")))
    run = train_until(14, [*tiny, *AUTO], tmp_path / "run")
    assert capsys.readouterr().err.count("without symbolic links: no last and no best there") == 1
    monkeypatch.undo()
    train_here([*tiny, *AUTO, "train.steps=16", "resume_with_changes=true"], run)
    assert checkpoint.read(run / "last").step == 16


MINUTES = ["checkpoint.keep=99", "eval.every=0", "logging.every=1"]  # and checkpoint.every=0, the default


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [([], [10, 20, 30]), (["checkpoint.minutes=15"], [15, 30]), (["checkpoint.minutes=0"], [30])],
)
def test_a_checkpoint_is_made_by_time_too(tiny, tmp_path, monkeypatch, overrides, steps):
    """Of steps that take a minute each; the default is 10 minutes."""
    minutes, original = [], train.training_step
    monkeypatch.setattr(train, "training_step", lambda *given: (minutes.append(1), original(*given))[1])
    monkeypatch.setattr("training.checkpoint.monotonic", lambda: 60.0 * len(minutes))
    train_here([*tiny, *MINUTES, *overrides], tmp_path / "run")
    assert [storage.step_of(path) for path in reversed(storage.checkpoints(tmp_path / "run"))] == steps


def test_ranks_agree_on_checkpoints_by_time(tiny, tmp_path):
    """Of 20 ms, which end at other moments on each rank: one that saved alone would wait for the other to its timeout."""
    told = train_together(2, [*tiny, *MINUTES, "checkpoint.minutes=0.00033"], tmp_path / "run")
    assert [one["ended"] for one in told] == [None, None] and len(storage.checkpoints(tmp_path / "run")) > 1
