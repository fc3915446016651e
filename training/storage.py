"""Where a run's checkpoints lie: written whole or not at all, checked when read, the newest few kept.

    runs/NAME/checkpoints/step_00000200/    model.safetensors, training.safetensors, state.json, tokenizer.json, SHA256SUMS
    runs/NAME/last, runs/NAME/best          links to the newest checkpoint and to the one with the least validation loss

A checkpoint is made under a temporary name, its bytes are flushed to the disk, and then it is renamed: a crash at any moment
leaves none of it or all of it. SHA256SUMS is in the format of `sha256sum --check`.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from configs.compose import as_typed

FOLDER = "checkpoints"
SUMS = "SHA256SUMS"


class Sink(Protocol):
    """A file that is open for writing, as far as the parts of a checkpoint need one."""

    def write(self, data: bytes, /) -> object: ...


class StorageError(RuntimeError):
    """What a run should keep can't be written: a full disk, a folder that is not writable. The message says where and why."""


class NoLinksError(StorageError):
    """The file system of the run's folder has no symbolic links."""


class DamagedError(ValueError):
    """A checkpoint that is not what was written."""


def commit(run: Path, step: int, parts: Mapping[str, Callable[[Sink], object]]) -> Path:
    """Keeps a checkpoint of `step` in the run's folder.

    Args:
        parts: by file name, what writes the file.

    Raises:
        StorageError: it can't be written; checkpoints that were there before are as they were.
    """
    folder = run / FOLDER
    final, temporary = folder / name(step), folder / f".{name(step)}.tmp"
    with explained(final, way_on(run)):
        _discard(temporary)  # of a process that was killed
        first = not folder.is_dir()
        try:
            temporary.mkdir(parents=True)
            sums = "".join(f"{_write(temporary / part, write)}  {part}\n" for part, write in parts.items())
            _write(temporary / SUMS, lambda file: file.write(sums.encode()))
            sync_folder(temporary)
            temporary.rename(final)
        except BaseException:
            _discard(temporary)
            raise
        for changed in (folder, run, run.parent) if first else (folder,):
            sync_folder(changed)
    return final


