"""Processes forked from one that has imported train.py, torchrun and all that they import later, as that takes seconds.

That one has run nothing, so that no thread of torch's is missing in those that are forked from it.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import datasets  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import torch
import wandb  # noqa: F401
from torch.distributed import run as elastic

import train
from tests.runs import ROOT, environment

processes = multiprocessing.get_context("forkserver")
# the one list, as all users of a forkserver in a process share it; FSDP2 takes a second to import
processes.set_forkserver_preload(["tests.forks", "tests.ranks", "tests.resume.stops", "torch.distributed.fsdp"])
# also what is imported at the first use of an optimizer; not autograd, which has threads
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()


class Command:
    """train.py with these arguments in folder `cwd`, but for the start of the interpreter. `more` is in its environment.

    Args:
        torchrun: the arguments are torchrun's, and the ranks that it starts are forked too.
        file: gets the output; the process then leads a session, whose terminal this may be. None: `finish` returns it.
    """

    def __init__(self, arguments: list[str], cwd: Path, torchrun: bool = False, file: str | None = None, **more: str) -> None:
        self.args = arguments
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name) / name for name in ("out", "err")]
        given = (arguments, cwd, torchrun, [file, file] if file else self._outputs, more)
        self._process = processes.Process(target=_command, args=given, daemon=not torchrun)  # a daemon may start none
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self._process.pid, number)

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.poll()

    def finish(self, within: float = 120) -> subprocess.CompletedProcess:
        """Waits for its end, which is a return code of -SIGKILL after so many seconds."""
        self._process.join(within)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        out, err = (path.read_text(encoding="utf-8") if path.exists() else "" for path in self._outputs)
        self._folder.cleanup()
        return subprocess.CompletedProcess(self.args, self._process.exitcode, out, err)


def _command(arguments: list[str], cwd: Path, torchrun: bool, outputs: list, more: dict[str, str]) -> None:
    os.chdir(cwd)
    given = environment(cwd, **more)
    os.environ.clear()
    os.environ.update(given)
    if outputs[0] == outputs[1]:  # a terminal becomes that of a new session when the leader opens it to read and write
        os.setsid()
    for number, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    encoding = more.get("PYTHONIOENCODING", "utf-8")
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding=encoding) for number in (1, 2))
    sys.argv = [str(ROOT / "train.py"), *arguments]
    try:
        sys.exit(_torchrun(arguments) if torchrun else train.main())
    finally:
        atexit._run_exitfuncs()


def _torchrun(arguments: list[str]) -> None:
    parsed = elastic.config_from_args

    def forking(options):
        config, _, (_, *command) = parsed(options)  # python -u …
        config.start_method = "fork"
        return config, _rank, command

    elastic.config_from_args = forking
    elastic.main(arguments)


def _rank(*command: str) -> None:
    by_name = command[0] == "-m"
    sys.argv = [*command[by_name:]]
    run = runpy.run_module if by_name else runpy.run_path
    run(sys.argv[0], run_name="__main__")
