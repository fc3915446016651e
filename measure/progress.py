"""The progress bar of all measuring programs."""

import sys
from typing import Any

from tqdm import tqdm


def progress(total: int | None, what: str, unit: str = "cell") -> Any:
    """A bar with the time left on a terminal. Elsewhere it is a line every half minute, so that a log shows life.

    Args:
        total: None: not known.
    """
    return tqdm(total=total, desc=what, unit=unit, mininterval=0.2 if sys.stderr.isatty() else 30.0, dynamic_ncols=True)


def show_current(bar: Any, text: str) -> None:
    """Shows behind the bar what is being measured."""
    bar.set_postfix_str(text, refresh=sys.stderr.isatty())
