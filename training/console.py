"""What a run shows, for as long as somebody reads it."""

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
    """Has standard output escape what its encoding lacks, as ASCII lacks ×. Standard error does so by itself."""
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


@contextmanager
def _while_read(stream: TextIO) -> Iterator[TextIO]:
    """Where the reader has gone, nothing more is shown and the run goes on: Ctrl-C ends `| tee` before the run has saved, and a
    connection that breaks takes the terminal with it."""
    try:
        yield stream
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())  # also for what is in the buffer when the process ends
