"""A run whose output nobody reads any more, as of `train.py 2>&1 | tee log`, whose tee the same Ctrl-C has ended."""

import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from tests.resume.stops import stop_with
from tests.runs import train_here
from training import storage


@pytest.mark.parametrize(("ends", "number"), [(os.pipe, signal.SIGINT), (pty.openpty, signal.SIGHUP)], ids=["tee", "terminal"])
def test_a_signal_makes_a_checkpoint_though_nobody_reads_what_the_run_shows(tiny, tmp_path, ends, number):
    """SIGHUP is what the kernel sends where a connection breaks, and with it the terminal."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stdout", "stderr"):
            reader, writer = ends()
            os.close(reader)
            patch.setattr(sys, name, os.fdopen(writer, "w"))
        assert stop_with(number, 4, [*tiny, "logging.every=1"], tmp_path / "run") == 128 + number
        sys.stdout.close()  # with what is still in its buffer
        sys.stderr.close()
    assert [storage.step_of(path) for path in storage.checkpoints(tmp_path / "run")] == [4]


def test_a_run_whose_output_has_no_room_goes_on_and_says_so(tiny, tmp_path, monkeypatch, capsys):
    """As of `train.py > log` on a disk that is full."""
    full = Path("/dev/full").open("w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    train_here([*tiny, "train.steps=4", "logging.every=1"], tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").is_file()
    assert capsys.readouterr().err.count("standard output can't be written: No space left on device") == 1
    full.close()  # with what was still in its buffer
