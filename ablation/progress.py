"""The bar of an ablation: how far it is, on what, and how long the rest takes."""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from tqdm import tqdm

from training.console import show

# Seconds of a unit of work, until one has been done and tells: those of GPT-2 on a large GPU. Compiled warm-up compiles.
GUESSES = {"eager warm-up": 1.0, "compiled warm-up": 30.0, "eager blocks": 0.3, "compiled blocks": 0.3}
GUESSES |= {"eager profiles": 3.0, "compiled profiles": 3.0, "parity": 0.2}


class Progress:
    """A bar over the time that the work takes on a terminal; elsewhere a line for each part that begins.

    Training steps would be a bad measure of it: compiling takes as long as hundreds of them, parity's reference as ten. So work
    is counted by kind, and what is left of a kind takes as long as what was done of it.

    Args:
        plan: units of work by kind, one of GUESSES: {"eager warm-up": 3, "eager blocks": 69, "parity": 400}.
        now: a clock in seconds.
    """

    def __init__(self, plan: Mapping[str, int], now: Callable[[], float] = time.monotonic) -> None:
        self._plan, self._now = plan, now
        self._done: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._began = self._last = now()
        self._bar: Any = tqdm(
            total=1.0, bar_format="{l_bar}{bar}|{postfix}", dynamic_ncols=True, disable=not sys.stderr.isatty()
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._bar.close()

    def now(self, overrides: Mapping[str, str], what: str) -> None:
        label = " ".join([*(f"{key}={value}" for key, value in overrides.items()), what])
        if self._bar.disable:
            show(label)
        else:
            self._bar.set_description(label)

    def add(self, kind: str, units: int = 1) -> None:
        """Units of a kind are done: they are what the time since the last call went into."""
        now = self._now()
        self._done[kind] += units
        self._seconds[kind] += now - self._last
        self._last = now
        left, elapsed = self.seconds_left, now - self._began
        self._bar.n = elapsed / (elapsed + left) if left else 1.0
        self._bar.set_postfix_str(f"{clock(elapsed)}, {clock(left)} left", refresh=False)
        self._bar.refresh()

    @property
    def seconds_left(self) -> float:
        return sum(max(0, units - self._done[kind]) * self._of_a_unit(kind) for kind, units in self._plan.items())

    def _of_a_unit(self, kind: str) -> float:
        if self._done[kind]:
            return self._seconds[kind] / self._done[kind]
        return GUESSES[kind]


def clock(seconds: float) -> str:
    """02:05, or 1:02:05"""
    return tqdm.format_interval(round(seconds))
