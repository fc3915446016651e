"""Compiling ahead, in several processes: nine tenths of a sweep is compilation, and kernels are cached on disk.

Each process runs its share of the shapes once, untimed. What a library tunes by timing is tuned again by the process that
measures, which has the device to itself.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

import torch

from benchmarks import command
from benchmarks.cases import Inputs
from benchmarks.providers import Function
from benchmarks.timing import describe


def compile_in_processes(argv: Sequence[str], processes: int, shapes: int) -> None:
    """Runs this program `processes` times with --compile-only i/n; a line on their output is a shape done."""
    read, write = os.pipe()
    program = [sys.executable, "-m", "benchmarks.norms", *argv, "--compile-only"]
    alone = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # not a pool of compilers in each of them
    children = [subprocess.Popen([*program, f"{i}/{processes}"], stdout=write, env=alone) for i in range(processes)]
    os.close(write)
    try:
        with os.fdopen(read) as lines, command.progress(shapes, f"compiling in {processes} processes") as bar:
            for _ in lines:
                bar.update()
    finally:
        for child in children:
            child.terminate()  # those that are done don't mind
    failed = sum(child.wait() > 0 for child in children)
    if failed:
        print(f"{failed} of {processes} compiling processes failed; the rest is compiled when measured", file=sys.stderr)


def share_of(text: str) -> slice:
    """1/4 is every fourth shape, from the second on."""
    part, _, parts = text.partition("/")
    return slice(int(part), None, int(parts))


def forget_tuning() -> None:
    """Inductor would keep on disk which of its configurations was fastest, as seen on a device shared with other processes."""
    import torch._inductor.config as inductor

    inductor.autotune_local_cache = False


def run_once(functions: dict[str, Function], inputs: Inputs) -> None:
    """Forward and backward, so that both are compiled. A failure is met again, and recorded, by the process that measures."""
    for name, function in functions.items():
        try:
            torch.autograd.grad(function(inputs), inputs.leaves, inputs.upstream, allow_unused=True)
        except Exception as error:
            print(f"compiling {name}: {describe(error)}", file=sys.stderr)
