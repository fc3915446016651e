"""Processes forked from one that has imported train.py and all that it imports later, as that takes seconds.

That one has run nothing, so that no thread of torch's is missing in those that are forked from it.
"""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import datasets  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import torch
import wandb  # noqa: F401

import train
from tests.runs import ROOT, environment

processes = multiprocessing.get_context("forkserver")
# the one list, as all users of a forkserver in a process share it; FSDP2 takes a second to import
processes.set_forkserver_preload(["tests.forks", "tests.ranks", "tests.resume.stops", "torch.distributed.fsdp"])
# also what is imported at the first use of an optimizer; not autograd, which has threads
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()


class Command:
    """train.py with these arguments in folder `cwd`, but for the start of the interpreter. `more` is in its environment."""

    def __init__(self, arguments: list[str], cwd: Path, **more: str) -> None:
        self.args = arguments
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name) / name for name in ("out", "err")]
        self._process = processes.Process(target=_command, args=(arguments, cwd, self._outputs, more), daemon=True)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self._process.pid, number)

    def finish(self, within: float = 120) -> subprocess.CompletedProcess:
        """Waits for its end, which is a return code of -SIGKILL after so many seconds."""
        self._process.join(within)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        out, err = (path.read_text(encoding="utf-8") for path in self._outputs)
        self._folder.cleanup()
        return subprocess.CompletedProcess(self.args, self._process.exitcode, out, err)


def _command(arguments: list[str], cwd: Path, outputs: list[Path], more: dict[str, str]) -> None:
    os.chdir(cwd)
    given = environment(cwd, **more)
    os.environ.clear()
    os.environ.update(given)
    for number, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    encoding = more.get("PYTHONIOENCODING", "utf-8")
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding=encoding) for number in (1, 2))
    sys.argv = [str(ROOT / "train.py"), *arguments]
    try:
        sys.exit(train.main(train.train))
    finally:
        atexit._run_exitfuncs()
