"""Compiling ahead, in several processes: nine tenths of a sweep is compilation, and kernels are cached on disk.

A process runs one provider on one shape, untimed. What a library tunes by timing is tuned again by the process that measures,
which has the device to itself.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks import command, providers
from benchmarks.cases import make_inputs
from benchmarks.selection import Shape
from benchmarks.timing import describe, free_memory, side_stream

ROWS = 2048  # enough to compile by, but for torch.compile, whose code is for one number of rows


def pool(processes: int, before: Path | None) -> Executor:
    return ProcessPoolExecutor(processes, get_context("spawn"), prepare, (before,))


def prepare(before: Path | None) -> None:
    """What each process starts with."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # not a pool of compilers in each of the processes
    # It would keep on disk which of its configurations was fastest, as seen on a device shared with other processes.
    inductor.autotune_local_cache = False
    if before is not None:
        providers.load_before(before)


def compile_in_processes(
    shapes: Sequence[Shape], names: Sequence[str], device: torch.device, processes: int, before: Path | None
) -> None:
    """A failure is told, and met again by the process that measures. `before`: the folder of that provider."""
    jobs = [(shape, name) for shape in shapes for name in names if providers.PROVIDERS[name].make(shape.case, shape.setting)]
    # flash-attn tries tiles that take minutes to compile for the widest rows: those go first, so that no process ends with one.
    jobs.sort(key=lambda job: (job[1] != "flash-attn", -job[0].width))
    with (
        pool(processes, before) as executor,
        command.progress(len(jobs), f"compiling in {processes} processes", "kernel") as bar,
    ):
        try:
            for done in as_completed([executor.submit(compile_one, *job, device) for job in jobs]):
                if error := done.result():
                    print(error, file=sys.stderr)
                bar.update()
        except BrokenProcessPool as error:
            print(f"{describe(error)} The rest is compiled when measured", file=sys.stderr)
        except KeyboardInterrupt:
            executor.shutdown(cancel_futures=True)
            raise


def compile_one(shape: Shape, name: str, device: torch.device) -> str | None:
    """Runs forward and backward once, so that both are compiled; returns what failed."""
    torch._dynamo.reset()
    if name != "compile":  # the remainder, because kernels are compiled apart for numbers that 16 divides
        shape = replace(shape, rows=min(shape.rows, ROWS + shape.rows % 16))
    try:
        function = providers.PROVIDERS[name].make(shape.case, shape.setting)
        assert function is not None
        with side_stream(device):
            (inputs,) = make_inputs(shape.case, shape.setting, shape.rows, shape.width, 1, device)
            torch.autograd.grad(function(inputs), inputs.leaves, inputs.upstream, allow_unused=True)
            del inputs
            free_memory(device)
    except Exception as error:
        return f"compiling {name}, {shape}: {describe(error)}"
    return None
