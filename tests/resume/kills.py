"""Runs that kill -9 ends, each a forked process."""

import os
import shutil
import signal
import threading
from pathlib import Path

from PIL import Image

from configs import Config
from tests.forks import processes
from tests.runs import composed, train_composed

NAMES = [(os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "mkdir"), (Path, "symlink_to"), (shutil, "rmtree")]


def train_and_kill(
    overrides: list[str], folder: Path, after_s: float | None = None, operation: int | None = None, drawing: bool = False
) -> bool:
    """Trains, and returns whether it was killed; False: it came to its end before.

    Args:
        after_s: seconds after the beginning of its first step.
        operation: the operation on files in which to kill it, counted from 1.
        drawing: kill it where the first byte of its picture is about to be written.
    """
    arguments = composed(overrides), overrides, folder, after_s, operation, drawing
    process = processes.Process(target=_train, args=arguments, daemon=True)
    process.start()
    process.join(300)
    assert process.exitcode in (0, -signal.SIGKILL), f"the run ended with {process.exitcode}"
    return process.exitcode == -signal.SIGKILL


def _train(
    cfg: Config, overrides: list[str], folder: Path, after_s: float | None, operation: int | None, drawing: bool
) -> None:
    if after_s is not None:
        _kill_after(after_s)
    if operation is not None:
        _kill_in_operation(operation)
    if drawing:
        Image.SAVE["PNG"] = lambda *_: _kill()
    train_composed(cfg, overrides, folder, plot=drawing)


def _kill_after(seconds: float) -> None:
    import train

    first_step = train.training_step

    def starts_the_clock(*args):
        train.training_step = first_step
        threading.Timer(seconds, _kill).start()
        return first_step(*args)

    train.training_step = starts_the_clock


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_in_operation(number: int) -> None:
    from training import storage

    count = 0
    for owner, name in [*NAMES, (storage._Summed, "write")]:
        original = getattr(owner, name)

        def counted(*args, original=original, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                _kill()
            return original(*args, **kwargs)

        setattr(owner, name, counted)
