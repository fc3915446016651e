"""Runs that end before their time: dead in a step, reached by a signal in one, or killed by kill -9 in a forked process."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from configs import Config, ConfigError
from tests.forks import processes
from tests.runs import composed, train_here
from training.step import TrainingStep

AUTO = ["resume=auto", "logging.every=1", "checkpoint.every=6"]
OPERATIONS = [(os, "fsync"), (shutil, "rmtree"), *((Path, name) for name in ("write_bytes", "rename", "replace", "mkdir"))]


class Died(BaseException):
    """Stands for the end of a process, which writes nothing more."""


@contextmanager
def in_step(number, act):
    """Within the block `act(state)` happens in the middle of step `number`, counted from 1, before it changes anything."""
    original = TrainingStep.__call__

    def step(self, index):
        if index == number - 1:
            act(self.state)
        original(self, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "__call__", step)
        yield


def die(_):
    raise Died


def spoil(state):
    """A weight becomes NaN."""
    next(state.model.parameters()).data[0, 0] = float("nan")


def train_until(step, overrides, folder):
    """A run that dies in this step. Returns its folder."""
    with in_step(step, die), pytest.raises(Died):
        train_here(overrides, folder)
    return folder


def refused(overrides, folder, message):
    """The error of a run that is refused with this message."""
    with pytest.raises(ConfigError, match=message) as error:
        train_here(overrides, folder)
    return str(error.value)


def stop_with(number, step, overrides, folder):
    """A run that a signal reaches in this step. Returns its exit code."""
    with in_step(step, lambda _: signal.raise_signal(number)), pytest.raises(SystemExit) as stop:
        train_here(overrides, folder)
    return stop.value.code


def train_and_kill(overrides: list[str], folder: Path, how: Callable[[], object] | None = None) -> bool:
    """Trains, and returns whether it was killed, for which `how` has prepared its process; False: it came to its end before."""
    process = processes.Process(target=_train, args=(composed(overrides), overrides, folder, how), daemon=True)
    process.start()
    process.join(300)
    assert process.exitcode in (0, -signal.SIGKILL), f"the run ended with {process.exitcode}"
    return process.exitcode == -signal.SIGKILL


def _train(cfg: Config, overrides: list[str], folder: Path, how: Callable[[], object] | None) -> None:
    if how is not None:
        how()
    train_here(overrides, folder, cfg=cfg)


def after(seconds: float) -> None:
    """Kills the run so many seconds after the beginning of its first step."""
    first_step = TrainingStep.__call__

    def starts_the_clock(*args):
        TrainingStep.__call__ = first_step
        threading.Timer(seconds, _kill).start()
        first_step(*args)

    TrainingStep.__call__ = starts_the_clock


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_operation(number: int, act: Callable[[], object] = _kill, patch: Callable = setattr) -> None:
    """Kills the run, or acts otherwise, in this operation on files, counted from 1; half of a file is then written."""
    numbers = count(1)
    for owner, name in OPERATIONS:
        original = getattr(owner, name)

        def counted(*args, name=name, original=original, **kwargs):
            if next(numbers) == number:
                if name == "write_bytes":
                    original(args[0], args[1][: len(args[1]) // 2])
                act()
            return original(*args, **kwargs)

        patch(owner, name, counted)
