"""Ctrl-C and SIGTERM that let the current step finish."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

from training.console import show
from training.distributed import ALONE, World


class Stopped(SystemExit):
    """A signal ended what can be done again; its code is that of the process."""


def exit_on_sigterm() -> None:
    """Has SIGTERM unwind the process as Ctrl-C does, so that what is open is closed; `Interrupt` replaces it."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # one that comes twice may not disturb what the first one closes
        raise Stopped(128 + number)

    signal.signal(signal.SIGTERM, stop)


class Interrupt:
    """Within the block, the first SIGINT or SIGTERM only sets `requested`. From then on, also behind the block, SIGINT ends the
    process at once and SIGTERM is ignored.

    A second SIGTERM is the first one again: `timeout` sends it to the process and to its group, Slurm to ranks and to torchrun,
    which passes it on. torchrun does so with SIGINT too, and itself ends what takes too long: there neither counts twice.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, world: World = ALONE) -> None:
        self.requested: signal.Signals | None = None
        self._world = world
        self._at_once = False

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._first) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.requested is None:  # else the process is about to end, and what it closes may not be disturbed
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def wanted(self) -> bool:
        """Whether a signal has reached any rank; `requested` then says on each rank which. All ranks call it together."""
        number = self._world.highest(self.requested or 0)
        if number:
            self.requested = signal.Signals(number)
        return bool(number)  # not of `requested`: a signal that has come to this rank meanwhile is news to the others

    def check(self) -> None:
        """Raises Stopped on all ranks where a signal has reached one. All ranks call it together."""
        if self.wanted():
            raise Stopped(self.exit_code)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within this block a signal raises Stopped, also one that came before: for what takes long and can be done again.

        Several ranks, which a signal reaches at different moments, `check` where the block begins and where it ends.
        """
        if self._world.store is not None:
            self.check()
            yield
            self.check()
            return
        try:
            self._at_once = True
            if self.requested:
                raise Stopped(self.exit_code)
            yield
        finally:
            self._at_once = False

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
        assert self.requested is not None
        return 128 + self.requested

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number)
        alone = self._world.store is None
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_DFL if alone else signal.SIG_IGN)
        if self._world.leads:
            with suppress(RuntimeError):  # in the middle of a write to the same stream
                hint = " Ctrl-C again quits at once." if alone and number == signal.SIGINT else ""
                show(f"\nFinishing this step, then a checkpoint.{hint}", sys.stderr)
        if self._at_once:
            raise Stopped(self.exit_code)
