"""Files of a run: its folder, its checkpoints, and small files, each written whole or not at all.

    runs/NAME/checkpoints/step_00000200/    model.safetensors, training.safetensors, state.json, tokenizer.json, SHA256SUMS
    runs/NAME/last, runs/NAME/best          links to the newest checkpoint and to the one with the least validation loss

A checkpoint is written under a temporary name, flushed to the disk, and then renamed: after a crash at any moment all of it is
there or nothing. SHA256SUMS has the format of `sha256sum --check`.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from filelock import FileLock, Timeout

from configs import ConfigError, machine
from configs.compose import as_typed

FOLDER = "checkpoints"
SUMS = "SHA256SUMS"


class Sink(Protocol):
    """A file that is open for writing."""

    def write(self, data: bytes, /) -> object: ...


class StorageError(RuntimeError):
    """A file of a run can't be written, for example on a full disk. The message says where and why."""


class NoLinksError(StorageError):
    """The file system of the run's folder has no symbolic links."""


class DamagedError(ValueError):
    """A checkpoint does not have the bytes that were written."""


def commit(run: Path, step: int, parts: Mapping[str, Callable[[Sink], object]]) -> Path:
    """Writes a checkpoint of `step` in the run's folder.

    Args:
        parts: by file name, the function that writes the file.

    Raises:
        StorageError: it can't be written. Other checkpoints do not change.
    """
    folder = run / FOLDER
    final, temporary = folder / name(step), folder / f".{name(step)}.tmp"
    with as_storage_errors(final, advice(run)):
        _discard(temporary)  # left by a process that was killed
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


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints in a run's folder, the newest first."""
    found = [path for path in (run / FOLDER).glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(found, key=step_of, reverse=True)


def run_of(path: Path) -> Path:
    """The run's folder where `path` is its checkpoints/; else `path`."""
    return path.parent if path.name == FOLDER and any(path.glob("step_*")) else path


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and a line about each damaged one that is newer."""
    problems = []
    for checkpoint in checkpoints(run):
        try:
            verify(checkpoint)
        except DamagedError as error:
            problems.append(str(error))
        else:
            return checkpoint, problems
    return None, problems


def verify(checkpoint: Path, parts: Iterable[str] | None = None) -> None:
    """Compares a checkpoint's files with their checksums.

    Args:
        parts: only these files; None: all.

    Raises:
        DamagedError: a file is missing, cut short or changed.
        PermissionError: a file may not be read. That is no damage.
    """
    try:
        text = (checkpoint / SUMS).read_text(encoding="utf-8")
        sums = {part: digest for digest, part in (line.split("  ") for line in text.splitlines())}
        files = {path.name for path in checkpoint.iterdir() if not path.name.startswith(".")}
        if not text.endswith("\n"):
            raise DamagedError(f"{relative(checkpoint / SUMS)} is damaged: its last line is cut short")
        # files that a file manager leaves, such as Thumbs.db, are no damage
        if unlisted := [name for name in files - sums.keys() if name.endswith((".safetensors", ".json"))]:
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
    """Renames damaged checkpoints beyond step `after`, so that the run can save those steps again."""
    for checkpoint in checkpoints(run):
        if step_of(checkpoint) > after:
            aside = checkpoint.with_name(f"damaged_{checkpoint.name}")
            _discard(aside)
            checkpoint.rename(aside)


def prune(run: Path, keep: int, best: int | None) -> None:
    """Deletes all checkpoints but the newest `keep` and that of step `best`, and unfinished ones of killed processes."""
    for checkpoint in checkpoints(run)[keep:]:
        if step_of(checkpoint) != best:
            with as_storage_errors(checkpoint):
                # renamed first: a folder that is deleted in part must not look like a checkpoint
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
    with as_storage_errors(run / name):
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
    """Deletes run/last or run/best if its checkpoint is gone. Returns whether it deleted the link."""
    dangling = (run / name).is_symlink() and not (run / name).exists()
    if dangling:
        with as_storage_errors(run / name):
            (run / name).unlink()
    return dangling


def replace_text(path: Path, text: str) -> None:
    """Replaces a small file in one step."""
    replace(path, lambda file: file.write(text.encode()))


def replace(path: Path, write: Callable[[Sink], object]) -> None:
    """Replaces a file by what `write` writes, in one step."""
    temporary = path.with_name(f".{path.name}.tmp")
    with as_storage_errors(path):
        try:
            _write(temporary, write)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)  # there if it failed
        sync_folder(path.parent)


def advice(run: Path) -> str:
    """What to do when the run can't write any more."""
    if checkpoints(run):
        return f"Earlier checkpoints are whole. Make room, then go on: {resume_command(run)}"
    return "There is no checkpoint yet: make room, or choose another place with folder=PATH, and give the command again."


def resume_command(run: Path) -> str:
    """The command that resumes a run."""
    return f"python train.py {as_typed('resume', relative(run))}"


@contextmanager
def as_storage_errors(path: Path, advice: str = "Make room or choose another folder.") -> Iterator[None]:
    """Turns an OSError of the block, which writes to `path`, into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{relative(path)} can't be written: {error.strerror or error}. {advice}") from error


def sync(path: Path) -> None:
    """Returns once a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    if os.name == "posix":  # other systems can't open a folder
        sync(folder)


def relative(path: Path) -> str:
    """The path, relative to the current folder if it is inside it."""
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short


class _Summed:
    """A file that computes the SHA-256 of what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sum = file, hashlib.sha256()

    def write(self, data: bytes, /) -> None:
        self.sum.update(data)
        self._file.write(data)


def _write(path: Path, write: Callable[[Sink], object]) -> str:
    """Writes a file and flushes it to the disk. Returns its SHA-256."""
    with path.open("wb") as file:
        summed = _Summed(file)
        write(summed)
        file.flush()
        os.fsync(file.fileno())
    return summed.sum.hexdigest()


def _discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def claim(folder: Path, exact: bool = False) -> Path:
    """Makes a folder for one run. A number is appended to its name if another run has it.

    Args:
        exact: refuse a folder that another run has.

    Raises:
        ConfigError: the folder can't be made or written, or another run has it.
    """
    own = (Path.cwd(), machine.expanded("~"))
    if any(place.is_relative_to(folder.resolve()) for place in own) or any(folder.glob("*/config.yaml")):
        raise ConfigError(
            f"folder={folder}: the run's files would lie among others there. Name a new folder: folder=runs/NAME."
        )
    candidate, number = folder, 1
    while True:
        try:
            candidate.mkdir(parents=True, exist_ok=True)
            if checkpoints(candidate):  # checkpoints that were copied without their run
                raise FileExistsError
            # open mode x fails if another process creates the file first
            (candidate / "config.yaml").open("x").close()
            return candidate
        except FileExistsError:
            if not candidate.is_dir():
                raise ConfigError(
                    f"{relative(candidate)} is a file, so no run can be kept there. Choose another folder."
                ) from None
            if exact:
                raise ConfigError(f"{relative(folder)}: another run has just started there. Choose another folder.") from None
            number += 1
            candidate = folder.with_name(f"{folder.name}_{number}")
        except OSError as error:
            raise ConfigError(
                f"{relative(folder)}: a run can't be kept there: {error.strerror}. Choose another folder with folder=PATH."
            ) from error


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


def identity(folder: Path, group: str | None) -> tuple[str, str | None]:
    """The run's W&B id and group. run.json keeps them, so that a resumed run has the same."""
    path = folder / "run.json"
    if path.is_file():
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return kept["wandb_id"], kept["group"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{relative(path)} can't be read: {error}. Delete it: the run then goes on as a new one to W&B."
            ) from error
    wandb_id = secrets.token_hex(4)
    replace_text(path, json.dumps({"wandb_id": wandb_id, "group": group}) + "\n")
    return wandb_id, group
