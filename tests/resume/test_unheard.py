"""A run whose output nobody reads any more, as of `train.py 2>&1 | tee log`, whose tee the same Ctrl-C has ended."""

import os
import pty
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.forks import Command
from tests.resume.stops import stop_with
from tests.runs import logged, train_here, wait_until
from training import storage


@contextmanager
def unread():
    """Nobody reads what goes to stdout and stderr within the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stdout", "stderr"):
            reader, writer = os.pipe()
            os.close(reader)
            patch.setattr(sys, name, os.fdopen(writer, "w"))
        yield
        sys.stdout.close()  # with what is still in its buffer
        sys.stderr.close()


def test_ctrl_c_makes_a_checkpoint_though_nobody_reads_what_the_run_shows(tiny, tmp_path):
    with unread():
        assert stop_with(signal.SIGINT, 4, [*tiny, "logging.every=1"], tmp_path / "run") == 130
    assert [storage.step_of(path) for path in storage.checkpoints(tmp_path / "run")] == [4]


def test_a_run_whose_output_has_no_room_goes_on_and_says_so(tiny, tmp_path, monkeypatch, capsys):
    """As of `train.py > log` on a disk that is full."""
    full = Path("/dev/full").open("w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    train_here([*tiny, "train.steps=4", "logging.every=1"], tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").is_file()
    assert capsys.readouterr().err.count("standard output can't be written: No space left on device") == 1
    full.close()  # with what was still in its buffer


def test_a_terminal_that_is_gone_stops_a_run_with_a_checkpoint(tiny, tmp_path):
    """A connection that breaks: the kernel sends SIGHUP, and what is written from then on fails."""
    overrides = ["train.steps=100000", "eval.every=0", "logging.every=1", "logging.wandb=offline", "folder=run"]
    ours, theirs = pty.openpty()
    process = Command([*tiny, *overrides], tmp_path, file=os.ttyname(theirs))
    os.close(theirs)
    wait_until(process, lambda: logged(tmp_path / "run") >= 3)
    os.close(ours)
    assert process.wait(100) == 128 + signal.SIGHUP
    [newest] = storage.checkpoints(tmp_path / "run")
    storage.verify(newest)
    assert (tmp_path / "run" / "loss.png").is_file() and not (tmp_path / "run" / "sample.txt").is_file()
