"""kill -9 at any moment: the run goes on from a checkpoint at most one interval old and ends with the same bits."""

import random
import signal
import time
from functools import partial

import pytest

from tests.forks import Command
from tests.resume.stops import after, in_operation, train_and_kill
from tests.runs import bits, logged, wait_until
from training import storage

KILLS = 50
EVERY = 3


@pytest.fixture(scope="module")
def tiny(tiny, tmp_path_factory):
    """Once a run has made the corpus and started the process that forks: neither is part of how long a run takes."""
    train_and_kill([*tiny, "train.steps=3"], tmp_path_factory.mktemp("first") / "run")
    return tiny


def newest_step(folder):
    found, problems = storage.newest(folder)
    assert not problems, "a killed run left a damaged checkpoint"
    return storage.step_of(found) if found else 0


# in the background a checkpoint is on its way for at most one interval
@pytest.mark.parametrize(("background", "intervals"), [("false", 1), ("true", 2)])
def test_a_run_killed_at_random_moments_goes_on_and_ends_with_the_same_bits(tiny, tmp_path, background, intervals):
    overrides = [*tiny, "model.dropout=0.1", "resume=auto", "logging.every=1", f"checkpoint.every={EVERY}", "eval.every=7"]
    overrides += [f"checkpoint.background={background}", "checkpoint.keep=1", "train.steps=20"]
    began = time.monotonic()
    assert not train_and_kill(overrides, tmp_path / "whole")
    whole_s = time.monotonic() - began
    wanted = bits(tmp_path / "whole")
    choose, kills, number, steps = random.Random(0), 0, 0, set()
    while kills < KILLS // 2:
        folder = tmp_path / f"run_{number}"
        saving = choose.random() < 0.5
        how = partial(in_operation, choose.randrange(1, 200)) if saving else partial(after, choose.uniform(0, 0.5 * whole_s))
        if train_and_kill(overrides, folder, how):
            kills += 1
            assert logged(folder) - newest_step(folder) <= intervals * EVERY, how
            steps.add(logged(folder))
        else:
            assert bits(folder) == wanted
            number += 1
    assert not train_and_kill(overrides, folder)
    assert bits(folder) == wanted
    assert len(steps) > 5, f"the kills were only at the steps {steps}"


def test_one_command_given_again_and_again_goes_on_through_kills_and_sigterm(tiny, tmp_path):
    """As a scheduler that preempts gives it: kill -9, SIGTERM, then to the end."""
    command = [*tiny, "resume=auto", "logging.every=1", "checkpoint.every=20", "eval.every=70", "train.steps=140"]
    command += ["model.dropout=0.1"]
    assert not train_and_kill(command, tmp_path / "whole")
    command += ["folder=mine", "logging.wandb=offline"]
    choose, folder = random.Random(0), tmp_path / "mine"
    for number, low in ((signal.SIGKILL, 10), (signal.SIGTERM, 70)):
        process, wanted = Command(command, tmp_path), low + choose.randrange(30)
        wait_until(process, lambda: logged(folder) >= wanted)  # noqa: B023
        process.send_signal(number)
        done = process.finish()
        assert done.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 143), done.stderr
        assert "Traceback" not in done.stderr
        assert logged(folder) - newest_step(folder) <= 20
    assert "resume=auto: goes on from mine/checkpoints/step_" in done.stdout and "stopped after step" in done.stdout
    last = Command(command, tmp_path).finish()
    assert last.returncode == 0, last.stderr
    assert bits(folder) == bits(tmp_path / "whole")
    names = [path.name.rpartition("-")[2] for path in folder.glob("wandb/offline-run-*")]
    assert len(names) == 3 and len(set(names)) == 1, "each start is the same run to W&B"
