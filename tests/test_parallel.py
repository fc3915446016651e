"""torchrun train.py, as a user gives it."""

import os
import signal
import subprocess
import sys

import pytest

from tests.ranks import train_together
from tests.runs import ROOT, bits, environment, logged, wait_until

STEPS = ["train.steps=12", "eval.every=6", "logging.every=1", "checkpoint.every=4", "sample.tokens=0", "model.dropout=0.1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# train.py, whose rank 1 is killed in the middle of step 7, once
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
import train
original, once = train.training_step, Path("once")
def step(forward, state, batch, index, *rest):
    if index == 6 and os.environ["RANK"] == "1" and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return original(forward, state, batch, index, *rest)
train.training_step = step
sys.argv[0] = {root!r} + "/train.py"
sys.exit(train.main(train.train))
"""


@pytest.fixture(scope="module")
def tiny(tiny):
    return [*tiny, *STEPS]


def torchrun(folder, arguments, *options, program=ROOT / "train.py"):
    """The process of torchrun, in `folder`."""
    command, pipe = [*TORCHRUN, *options, str(program), *arguments], subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=pipe, stderr=pipe, text=True)


def test_max_restarts_goes_on_by_itself_after_a_rank_was_killed_and_ends_with_the_same_bits(tiny, tmp_path):
    command, program = [*tiny, "resume=auto"], tmp_path / "killed.py"
    program.write_text(KILLED.format(root=str(ROOT)), encoding="utf-8")
    killed = torchrun(tmp_path, [*command, "folder=mine"], "--max-restarts=1", program=program)
    out, err = killed.communicate(timeout=200)
    assert killed.returncode == 0, err
    assert out.count("resume=auto: goes on from mine/checkpoints/step_") == 1, "said once, by one rank"
    train_together(2, command, tmp_path / "whole")
    assert bits(tmp_path / "mine") == bits(tmp_path / "whole")


@pytest.mark.parametrize(
    ("number", "to_ranks", "code"),
    [(signal.SIGTERM, False, 1), (signal.SIGUSR1, True, -signal.SIGUSR1)],
    ids=["SIGTERM, which torchrun passes on", "Slurm's --signal=USR1@60, which ends torchrun"],
)
def test_a_signal_stops_all_ranks_after_a_checkpoint_and_no_rank_has_a_traceback(tiny, tmp_path, number, to_ranks, code):
    process = torchrun(tmp_path, [*tiny, "folder=mine", "train.steps=100000", "eval.every=0", "checkpoint.every=0"])
    wait_until(process, lambda: logged(tmp_path / "mine") > 0)
    ranks = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "train"], capture_output=True, text=True, check=True).stdout
    for pid in (process.pid, *map(int, ranks.split() if to_ranks else [])):
        os.kill(pid, number)
    out, err = process.communicate(timeout=200)  # until the last rank has closed its end
    assert process.returncode == code and len(ranks.split()) == 2
    assert "stopped after step" in out and (number == signal.SIGTERM or "Traceback" not in err)
    assert (tmp_path / "mine" / "last" / "model.safetensors").is_file()


def test_a_refused_command_is_explained_and_the_reason_stands_last(tiny, tmp_path):
    _, err = torchrun(tmp_path, [*tiny, "train.batch_size=7"]).communicate(timeout=200)
    cause = "train.batch_size=7 can't be cut into equal micro-batches"
    own, _, torchruns = err.partition("Root Cause")
    assert own.count(cause) == torchruns.count(cause) == 1, "once by the first rank, and at the end of torchrun's report"
    assert not (tmp_path / "runs").exists()


def test_a_sweep_whose_first_rank_can_not_write_ends_and_leaves_no_rank_waiting_in_the_next_job(tiny, tmp_path):
    (tmp_path / "sweep" / "0_seed-1" / "metrics.jsonl").mkdir(parents=True)  # where no line can be written
    process = torchrun(tmp_path, ["-m", *tiny, "folder=sweep", "seed=1,2"])
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "sweep/0_seed-1/metrics.jsonl can't be written" in err.partition("Root Cause")[2]
    assert not (tmp_path / "sweep" / "1_seed-2").exists()
