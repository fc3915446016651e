"""profile=true: a trace of a few steps of a run, and a table of where their time goes.

The first WAIT steps compile and fill caches, WARMUP more start the profiler, then STEPS are profiled. None of them counts as
step time. The run folder gets trace.json (for chrome://tracing or ui.perfetto.dev) and profile.txt.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import nn
from torch.profiler import profile, schedule

from measure import attribution
from measure.attribution import KernelTime, by_name, launches, shares
from training import storage
from training.distributed import ALONE, World
from training.run import Run
from training.storage import relative

WAIT, WARMUP, STEPS = 3, 1, 3  # steps without the profiler, steps that start it, profiled steps
UNTIMED = WAIT + WARMUP + STEPS
TRACE, TABLE = "trace.json", "profile.txt"
LONGEST, WIDTH = 20, 100  # kernels in the table, and letters of their names


def profiled(run: Run, steps: Iterator[int], model: nn.Module, device: torch.device, world: World = ALONE) -> Iterator[int]:
    """Yields the steps of a run. With profile=true the first rank profiles some of them: trace.json and profile.txt.

    Raises:
        StorageError: a file can't be written.
    """
    cfg, left = run.cfg, run.cfg.train.steps - run.origin.step
    if cfg.profile and left < UNTIMED:
        run.say(f"profile=true: nothing will be profiled, as this start has {left} steps and a profile needs {UNTIMED}")
    elif cfg.profile and world.leads:
        yield from islice(steps, WAIT)
        plan = schedule(wait=0, warmup=WARMUP, active=STEPS, repeat=1)
        marked = attribution.marked_sites(None if cfg.train.compile else model)  # hooks would compile a compiled step again
        with marked, profile(activities=attribution.activities(device), schedule=plan) as profiler:
            for step in islice(steps, WARMUP + STEPS):
                yield step
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # so that a step's kernels are in its own part of the trace
                profiler.step()
        _keep(run, profiler, device)
    yield from steps


def _keep(run: Run, profiler: profile, device: torch.device) -> None:
    kernels = attribution.times(profiler, device, STEPS)
    title = f"{'GPU time' if device.type == 'cuda' else 'time of CPU operators'} of a step, mean of {STEPS}"
    unfinished = run.folder / f".unfinished_{TRACE}"  # the profiler wants a name that ends in .json
    with storage.as_storage_errors(run.folder / TRACE):
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(run.folder / TRACE)
    storage.replace_text(run.folder / TABLE, f"{title}\n\n{table(kernels)}\n\n{longest(kernels)}\n")
    run.say(f"\n{title}; {TRACE} and {TABLE} are in {relative(run.folder)}\n\n{table(kernels)}\n")


def table(kernels: list[KernelTime]) -> str:
    """Milliseconds, share and launches of each kind of work, a line each and one for all."""
    rows = [(share.group, share.ms, share.launches) for share in shares(kernels)]
    total = sum(ms for _, ms, _ in rows)
    lines = [f"{'':<9}  {'ms':>10}  {'%':>5}  {'launches':>8}"]
    for group, ms, count in [*rows, ("all", total, launches(kernels))]:
        lines.append(f"{group:<9}  {ms:>10.3f}  {100 * ms / total if total else 0:>5.1f}  {count:>8,}")
    return "\n".join(lines)


def longest(kernels: list[KernelTime]) -> str:
    """The kernels that take most of a step, and the kind of work that each is counted as."""
    found = by_name(kernels)
    lines = [f"{'ms':>10}  {'launches':>8}  {'':<9}  the {min(LONGEST, len(found))} longest of {len(found)}"]
    lines += [f"{k.ms:>10.3f}  {k.launches:>8.1f}  {k.group:<9}  {k.name[:WIDTH]}" for k in found[:LONGEST]]
    return "\n".join(lines)
