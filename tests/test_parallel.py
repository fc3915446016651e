"""torchrun train.py, as a user gives it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.ranks import train_together
from tests.runs import ROOT, bits, environment
from training.plot import read_metrics

STEPS = ["train.steps=12", "eval.every=6", "logging.every=1", "checkpoint.every=4", "sample.tokens=0", "model.dropout=0.1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# train.py with something that happens to rank 1 in the middle of step 7, once
HAPPENS = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
import train
original, once = train.training_step, Path({once!r})
def step(forward, state, batch, index, *rest):
    if index == 6 and os.environ["RANK"] == "1" and not once.exists():
        once.touch()
        {what}
    return original(forward, state, batch, index, *rest)
train.training_step = step
sys.argv[0] = {root!r} + "/train.py"
sys.exit(train.main(train.train))
"""


@pytest.fixture(scope="module")
def tiny(tiny):
    return [*tiny, *STEPS]


def torchrun(folder, arguments, *options, what="pass"):
    """The process of torchrun, in `folder`; `what` happens to rank 1."""
    program = folder / f"train_{'_'.join(what.split()[:1])}.py"
    text = HAPPENS.format(root=str(ROOT), once=str(folder / "once"), what=what)
    program.write_text(text, encoding="utf-8")
    return subprocess.Popen(
        [*TORCHRUN, *options, str(program), *arguments],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_metrics(process, folder):
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 150
    while process.poll() is None and not (metrics.is_file() and read_metrics(metrics)) and time.monotonic() < deadline:
        time.sleep(0.1)


def test_max_restarts_goes_on_by_itself_after_a_rank_was_killed_and_ends_with_the_same_bits(tiny, tmp_path):
    command = [*tiny, "resume=auto"]
    killed = torchrun(tmp_path, [*command, "folder=mine"], "--max-restarts=1", what="os.kill(os.getpid(), signal.SIGKILL)")
    out, err = killed.communicate(timeout=200)
    assert killed.returncode == 0, err
    assert out.count("resume=auto: goes on from mine/checkpoints/step_") == 1, "said once, by one rank"
    train_together(2, command, tmp_path / "whole")
    assert bits(tmp_path / "mine") == bits(tmp_path / "whole")


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGTERM, []),
        (signal.SIGUSR1, ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]),
    ],
)
def test_a_signal_to_torchrun_stops_all_ranks_after_a_checkpoint(tiny, tmp_path, number, options):
    endless = ["folder=mine", "train.steps=100000", "eval.every=0", "checkpoint.every=0"]
    process = torchrun(tmp_path, [*tiny, *endless], *options)
    wait_for_metrics(process, tmp_path / "mine")
    process.send_signal(number)
    out, err = process.communicate(timeout=200)
    assert "stopped after step" in out, err
    assert (tmp_path / "mine" / "last" / "model.safetensors").is_file()


def test_a_signal_to_ranks_and_to_a_torchrun_that_it_ends_leaves_a_checkpoint_and_no_traceback_of_a_rank(tiny, tmp_path):
    """Slurm's --signal=USR1@60, where torchrun was not told to handle it."""
    process = torchrun(tmp_path, [*tiny, "folder=mine", "train.steps=100000", "eval.every=0"])
    wait_for_metrics(process, tmp_path / "mine")
    ranks = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "train"], capture_output=True, text=True, check=True).stdout
    for pid in (process.pid, *map(int, ranks.split())):
        os.kill(pid, signal.SIGUSR1)
    out, err = process.communicate(timeout=200)  # until the last rank has closed its end
    assert process.returncode == -signal.SIGUSR1 and len(ranks.split()) == 2
    assert "stopped after step" in out and "Traceback" not in err
    assert (tmp_path / "mine" / "last" / "model.safetensors").is_file()


def test_a_refused_command_is_explained_and_the_reason_stands_last(tiny, tmp_path):
    process = torchrun(tmp_path, [*tiny, "train.batch_size=7"])
    _, err = process.communicate(timeout=200)
    assert process.returncode != 0
    cause = "error: train.batch_size=7 can't be cut into equal micro-batches"
    own, _, torchruns = err.partition("Root Cause")
    assert own.count(cause) == torchruns.count(cause) == 1, "once by the first rank, and at the end of torchrun's report"
    assert not (tmp_path / "runs").exists()


def test_a_sweep_whose_first_rank_can_not_write_ends_and_leaves_no_rank_waiting_in_the_next_job(tiny, tmp_path):
    (tmp_path / "sweep" / "0_seed-1" / "metrics.jsonl").mkdir(parents=True)  # where no line can be written
    process = torchrun(tmp_path, ["-m", *tiny, "folder=sweep", "seed=1,2"])
    try:
        _, err = process.communicate(timeout=200)
    finally:
        process.terminate()
    assert process.returncode == 1
    assert "stopped: sweep/0_seed-1/metrics.jsonl can't be written" in err.partition("Root Cause")[2]
    assert not (tmp_path / "sweep" / "1_seed-2").exists()
