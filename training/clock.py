"""The time and memory of training steps, measured by CUDA events, or by a clock that is read after a synchronise."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

CYCLES_PER_S = 2e9  # of a GPU's clock, about
LONGEST_WAIT_S = 1.0


@dataclass(frozen=True)
class Window:
    """The steps between two lines of metrics, without warm-up."""

    median_ms: float  # the typical step
    mean_ms: float  # for throughput, in which slow steps count


class StepClock:
    """Measures the block of `with clock.step()`. Evaluation and checkpoints go in `with clock.paused()`.

    On CUDA two events enclose a step, and the device is synchronised only when times are read, so that the clock does not slow
    the steps. The first `warmup` steps (compilation, allocator, caches) are not counted.

    With `gpu_time` the last of them, on CUDA, is queued behind a wait of the GPU, which then never waits for the CPU in it:
    so it takes only the time that its kernels need.
    """

    def __init__(
        self,
        device: torch.device,
        warmup: int = 3,
        now: Callable[[], float] = time.perf_counter,
        gpu_time: bool = False,
    ) -> None:
        self.warmup = warmup
        self._queues = gpu_time
        self._queued: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # around the step behind the wait
        self._issue_s = 0.0  # CPU time of the last step
        self._device, self._now = device, now
        self._seen = 0  # steps begun, warm-up included
        self._inside = False
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # of finished steps; their times are not read yet
        self._steps_ms: list[float] = []
        self._window = 0  # where the current window begins in _steps_ms
        self._peak_gb: float | None = None  # of the steps before the last pause
        self._forget_peak()  # of earlier runs in this process

    @contextmanager
    def step(self) -> Iterator[None]:
        """The time of the block is one step, unless an exception ends it."""
        assert not self._inside, "a step inside a step"
        self._inside, counted = True, self._seen >= self.warmup
        try:
            if self._device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                queued = self._queues and self._seen == self.warmup - 1
                if queued:
                    torch.cuda._sleep(round(CYCLES_PER_S * min(2 * self._issue_s, LONGEST_WAIT_S)))
                began = self._now()
                begin.record()
                yield
                end.record()
                self._issue_s = self._now() - began
                if counted:
                    self._events.append((begin, end))
                elif queued:
                    self._queued = begin, end
            else:
                began = self._synchronised_now()
                yield
                if counted:
                    self._steps_ms.append(1000 * (self._synchronised_now() - began))
            self._seen += 1
        finally:
            self._inside = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time and memory of the block belong to no step. It can't be inside a step."""
        assert not self._inside, "clock.paused() inside clock.step(): its time would count as step time"
        self._peak_gb = self.peak_gb
        try:
            yield
        finally:
            self._forget_peak()

    def window(self) -> Window | None:
        """The steps since the last call. None: there were only warm-up steps. Synchronises."""
        times = self.steps_ms[self._window :]
        self._window = len(self._steps_ms)
        return Window(statistics.median(times), statistics.fmean(times)) if times else None

    @property
    def median_ms(self) -> float | None:
        """Median of all steps after warm-up."""
        return statistics.median(self.steps_ms) if self.steps_ms else None

    @property
    def gpu_ms(self) -> float | None:
        """What the kernels of a step take without waiting for the CPU. None: not measured. Synchronises."""
        if self._queued is None:
            return None
        self._queued[1].synchronize()
        return self._queued[0].elapsed_time(self._queued[1])

    @property
    def steps_ms(self) -> list[float]:
        """Every step after warm-up, in order. Synchronises."""
        if self._events:
            self._events[-1][1].synchronize()
            self._steps_ms += [begin.elapsed_time(end) for begin, end in self._events]
            self._events.clear()
        return self._steps_ms

    @property
    def peak_gb(self) -> float | None:
        """The most memory that a step used so far, warm-up included, in GiB. None: the device is not CUDA."""
        if self._device.type != "cuda":
            return None
        return max(self._peak_gb or 0.0, torch.cuda.max_memory_allocated(self._device) / 2**30)

    def _forget_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _synchronised_now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type != "cpu":  # work is queued on every accelerator
            torch.accelerator.synchronize(self._device)
        return self._now()


class PartClock:
    """Times the parts of a step: `with clock.step(): ...`, and inside it `clock.mark(part)` at the end of each part.

    A mark costs a few microseconds, so StepClock does not use them.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._now = device, now
        self._steps: list[list[tuple[str, torch.cuda.Event | float]]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        self._steps.append([])
        self.mark("")
        yield

    def mark(self, part: str) -> None:
        """Ends `part`, which began at the last mark."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._steps[-1].append((part, event))
        else:
            self._steps[-1].append((part, self._now()))

    def read(self) -> dict[str, list[float]]:
        """Milliseconds of each part, one number a step: times of a part that ends several times are summed. Synchronises."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        parts: dict[str, list[float]] = {}
        for marks in self._steps:
            total: dict[str, float] = {}
            for (_, before), (part, after) in pairwise(marks):
                total[part] = total.get(part, 0.0) + _between(before, after)
            for part, ms in total.items():
                parts.setdefault(part, []).append(ms)
        return parts


def _between(before: "torch.cuda.Event | float", after: "torch.cuda.Event | float") -> float:
    if isinstance(before, float) and isinstance(after, float):
        return 1000 * (after - before)
    return before.elapsed_time(after)  # type: ignore[union-attr, arg-type]
