"""The bar of an ablation: how far it is, on what, and how long the rest takes."""

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tqdm import tqdm


class Progress:
    """A bar over training steps on a terminal; elsewhere a line for each part that begins."""

    def __init__(self, steps: int) -> None:
        self._bar: Any = tqdm(total=steps, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty())

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._bar.close()

    def now(self, overrides: Mapping[str, str], what: str) -> None:
        label = " ".join([*(f"{key}={value}" for key, value in overrides.items()), what])
        if self._bar.disable:
            print(label, flush=True)
        else:
            self._bar.set_description(label)

    def add(self, steps: int) -> None:
        self._bar.update(steps)
