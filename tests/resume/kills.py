"""Runs that kill -9 ends, each a forked process."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from configs import Config
from tests.forks import processes
from tests.runs import composed, train_here

NAMES = [(os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "mkdir"), (Path, "symlink_to"), (shutil, "rmtree")]


def train_and_kill(overrides: list[str], folder: Path, how: Callable[[], object] | None = None, plot: bool = False) -> bool:
    """Trains, and returns whether it was killed, for which `how` has prepared its process; False: it came to its end before."""
    process = processes.Process(target=_train, args=(composed(overrides), overrides, folder, how, plot), daemon=True)
    process.start()
    process.join(300)
    assert process.exitcode in (0, -signal.SIGKILL), f"the run ended with {process.exitcode}"
    return process.exitcode == -signal.SIGKILL


def _train(cfg: Config, overrides: list[str], folder: Path, how: Callable[[], object] | None, plot: bool) -> None:
    if how is not None:
        how()
    train_here(overrides, folder, plot, cfg=cfg)


def after(seconds: float) -> None:
    """Kills the run so many seconds after the beginning of its first step."""
    import train

    first_step = train.training_step

    def starts_the_clock(*args):
        train.training_step = first_step
        threading.Timer(seconds, _kill).start()
        return first_step(*args)

    train.training_step = starts_the_clock


def drawing() -> None:
    """Kills the run where the first byte of its picture is about to be written."""
    Image.SAVE["PNG"] = lambda *_: _kill()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_operation(number: int) -> None:
    """Kills the run in this operation on files, counted from 1."""
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
