"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 that let the current step finish. SIGUSR2 is left to others."""

import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from training.console import show
from training.distributed import ALONE, World

# Of a scheduler, of a terminal that is gone, of Slurm's --signal=USR1@60; Windows lacks the last two.
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]


class Stopped(SystemExit):
    """A signal ended what can be done again; its code is that of the process."""


def exit_on_signals() -> None:
    """Has Ctrl-C and the signals of ENDING unwind the process, so that what is open is closed; `Interrupt` replaces it."""

    def stop(number: int, frame: FrameType | None) -> None:
        handle(ENDING, pass_over)  # one that comes twice may not disturb what the first one closes
        raise Stopped(128 + number)

    handle(ENDING, stop)
    handle([signal.SIGINT], signal.default_int_handler)  # during the imports it ends the process


def handle(numbers: Iterable[signal.Signals], handler: Any) -> dict[signal.Signals, Any]:
    """Sets the handler of those signals that are not ignored, as SIGHUP is under nohup. Returns the ones of before."""
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def pass_over(number: int, frame: FrameType | None) -> None:
    """Does nothing. Not SIG_IGN, which says that whoever started the process wants the signal ignored."""


class Interrupt:
    """Within the block, the first signal of SIGINT and ENDING only sets `requested`. From then on, also behind the block,
    SIGINT ends the process at once and the others are ignored.

    A second SIGTERM is the first one again: `timeout` sends it to the process and to its group, Slurm to ranks and to torchrun,
    which passes it on. torchrun does so with SIGINT too, and itself ends what takes too long: there neither counts twice.
    """

    def __init__(self, world: World = ALONE) -> None:
        self.requested: signal.Signals | None = None
        self._world = world
        self._at_once = False
        self.answer = "Finishing this step, then a checkpoint."  # shown where a signal comes

    def __enter__(self) -> "Interrupt":
        self._before = handle([signal.SIGINT, *ENDING], self._first)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.requested is None:  # else the process is about to end, and what it closes may not be disturbed
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def wanted(self) -> bool:
        """Whether a signal has reached any rank; `requested` then says on each rank which. All ranks call it together."""
        return self.wanted_or(False)[0]

    def wanted_or(self, overdue: bool) -> tuple[bool, bool]:
        """`wanted`, and where it is not so, whether anything is overdue on any rank: in one message between the ranks."""
        number, late = divmod(self._world.highest(2 * (self.requested or 0) + overdue), 2)
        if number:
            self.requested = signal.Signals(number)
        # Not of `requested`: a signal that has come to this rank meanwhile is news to the others.
        return bool(number), bool(late)

    def check(self) -> None:
        """Raises Stopped on all ranks where a signal has reached one. All ranks call it together."""
        if self.wanted():
            raise Stopped(self.exit_code)

    @contextmanager
    def at_once(self, answer: str) -> Iterator[None]:
        """Within this block a signal raises Stopped, also one that came before: for what takes long and can be done again.

        Several ranks, which a signal reaches at different moments, `check` where the block begins and where it ends.
        """
        before, self.answer = self.answer, answer
        try:
            if self._world.store is not None:
                self.check()
                yield
                self.check()
                return
            self._at_once = True
            if self.requested:
                raise Stopped(self.exit_code)
            yield
        finally:
            self.answer, self._at_once = before, False

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        assert self.requested is not None
        return 128 + self.requested

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number)
        alone = self._world.store is None
        handle(ENDING, pass_over)
        handle([signal.SIGINT], signal.SIG_DFL if alone else pass_over)
        if self._world.leads:
            with suppress(RuntimeError):  # in the middle of a write to the same stream
                hint = " Ctrl-C again quits at once." if alone and number == signal.SIGINT else ""
                show(f"\n{self.answer}{hint}", sys.stderr)
        if self._at_once:
            raise Stopped(self.exit_code)
