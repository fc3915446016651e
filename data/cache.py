"""Corpora that are built once. A folder of the cache is complete or absent, also after a process was killed while it built one.

    CACHE/NAME-KEY/          SHA256SUMS of its other files. They are compared whenever the folder is opened
    CACHE/.sums-USER/        sums of large files, by their places on the disk, sizes and times of change
    CACHE/.KEY-USER.lock     held while this user builds the folder

Users may share a cache. A folder is as open to others as the cache is. Nobody waits for a file of another user: if two users
build the same folder at once, the first one's stays.
"""

import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm import tqdm

from configs import machine

SUMS = "SHA256SUMS"
LARGE = 2**28  # bytes; reading a larger file at every start would make it slow
USER = os.getuid() if hasattr(os, "getuid") else 0


def cached_folder(cache_dir: str, name: str, settings: dict[str, Any], build: Callable[[Path], None]) -> Path:
    """The folder of `settings` (JSON). `build(folder)` fills it if it does not exist.

    The folder is built under another name and then renamed, so that a killed run leaves no incomplete folder. Processes of a
    user that want the same folder at once, such as the ranks of a run, wait until the first has built it.

    Raises:
        ValueError: nothing can be kept in cache_dir, or a file of the folder is not as it was written.
    """
    unusable = f"data.cache_dir={cache_dir}: no corpus can be kept there ({{}}). Use another data.cache_dir=PATH."
    cache = machine.expanded(cache_dir)
    key = sha256(json.dumps(settings | {"sums": True}, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache / f"{_file_name(name)}-{key}"
    try:
        if folder.is_dir():
            return _verified(folder)
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()  # FileLock would wait for ever if no file can be made
    except OSError as error:
        raise ValueError(unusable.format(error.strerror)) from error
    with FileLock(cache / f".{key}-{USER}.lock"):
        try:
            if not folder.is_dir():  # no other process built it while this one waited
                _build(folder, f".{key}-{USER}.building-", build)
                return folder
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ValueError(unusable.format(error.strerror)) from error
            if not folder.is_dir():  # else another user was faster
                raise
    return _verified(folder)


def _build(folder: Path, unfinished: str, build: Callable[[Path], None]) -> None:
    """Fills the folder under a name that begins with `unfinished`, and renames it."""
    cache = folder.parent
    for leftover in cache.glob(f"{unfinished}*"):  # of a killed run, as this process holds the lock
        shutil.rmtree(leftover, ignore_errors=True)
    building = Path(tempfile.mkdtemp(prefix=unfinished, dir=cache))
    try:
        build(building)
        built, open_to = sorted(building.iterdir()), cache.stat().st_mode
        sums = zip(checksums(built, cache), built, strict=True)
        (building / SUMS).write_text("".join(f"{digest}  {path.name}\n" for digest, path in sums), encoding="utf-8")
        for path in building.iterdir():  # mkdtemp permits one user alone, and a umask may
            path.chmod(open_to & 0o644 | 0o600)
        building.chmod(open_to & 0o755 | 0o700)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)  # not there after the renaming


def checksums(paths: Sequence[Path], cache: Path | None) -> list[str]:
    """SHA-256 of the content of each file, in hexadecimal.

    Sums of more than LARGE bytes are kept in the cache, if one is given, so that these files are read once. They count as long
    as the files' places on the disk, sizes and times of change are the same. No program can set the last of these times.
    """
    stats = [path.stat() for path in paths]
    size, kept = sum(stat.st_size for stat in stats), None
    racy = time.time_ns() - 2 * 10**9  # a file that has just changed may change again within a tick of its clock
    if cache and size > LARGE and max(stat.st_ctime_ns for stat in stats) < racy:
        of = [[stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for stat in stats]
        kept = cache / f".sums-{USER}" / sha256(json.dumps(of).encode()).hexdigest()
        with suppress(OSError, UnicodeDecodeError):
            found = kept.read_text(encoding="utf-8").split()
            if [len(sum) for sum in found] == [64] * len(paths):
                return found
    found = []
    with tqdm(desc="reading files", total=size, unit="B", unit_scale=True, delay=3, leave=False) as bar:
        for path, stat in zip(paths, stats, strict=True):
            with path.open("rb") as file:
                found.append(file_digest(file, "sha256").hexdigest())
            bar.update(stat.st_size)
    if kept is not None:
        with suppress(OSError):  # a cache that can't be written: the next start reads the files again
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text("\n".join(found), encoding="utf-8")
    return found


def verify(folder: Path, parts: Iterable[str] | None = None, cache: Path | None = None) -> None:
    """Compares the files of a folder with its SHA256SUMS.

    Args:
        parts: only these files; None: all that are listed.
        cache: see `checksums`.

    Raises:
        PermissionError: a file may not be read.
        ValueError: a file is missing, not listed, or not as it was written. The message names it.
    """
    path = folder / SUMS
    try:
        sums = {name: digest for digest, name in (line.split("  ") for line in path.read_text(encoding="utf-8").splitlines())}
        if not sums:
            raise ValueError("it is empty")
        paths = [folder / name for name in (sums if parts is None else parts)]
        for path, digest in zip(paths, checksums(paths, cache), strict=True):
            if digest != sums.get(path.name):
                raise ValueError("it is not as it was written")
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        name, what = (error.filename, error.strerror) if isinstance(error, OSError) else (path, error)
        raise ValueError(f"{name}: {what}") from error


def _verified(folder: Path) -> Path:
    """The folder, if its files are as they were written."""
    try:
        verify(folder, cache=folder.parent)
    except (PermissionError, ValueError) as error:
        todo = f"Delete {folder}; the next start remakes it."
        if isinstance(error, PermissionError):
            todo = f"Ask its owner for `chmod -R a+rX {folder}`, or use another data.cache_dir."
        raise ValueError(f"the cached corpus can't be read: {error}. {todo}") from error
    return folder


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name).lstrip(".") or "corpus"
