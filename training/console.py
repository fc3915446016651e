"""Printing, also where the terminal has gone, the pipe has no reader or the disk of a log is full."""

import os
import sys
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
