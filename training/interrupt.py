"""Ctrl-C that lets the current step finish."""

import signal
import sys
from types import FrameType, TracebackType


class Interrupt:
    """Within the block, the first SIGINT or SIGTERM only sets `requested`; a second one ends the process at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._first) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that a signal ended: 130 for Ctrl-C."""
        assert self.requested is not None
        return 128 + self.requested

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number)
        for each in self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        print("\nFinishing this step, then a checkpoint. Ctrl-C again quits at once.", file=sys.stderr, flush=True)
