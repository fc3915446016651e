"""torchrun train.py, as a user gives it; but for the start of the interpreters, which one test has."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.forks import torchrun
from tests.ranks import train_together
from tests.runs import ROOT, bits, environment, logged, newest
from training.storage import MARK, METRICS, TRAIN

STEPS = ["train.steps=12", "eval.every=6", "logging.every=1", "checkpoint.every=4", "sample.tokens=0", "model.dropout=0.1"]
TWO, PROGRAM = ["--standalone", "--nproc-per-node=2"], str(ROOT / "train.py")
# train.py, whose rank 1 is killed once, in step 7. Restarted, it comes ahead of rank 0: it must not read the first address
KILLED = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
import train
from training.step import TrainingStep
original, once = TrainingStep.__call__, Path("once")
def step(self, index):
    if index == 6 and os.environ["RANK"] == "1" and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, index)
TrainingStep.__call__ = step
time.sleep(once.exists() and os.environ["RANK"] == "0")
sys.argv[0] = {root!r} + "/train.py"
sys.exit(train.main())
"""


@pytest.fixture(scope="module")
def tiny(tiny):
    return [*tiny, *STEPS]


def test_max_restarts_goes_on_by_itself_after_a_rank_was_killed_and_ends_with_the_same_bits(tiny, tmp_path):
    command, program = [*tiny, "resume=auto"], tmp_path / "killed.py"
    program.write_text(KILLED.format(root=str(ROOT)), encoding="utf-8")
    done = torchrun([*TWO, "--max-restarts=1", str(program), *command, "folder=mine"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resume=auto: goes on from mine/checkpoints/step_") == 1, "said once, by one rank"
    train_together(2, command, tmp_path / "whole")
    assert bits(tmp_path / "mine") == bits(tmp_path / "whole")


def test_slurms_usr1_stops_all_ranks_after_a_checkpoint_though_it_ends_torchrun_and_no_rank_has_a_traceback(tiny, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", *TWO, PROGRAM, *tiny, "folder=mine"]
    command += ["train.steps=100000", "eval.every=0", "checkpoint.every=0"]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), **pipes, text=True)
    while not logged(tmp_path / "mine"):
        assert process.poll() is None
        time.sleep(0.05)
    ranks = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "train"], capture_output=True, text=True, check=True).stdout
    for pid in (process.pid, *map(int, ranks.split())):
        os.kill(pid, signal.SIGUSR1)
    out, err = process.communicate(timeout=200)  # until the last rank has closed its end
    assert process.returncode == -signal.SIGUSR1 and len(ranks.split()) == 2
    assert "stopped after step" in out and "Traceback" not in err
    assert (newest(tmp_path / "mine") / "model.safetensors").is_file()


def test_a_refused_command_is_explained_and_the_reason_stands_last(tiny, tmp_path):
    err = torchrun([*TWO, PROGRAM, *tiny, "train.batch_size=7"], tmp_path).stderr
    cause = "train.batch_size=7 can't be cut into equal micro-batches"
    own, _, torchruns = err.partition("Root Cause")
    assert own.count(cause) == 1 and cause in torchruns[-400:], "once by the first rank, and at the end of torchrun's report"
    assert not any(tmp_path.glob("runs/*"))


def test_a_sweep_whose_first_rank_can_not_write_ends_and_leaves_no_rank_waiting_in_the_next_job(tiny, tmp_path):
    first = tmp_path / "sweep" / "0_seed-1"
    (first / METRICS).mkdir(parents=True)  # where no line can be written
    (first / MARK).write_text(TRAIN)
    done = torchrun([*TWO, PROGRAM, "-m", *tiny, "folder=sweep", "seed=1,2", "resume=auto"], tmp_path)
    assert done.returncode == 1
    assert "sweep/0_seed-1/metrics.jsonl can't be written" in done.stderr.partition("Root Cause")[2]
    assert not (tmp_path / "sweep" / "1_seed-2").exists()
