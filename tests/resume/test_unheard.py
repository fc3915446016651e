"""A run whose output nobody reads any more, as of `train.py 2>&1 | tee log`, whose tee the same Ctrl-C has ended."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

from tests.resume.stops import stop_with
from tests.runs import ROOT, environment, logged, train_here, wait_until
from training import storage


def test_ctrl_c_makes_a_checkpoint_though_nobody_reads_what_the_run_shows(tiny, tmp_path, monkeypatch):
    for name in ("stdout", "stderr"):
        reader, writer = os.pipe()
        os.close(reader)
        monkeypatch.setattr(sys, name, os.fdopen(writer, "w"))
    code = stop_with(signal.SIGINT, 4, [*tiny, "logging.every=1"], tmp_path / "run")
    assert code == 130
    assert [storage.step_of(path) for path in storage.checkpoints(tmp_path / "run")] == [4]
    sys.stdout.close()  # with what was still in its buffer
    sys.stderr.close()


def test_a_run_whose_output_has_no_room_goes_on_and_says_so(tiny, tmp_path, monkeypatch, capsys):
    """As of `train.py > log` on a disk that is full."""
    full = Path("/dev/full").open("w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    train_here([*tiny, "train.steps=4", "logging.every=1"], tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").is_file()
    assert capsys.readouterr().err.count("standard output can't be written: No space left on device") == 1
    full.close()  # with what was still in its buffer


def test_help_that_is_read_in_part_is_no_error(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--help"], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def in_terminal(arguments, cwd, *before):
    """train.py as the leader of a session of its own in a terminal, and the terminal's other end."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*before, sys.executable, str(ROOT / "train.py"), *arguments],
        cwd=cwd,
        env=environment(cwd),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    return process, ours


def test_a_terminal_that_is_gone_stops_the_run_with_a_checkpoint_and_its_picture(tiny, tmp_path):
    """A connection that breaks: the kernel sends SIGHUP, and what is written from then on fails."""
    long = ["train.steps=100000", "eval.every=0", "logging.every=1", "logging.wandb=offline", "folder=run"]
    process, terminal = in_terminal([*tiny, *long], tmp_path)
    wait_until(process, lambda: logged(tmp_path / "run") >= 3)
    os.close(terminal)
    assert process.wait(60) == 128 + signal.SIGHUP
    [newest] = storage.checkpoints(tmp_path / "run")
    storage.verify(newest)
    assert (tmp_path / "run" / "loss.png").is_file()


def test_under_nohup_the_run_goes_on_without_its_terminal(tiny, tmp_path):
    process, terminal = in_terminal([*tiny, "folder=run", "train.steps=300", "logging.every=1"], tmp_path, "nohup")
    wait_until(process, lambda: logged(tmp_path / "run") >= 3)
    os.close(terminal)
    assert process.wait(100) == 0
    assert (tmp_path / "run" / "sample.txt").is_file()