def name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def kept(run: Path) -> list[Path]:
    """The checkpoints in a run's folder, the newest first."""
    found = [path for path in (run / FOLDER).glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(found, key=step_of, reverse=True)


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with those after it."""
    problems = []
    for checkpoint in kept(run):
        try:
            verify(checkpoint)
        except DamagedError as error:
            problems.append(str(error))
        else:
            return checkpoint, problems
    return None, problems


def verify(checkpoint: Path, parts: Iterable[str] | None = None) -> None:
    """Reads a checkpoint's files and compares them with their sums.

    Args:
        parts: only these files; None: all.

    Raises:
        DamagedError: a file is missing, cut short or changed.
        PermissionError: it may not be read, which is no damage.
    """
    try:
        text = (checkpoint / SUMS).read_text(encoding="utf-8")
        sums = {part: digest for digest, part in (line.split("  ") for line in text.splitlines())}
        files = {path.name for path in checkpoint.iterdir() if not path.name.startswith(".")}
        if not text.endswith("\n"):
            raise DamagedError(f"{relative(checkpoint / SUMS)} is damaged: its last line is cut short")
        if unlisted := files - {*sums, SUMS}:
            raise DamagedError(f"{relative(checkpoint)} is damaged: {SUMS} does not list {', '.join(sorted(unlisted))}")
        if missing := sums.keys() - files:
            raise DamagedError(f"{relative(checkpoint)} is damaged: {', '.join(sorted(missing))} is missing")
        for part in sums if parts is None else parts:
            with (checkpoint / part).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sums[part]:
                    raise DamagedError(f"{relative(checkpoint / part)} is damaged: its bytes are not those that were written")
    except (DamagedError, PermissionError):
        raise
    except FileNotFoundError as error:
        raise DamagedError(f"{relative(checkpoint)} is damaged: {Path(error.filename).name} is missing") from error
    except (OSError, ValueError, KeyError) as error:
        raise DamagedError(f"{relative(checkpoint)} is damaged, {SUMS} or what it lists: {error}") from error


def set_aside(run: Path, after: int) -> None:
    """Renames checkpoints beyond step `after`, which are damaged, so that the run can reach those steps again."""
    for checkpoint in kept(run):
        if step_of(checkpoint) > after:
            aside = checkpoint.with_name(f"damaged_{checkpoint.name}")
            _discard(aside)
            checkpoint.rename(aside)


def prune(run: Path, keep: int, best: int | None) -> None:
    """Deletes all checkpoints but the newest `keep` and that of step `best`, and what killed processes left half done."""
    for checkpoint in kept(run)[keep:]:
        if step_of(checkpoint) != best:
            with explained(checkpoint):
                # under another name first: what is half deleted is no checkpoint
                checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.tmp"))
    for trash in (run / FOLDER).glob(".step_*.tmp"):
        _discard(trash)


def link(run: Path, name: str, checkpoint: Path) -> None:
    """Points run/last or run/best to a checkpoint, in one step.

    Raises:
        NoLinksError: the file system has none.
        StorageError: it can't be written.
    """
    temporary = run / f".{name}.tmp"
    with explained(run / name):
        temporary.unlink(missing_ok=True)
        try:
            temporary.symlink_to(checkpoint.relative_to(run))
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS, errno.ENOTSUP):
                raise NoLinksError(f"{relative(run)} is on a file system without symbolic links") from error
            raise
        if (run / name).is_dir() and not (run / name).is_symlink():  # the run was copied with its links followed
            _discard(copied := run / f"copied_{name}")
            (run / name).rename(copied)
        temporary.replace(run / name)


def drop_dangling_link(run: Path, name: str) -> bool:
    """Deletes run/last or run/best if what it points to is gone; whether it was."""
    dangling = (run / name).is_symlink() and not (run / name).exists()
    if dangling:
        with explained(run / name):
            (run / name).unlink()
    return dangling


def replace_text(path: Path, text: str) -> None:
    """Replaces a small file in one step."""
    replace(path, lambda file: file.write(text.encode()))


def replace(path: Path, write: Callable[[Sink], object]) -> None:
    """Replaces a file by what `write` writes, in one step."""
    temporary = path.with_name(f".{path.name}.tmp")
    with explained(path):
        try:
            _write(temporary, write)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)  # there if it failed
        sync_folder(path.parent)


def way_on(run: Path) -> str:
    """What to do where a run can't write any more."""
    if kept(run):
        return f"Earlier checkpoints are whole. Make room, then go on: {go_on(run)}"
    return "There is no checkpoint yet: make room, or choose another place with folder=PATH, and give the command again."


def go_on(run: Path) -> str:
    """The command that goes on with a run."""
    return f"python train.py {as_typed('resume', relative(run))}"


@contextmanager
def explained(path: Path, advice: str = "Make room or choose another folder.") -> Iterator[None]:
    """What stops the block from writing to `path`, as a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{relative(path)} can't be written: {error.strerror or error}. {advice}") from error


def sync(path: Path) -> None:
    """Returns once the bytes of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    if os.name == "posix":  # where a folder can be opened
        sync(folder)


def relative(path: Path) -> str:
    """As short as a path can be written from here."""
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short


class _Summed:
    """A file that keeps the sum of what goes through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sum = file, hashlib.sha256()

    def write(self, data: bytes, /) -> None:
        self.sum.update(data)
        self._file.write(data)


def _write(path: Path, write: Callable[[Sink], object]) -> str:
    """Writes a file through to the disk; returns its SHA-256."""
    with path.open("wb") as file:
        summed = _Summed(file)
        write(summed)
        file.flush()
        os.fsync(file.fileno())
    return summed.sum.hexdigest()


def _discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
