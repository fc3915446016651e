"""Files that are written whole or not at all, and the errors of a disk."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class StorageError(RuntimeError):
    """A file can't be written, for example on a full disk. The message says where and why."""


@contextmanager
def as_storage_errors(path: Path, advice: str = "Make room or choose another folder.") -> Iterator[None]:
    """Turns an OSError of the block, which writes to `path`, into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{relative(path)} can't be written: {error.strerror or error}. {advice}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives the block a name beside `path` for a new file or folder, which then takes its place, once it is on the disk.

    If the block fails, or the process ends in it, what `path` was stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    discard(temporary)  # of a killed process
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    finally:
        discard(temporary)  # there if it failed
    sync(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Replaces a small file. Raises StorageError."""
    with as_storage_errors(path), replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def json_text(data: Any, **how: Any) -> str:
    """JSON of plain data, with null for what is not finite: JSON has no number for it."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(of) for key, of in value.items()}
        if isinstance(value, list | tuple):
            return [finite(of) for of in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(data), allow_nan=False, **how)


def sync(path: Path) -> None:
    """Returns once a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: Path) -> None:
    """Deletes a file or a folder, if it is there."""
    shutil.rmtree(path, ignore_errors=True)  # of a file it does nothing
    path.unlink(missing_ok=True)


def relative(path: Path) -> str:
    """The path, relative to the current folder if it is inside it."""
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short
