"""The time and memory of training steps, measured by CUDA events, or by a clock that is read after a synchronise."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch

AHEAD_MS = 1000.0  # of steps: how far the host may be ahead of the device. A signal is answered after these
FEWEST_AHEAD, MOST_AHEAD = 2, 64  # steps


@dataclass(frozen=True)
class Window:
    """The steps between two lines of metrics, without warm-up."""

    median_ms: float  # the typical step
    mean_ms: float  # for throughput, in which slow steps count


class StepClock:
    """Measures the block of `with clock.step()`. Evaluation and checkpoints go in `with clock.paused()`.

    On CUDA two events enclose a step. They are read once they have passed, so that the clock does not slow the steps. Only a
    host that is too far ahead of the device waits. The first `warmup` steps (compilation, allocator, caches) are not counted.
    """

    def __init__(self, device: torch.device, warmup: int = 3, now: Callable[[], float] = perf_counter) -> None:
        self.warmup = warmup
        self._device, self._now = device, now
        self._seen = 0  # steps that are over, warm-up included
        self._marks: deque[tuple[Any, Any]] = deque()  # begin and end of steps whose times are not read yet
        self._steps_ms: list[float] = []
        self._window = 0  # where the current window begins in _steps_ms
        self._peak_gb = 0.0  # of the steps before the last pause
        self._forget_peak()  # of earlier runs in this process

    @contextmanager
    def step(self) -> Iterator[None]:
        """The time of the block is one step, unless an exception ends it."""
        begin = self._mark()
        yield
        end = self._mark()
        if self._seen >= self.warmup:
            self._marks.append((begin, end))
            ahead = int(AHEAD_MS / self._steps_ms[-1]) if self._steps_ms else 0
            self._read(min(max(ahead, FEWEST_AHEAD), MOST_AHEAD))
        self._seen += 1

    def times(self, step: Callable[[int], object], numbers: Iterable[int]) -> list[float]:
        """Makes these steps; the times of every step so far, as `steps_ms`."""
        for number in numbers:
            with self.step():
                step(number)
        return list(self.steps_ms)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time and memory of the block belong to no step. It can't be inside a step."""
        self._peak_gb = self.peak_gb or 0.0
        try:
            yield
        finally:
            self._forget_peak()

    @property
    def counted(self) -> int:
        """The steps so far, without warm-up."""
        return len(self._steps_ms) + len(self._marks)

    def window(self, until: int | None = None) -> Window | None:
        """The steps since the last call. None: there were only warm-up steps. Waits for the last of them.

        Args:
            until: an earlier `counted`, for the steps up to there; None: all.
        """
        until = self.counted if until is None else until
        self._read(self.counted - until)
        times, self._window = self._steps_ms[self._window : until], until
        return Window(median(times), fmean(times)) if times else None

    @property
    def median_ms(self) -> float | None:
        """Median of all steps after warm-up."""
        return median(self.steps_ms) if self.steps_ms else None

    @property
    def steps_ms(self) -> list[float]:
        """Every step after warm-up, in order. Synchronises."""
        self._read(0)
        return self._steps_ms

    @property
    def peak_gb(self) -> float | None:
        """The most memory that a step used so far, warm-up included, in GiB. None: the device is not CUDA."""
        if self._device.type != "cuda":
            return None
        return max(self._peak_gb, torch.cuda.max_memory_allocated(self._device) / 2**30)

    def _read(self, left: int) -> None:
        """Reads the times of all steps but the last `left`."""
        while len(self._marks) > left:
            begin, end = self._marks.popleft()
            if self._device.type == "cuda":
                end.synchronize()
                self._steps_ms.append(begin.elapsed_time(end))
            else:
                self._steps_ms.append(1000 * (end - begin))

    def _forget_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _mark(self) -> Any:
        """Now: on CUDA an event in the current stream, elsewhere seconds, once all that was queued is done."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            return event
        if self._device.type != "cpu":  # work is queued on every accelerator
            torch.accelerator.synchronize(self._device)
        return self._now()
