"""Checkpoints and small files of a run, each written whole or not at all, and the folder that keeps them.

    runs/NAME/checkpoints/step_00000200/    model.safetensors, training.safetensors, state.json, tokenizer.json, SHA256SUMS

What is written has a temporary name until it is on the disk: after a crash at any moment all of it is there or nothing. A run
goes on from its newest checkpoint whose files have their sums. SHA256SUMS has the format of `sha256sum --check`.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from configs import ConfigError, machine
from configs.compose import as_typed
from data.cache import SUMS, verify

FOLDER, METRICS = "checkpoints", "metrics.jsonl"


class StorageError(RuntimeError):
    """A file of a run can't be written, for example on a full disk. The message says where and why."""


@contextmanager
def as_storage_errors(path: Path, advice: str = "Make room or choose another folder.") -> Iterator[None]:
    """Turns an OSError of the block, which writes to `path`, into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{relative(path)} can't be written: {error.strerror or error}. {advice}") from error


def advice(run: Path) -> str:
    """What to do when the run can't write any more."""
    if checkpoints(run):
        return f"Earlier checkpoints are whole. Make room, then go on: {resume_command(run)}"
    return "There is no checkpoint yet: make room, or choose another place with folder=PATH, and give the command again."


def resume_command(run: Path) -> str:
    """The command that resumes a run."""
    return f"python train.py {as_typed('resume', relative(run))}"


def relative(path: Path) -> str:
    """The path, relative to the current folder if it is inside it."""
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short


# ---- checkpoints -------------------------------------------------------------------------------------------------------------


def commit(
    run: Path, step: int, parts: Mapping[str, Callable[[], bytes]], keep: int | None = None, best: int | None = None
) -> Path:
    """Writes a checkpoint of `step` in the run's folder, then deletes all but the newest `keep` and that of step `best`.

    Args:
        parts: by file name, the function that makes the content.

    Raises:
        StorageError: it can't be written. Other checkpoints do not change.
    """
    folder = run / FOLDER
    final, temporary = folder / name(step), folder / f".{name(step)}.tmp"
    with as_storage_errors(final, advice(run)):
        try:
            if (run / METRICS).is_file():
                sync(run / METRICS)  # so that a checkpoint is never newer than the lines of metrics
            temporary.mkdir(parents=True, exist_ok=True)  # a killed process may have left it
            sums = ""
            for part, make in parts.items():
                sums += f"{_write(temporary / part, make())}  {part}\n"
            _write(temporary / SUMS, sums.encode())
            sync(temporary)
            temporary.rename(final)
        finally:
            _discard(temporary)  # there if it failed
        for changed in (folder, run, run.parent):  # the first checkpoint is in a new folder, and the run may be
            sync(changed)
        for old in checkpoints(run)[keep:] if keep else ():
            if step_of(old) != best:  # renamed first: a folder that is deleted in part must not look like a checkpoint
                old.rename(old.with_name(f".{old.name}.tmp"))
    for trash in folder.glob(".step_*.tmp"):  # also of killed processes
        _discard(trash)
    return final


def name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints in a run's folder, the newest first."""
    found = [path for path in (run / FOLDER).glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(found, key=step_of, reverse=True)


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, or None if there is none at all, and a line about each damaged one that is newer.

    Raises:
        ValueError: all are damaged.
    """
    problems: list[str] = []
    for checkpoint in checkpoints(run):
        try:
            verify(checkpoint)
            return checkpoint, problems
        except ValueError as error:
            problems.append(f"damaged checkpoint: {error}")
    if problems:
        raise ValueError("\n".join([*problems, f"No checkpoint in {relative(run)} is whole. Start in another folder."]))
    return None, []


def set_aside(run: Path, after: int) -> None:
    """Renames damaged checkpoints beyond step `after`, so that the run can save those steps again."""
    for checkpoint in checkpoints(run):
        if step_of(checkpoint) > after:
            aside = checkpoint.with_name(f"damaged_{checkpoint.name}")
            _discard(aside)
            checkpoint.rename(aside)


def _discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


# ---- files -------------------------------------------------------------------------------------------------------------------


def replace_text(path: Path, text: str) -> None:
    """Replaces a small file in one step."""
    temporary = path.with_name(f".{path.name}.tmp")
    with as_storage_errors(path):
        try:
            _write(temporary, text.encode())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)  # there if it failed
        sync(path.parent)


def _write(path: Path, content: bytes) -> str:
    """Writes a file and flushes it to the disk. Returns its SHA-256."""
    path.write_bytes(content)
    sync(path)
    return sha256(content).hexdigest()


def sync(path: Path) -> None:
    """Returns once a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl: `step`, and figures by name. Lines that a crash has damaged are left out."""
    lines, path = [], run / METRICS
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "step" in record:
                lines.append(record)
    return lines


# ---- folders -----------------------------------------------------------------------------------------------------------------


def claim(folder: Path) -> Path:
    """Makes a folder for one run, with an empty config.yaml. A number is appended to its name if another run has it.

    Raises:
        ConfigError: the folder can't be made or written, or would have other files than those of a run.
    """
    own = (Path.cwd(), machine.expanded("~"))
    if any(place.is_relative_to(os.path.realpath(folder)) for place in own) or any(folder.glob("*/config.yaml")):
        raise ConfigError(f"folder={folder}: the run's files would lie among others there. Name a new one: folder=runs/NAME.")
    try:
        for number in count(1):
            candidate = folder if number == 1 else folder.with_name(f"{folder.name}_{number}")
            candidate.mkdir(parents=True, exist_ok=True)
            if not checkpoints(candidate):  # else they were copied without their run
                with suppress(FileExistsError):  # mode x: one process alone makes the file
                    (candidate / "config.yaml").open("x").close()
                    return candidate
    except OSError as error:
        raise ConfigError(f"{relative(folder)}: {error.strerror}. Choose another folder with folder=PATH.") from error
    raise AssertionError("the numbers have no end")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a folder for this process. The lock ends with the process, however that ends.

    Raises:
        ConfigError: another process has it, or the folder can't be written.
    """
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"{relative(folder)}: another process is training there. Wait for it or stop it. If there is none, as on a file "
            "system without locks after a kill, delete the file .lock there."
        ) from None
    except OSError as error:
        raise ConfigError(f"{relative(folder)}: a run can't be kept there: {error.strerror}.") from error
    try:
        yield
    finally:
        lock.release()
