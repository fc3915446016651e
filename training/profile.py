"""profile=true: a trace of a few steps of a run, and a table of where their time goes.

The first WAIT steps compile and fill caches, WARMUP more start the profiler, then STEPS are profiled. Profiled steps do not
count as step time. The run folder gets trace.json (for chrome://tracing or ui.perfetto.dev) and profile.txt.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

import torch
from torch import nn
from torch.profiler import ProfilerActivity, schedule
from torch.profiler import profile as TorchProfiler

from training import storage
from training.attribution import GROUPS, KernelTime, by_name, device_times, host_times, launches, marked_sites, shares
from training.clock import StepClock
from training.run import Run
from training.storage import relative

WAIT, WARMUP, STEPS = 3, 1, 3  # steps without the profiler, steps that start it, profiled steps
TRACE, TABLE = "trace.json", "profile.txt"
LONGEST = 20  # kernels in the table
WIDTH = 100  # of a kernel's name there


class StepProfiler:
    """Times or profiles the steps of a run: `with profiler.step(): training_step(...)`.

    Args:
        wanted: profile the run. Otherwise a step is `clock.step()` and nothing else.
        clock: times the steps that are not profiled. It is paused in the others.
        model: its norm sites are marked while the profiler runs. None for a compiled step: hooks would compile it again.
    """

    def __init__(self, wanted: bool, run: Run, clock: StepClock, device: torch.device, model: nn.Module | None) -> None:
        self._run, self._clock, self._device, self._model = run, clock, device, model
        self._left = WAIT + WARMUP + STEPS if wanted else 0  # steps until the profile is done
        self._open = ExitStack()
        self._profiler: TorchProfiler | None = None

    def __enter__(self) -> "StepProfiler":
        has = self._run.cfg.train.steps - self._run.origin.step
        if has < self._left:
            self._run.say(
                f"profile=true: nothing will be profiled, as this start has {has} steps and a profile needs {self._left}"
            )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._open.close()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step.

        Raises:
            StorageError: after the last profiled step, its files can't be written.
        """
        if not 0 < self._left <= WARMUP + STEPS:
            with self._clock.step():
                yield
            self._left = max(0, self._left - 1)
            return
        with self._clock.paused():
            if self._profiler is None:
                self._profiler = self._start()
            yield
            self._left -= 1
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # so that a step's kernels are in its own part of the trace
            self._profiler.step()
            if not self._left:
                self._open.close()
                self._keep(self._profiler)
                self._profiler = None

    def _start(self) -> TorchProfiler:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
        self._open.enter_context(marked_sites(self._model))
        return self._open.enter_context(
            TorchProfiler(activities=activities, schedule=schedule(wait=0, warmup=WARMUP, active=STEPS, repeat=1))
        )

    def _keep(self, profiler: TorchProfiler) -> None:
        events = list(profiler.events() or ())
        on_gpu = self._device.type == "cuda"
        kernels = (device_times if on_gpu else host_times)(events, STEPS)
        what = "GPU time" if on_gpu else "time of CPU operators"
        found = table(kernels)
        unfinished = self._run.folder / f".unfinished_{TRACE}"  # the profiler wants a name that ends in .json
        with storage.as_storage_errors(self._run.folder / TRACE):
            profiler.export_chrome_trace(str(unfinished))
            unfinished.replace(self._run.folder / TRACE)
        text = f"{what} of a step, mean of {STEPS}\n\n{found}\n\n{longest(kernels)}\n"
        storage.replace_text(self._run.folder / TABLE, text)
        self._run.say(
            f"\n{what} of a step, mean of {STEPS}; {TRACE} and {TABLE} are in {relative(self._run.folder)}\n\n{found}\n"
        )


def table(kernels: list[KernelTime]) -> str:
    """Milliseconds, share and launches of each kind of work, a line each and one for all."""
    found = shares(kernels)
    total = sum(share.ms for share in found)
    rows = [(share.group, share.ms, share.launches) for share in found] + [("all", total, launches(kernels))]
    width = max(map(len, GROUPS))
    lines = [f"{'':<{width}}  {'ms':>10}  {'%':>5}  {'launches':>8}"]
    for group, ms, count in rows:
        lines.append(f"{group:<{width}}  {ms:>10.3f}  {100 * ms / total if total else 0:>5.1f}  {count:>8,}")
    return "\n".join(lines)


def longest(kernels: list[KernelTime]) -> str:
    """The kernels that take most of a step, and the kind of work that each is counted as."""
    found = by_name(kernels)
    lines = [f"{'ms':>10}  {'launches':>8}  {'':<9}  the {min(LONGEST, len(found))} longest of {len(found)}"]
    lines += [f"{k.ms:>10.3f}  {k.launches:>8.1f}  {k.group:<9}  {k.name[:WIDTH]}" for k in found[:LONGEST]]
    return "\n".join(lines)
