"""Processes forked from one that has imported train.py, torchrun and all that they import later, as that takes seconds.

That one has run nothing, so that no thread of torch's is missing in those that are forked from it.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import datasets  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import torch
from torch.distributed import run as elastic

import train  # noqa: F401
from tests.runs import environment

processes = multiprocessing.get_context("forkserver")
# the one list, as all users of a forkserver in a process share it; FSDP2 takes a second to import
processes.set_forkserver_preload(["tests.forks", "tests.ranks", "tests.resume.stops", "torch.distributed.fsdp"])
# also what is imported at the first use of an optimizer; not autograd, which has threads
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()


def torchrun(arguments: list[str], cwd: Path, **more: str) -> subprocess.CompletedProcess:
    """torchrun with these arguments in `cwd`, with `more` in its environment. The ranks that it starts are forked too."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("out", "err")]
        process = processes.Process(target=_torchrun, args=(arguments, cwd, outputs, more))
        process.start()
        process.join(120)
        process.kill()
        process.join()
        return subprocess.CompletedProcess(arguments, process.exitcode, *(path.read_text("utf-8") for path in outputs))


def _torchrun(arguments: list[str], cwd: Path, outputs: list[Path], more: dict[str, str]) -> None:
    os.chdir(cwd)
    given = environment(cwd, **more)
    os.environ.clear()
    os.environ.update(given)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding="utf-8") for number in (1, 2))
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
