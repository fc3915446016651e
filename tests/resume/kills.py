"""Runs that kill -9 ends, each forked from a process that has imported torch and train.py already, as that takes seconds.

The process is this file run as a program. It reads a run as a line of JSON, forks, and answers with the exit status; it has run
nothing itself, so that no thread of torch's is missing in its children.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.runs import ROOT, composed, train_here

NAMES = [(os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "mkdir"), (Path, "symlink_to"), (shutil, "rmtree")]


class Killer:
    """Use in `with`; starts the process that forks."""

    def __enter__(self):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.resume.kills"],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_):
        self._process.communicate()  # an end of file ends it

    def run(self, overrides: list[str], folder: Path, after_s: float | None = None, operation: int | None = None) -> bool:
        """Trains, and returns whether it was killed; False: it came to its end before.

        Args:
            after_s: seconds after the beginning of its first step.
            operation: the operation on files in which to kill it, counted from 1.
        """
        asked = json.dumps({"overrides": overrides, "folder": str(folder), "after_s": after_s, "operation": operation})
        print(asked, file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        assert status in (0, -signal.SIGKILL), f"the run ended with {status}"
        return status == -signal.SIGKILL


def serve() -> None:
    import datasets  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import torch
    import wandb  # noqa: F401

    import train  # noqa: F401

    torch.set_num_threads(1)
    # and what is imported at first use, but for autograd, whose threads would be missing in a fork
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()
    for line in sys.stdin:
        asked = json.loads(line)
        composed(asked["overrides"])  # kept for the children
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.dup2(2, 1)  # this process's standard output is for statuses
                _train(**asked)
                status = 0
            finally:
                sys.stdout.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _train(overrides: list[str], folder: str, after_s: float | None, operation: int | None) -> None:
    if after_s is not None:
        _kill_after(after_s)
    if operation is not None:
        _kill_in_operation(operation)
    train_here(overrides, Path(folder))


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


if __name__ == "__main__":
    serve()
