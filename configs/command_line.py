"""How a program ends with an error of its command."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from configs.keys import ConfigError

EXIT_CODE = 2  # of an error in the configuration, as in argparse


def refuse(error: ConfigError) -> int:
    """Prints the message of an error. Returns the exit code."""
    print(f"error: {error}", file=sys.stderr)
    record_for_torchrun(error)
    return EXIT_CODE


def record_for_torchrun(error: Exception) -> None:
    """Makes torchrun's report of a failed rank end with the message. The traceback would hide it."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": f"{error}", "extraInfo": {"py_callstack": f"{error}", "timestamp": f"{int(time.time())}"}}
        Path(file).write_text(json.dumps({"message": said}), encoding="utf-8")


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Raises what the data or the model refuse as a ConfigError."""
    with files_as_config_errors():
        try:
            yield
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error


@contextmanager
def files_as_config_errors() -> Iterator[None]:
    """Raises an error of a file that a command names, such as one whose name is too long, as a ConfigError."""
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:  # of a stream
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}." if error.filename else str(error)) from error


def now() -> str:
    """The time, as in the names of run folders."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
