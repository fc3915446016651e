"""What may happen to a process: signals, a terminal that has gone, a pipe without a reader, a log on a full disk.

Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 stop a run after its current step. SIGUSR2 is free for other uses."""

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from tqdm import tqdm

from training.distributed import ALONE, World

ENDING = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]  # of a scheduler, a closed terminal, Slurm's --signal=USR1@60


class Stopped(SystemExit):
    """A signal ended work that can be done again; its code is the exit code of the process: 130 for Ctrl-C, as in a shell."""


def exit_on_signals() -> None:
    """Makes Ctrl-C and the signals of ENDING raise an exception, so that files and W&B are closed. `Interrupt` replaces it."""

    def stop(number: int, frame: FrameType | None) -> None:
        handle(ENDING, pass_over)  # a second signal must not disturb what the first one closes
        raise Stopped(128 + number)

    handle(ENDING, stop)
    handle([signal.SIGINT], signal.default_int_handler)  # during the imports it ends the process


def handle(numbers: Iterable[signal.Signals], handler: Any) -> dict[signal.Signals, Any]:
    """Sets a handler for signals that are not ignored, as SIGHUP is under nohup. Returns the previous handlers."""
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def pass_over(number: int, frame: FrameType | None) -> None:
    """Does nothing. SIG_IGN would not do: it means that the parent process wants the signal ignored."""


class Interrupt:
    """Within the block, the first signal (SIGINT or one of ENDING) is only noted, for `poll`. After it, SIGINT ends the process
    at once and the others are ignored, also behind the block. A signal after the last poll raises Stopped at the block's end.

    A second SIGTERM does nothing because it is often a copy of the first: `timeout` sends it to the process and to its group,
    Slurm to ranks and to torchrun, which passes it on. Under torchrun, which passes SIGINT on as well and ends slow ranks
    itself, a second SIGINT does nothing either.
    """

    def __init__(self, world: World = ALONE) -> None:
        self._number, self._world = 0, world

    def __enter__(self) -> "Interrupt":
        self._before = handle([signal.SIGINT, *ENDING], self._first)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self.check()
        finally:
            if not self._number:  # else the process is about to end, and a signal must not disturb it
                for number, handler in self._before.items():
                    signal.signal(number, handler)

    def poll(self, overdue: bool = False) -> tuple[int, bool]:
        """(the signal that has reached any rank or 0, whether anything is overdue on any rank), in one message between the
        ranks. All ranks call it together."""
        number, late = divmod(self._world.max(2 * self._number + overdue), 2)
        # 0 also where a signal came to this rank meanwhile, of which the other ranks do not know
        self._number = number or self._number
        return number, bool(late)

    def check(self) -> None:
        """Raises Stopped on all ranks, which call it together, if a signal has reached any."""
        if number := self.poll()[0]:
            raise Stopped(128 + number)

    def _first(self, number: int, frame: FrameType | None) -> None:
        self._number, alone = number, self._world.store is None
        handle(ENDING, pass_over)
        handle([signal.SIGINT], signal.SIG_DFL if alone else pass_over)
        if self._world.leads:
            hint = " Ctrl-C again quits at once." if alone and number == signal.SIGINT else ""
            with suppress(RuntimeError):  # the signal came in the middle of a write to the same stream
                show(f"\nStopping, with a checkpoint.{hint}", sys.stderr)


def take_any_encoding() -> None:
    """Makes standard output escape characters that its encoding lacks, as ASCII lacks ×. Standard error always does.

    A process that was started without a stream, as by `2>&-`, gets one that drops all text.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def show(text: str, stream: TextIO | None = None) -> None:
    """Prints a line without tearing a progress bar. `stream` is standard output by default.

    The run goes on if the line can't be printed: Ctrl-C ends `| tee` too, and a broken connection closes the terminal.
    """
    stream = stream or sys.stdout
    try:
        tqdm.write(text, file=stream)
        stream.flush()
    except OSError as error:
        mute(stream)
        if stream is not sys.stderr:
            show(f"standard output can't be written: {error.strerror}. Nothing more is shown there.", sys.stderr)


def mute(stream: TextIO) -> None:
    """Drops all text that is written to the stream from now on, and the text in its buffer."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
