"""Printing, also where the terminal has gone, the pipe has no reader or the disk of a log is full."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from tqdm import tqdm


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
    """Prints a line to `stream`; None: standard output."""
    with _while_read(stream or sys.stdout) as stream:
        print(text, file=stream, flush=True)


def show_beside_bar(text: str) -> None:
    """Prints a line without tearing the bar."""
    with _while_read(sys.stdout) as stream:
        tqdm.write(text, file=stream)
        stream.flush()


def mute(stream: TextIO) -> None:
    """Drops all text that is written to the stream from now on, and the text in its buffer."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextmanager
def _while_read(stream: TextIO) -> Iterator[TextIO]:
    """Mutes the stream if nobody can read it any more, so that the run goes on.

    Ctrl-C ends `| tee` before the run has saved, and a broken connection closes the terminal. If the disk of a log is full,
    standard error says so.
    """
    try:
        yield stream
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise
        mute(stream)
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and stream is not sys.stderr:
            show(f"standard output can't be written: {error.strerror}. Nothing more is shown there.", sys.stderr)
