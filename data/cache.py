"""Corpora that are built once. A folder of the cache is complete or absent, also after a process was killed while it built one.

CACHE/NAME-KEY/              SHA256SUMS of its other files, which are compared whenever the folder is opened
CACHE/.KEY-USER.building/    the folder while it is built
CACHE/.KEY-USER.lock         held meanwhile
CACHE/.sums/                 hashes of large files of text, by what the files were when they were hashed

Users may share a cache: nobody waits for a lock of another user. If two build the same folder at once, the first one's stays.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from filelock import AcquireReturnProxy, BaseFileLock, FileLock, Timeout

from configs import machine
from measure.progress import progress

VERSION = 3  # of the folders; another number makes all anew
SUMS = "SHA256SUMS"
SAMPLES, SAMPLE = 64, 2**14  # of a large file of text: how many, and their bytes
LARGE = 2**28  # bytes; to read larger files of the cache at every start would make it slow


def cached_folder(cache_dir: str, name: str, settings: dict[str, Any], build: Callable[[Path], None]) -> Path:
    """The folder of `settings` (JSON). `build(folder)` fills it if it does not exist.

    The folder is built under another name and then renamed, so that a killed run leaves no incomplete folder. Processes that
    want the same folder at once, such as the ranks of a run, wait until the first has built it.

    Raises:
        ValueError: nothing can be kept in cache_dir, or a file of the folder is not as it was written.
    """
    cache = machine.expanded(cache_dir)
    key = sha256(json.dumps(settings | {"version": VERSION}, sort_keys=True).encode()).hexdigest()[:16]
    safe = re.sub(r"[^\w.-]", "_", name).lstrip(".") or "corpus"
    folder, building = cache / f"{safe}-{key}", cache / f".{key}-{os.getuid()}.building"
    try:
        for left in cache.glob(f".*-{os.getuid()}.building"):  # by killed runs of this user: their locks are free
            with suppress(Timeout, PermissionError), FileLock(left.with_suffix(".lock"), timeout=0):
                shutil.rmtree(left, ignore_errors=True)
        if not folder.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=cache).close()  # FileLock would wait for ever if no file can be made
            with _waited_for(FileLock(building.with_suffix(".lock")), name):
                if not folder.is_dir():  # no other process built it while this one waited
                    _build(folder, building, build)
    except OSError as error:
        if error.errno is None:  # of what `build` reads, with a message of its own
            raise
        why = f"data.cache_dir={cache_dir}: no corpus can be kept there ({error.strerror})"
        raise ValueError(f"{why}. Use another data.cache_dir=PATH.") from error
    try:
        verify(folder, largest=LARGE)
    except (OSError, ValueError) as error:
        raise ValueError(f"the cached corpus can't be read: {error}. Delete {folder}; the next start remakes it.") from error
    return folder


def _waited_for(lock: BaseFileLock, name: str) -> AcquireReturnProxy:
    """The lock, held. If another process holds it for a second, the first rank of a node says so."""
    try:
        return lock.acquire(timeout=1)
    except Timeout:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            where = Path(lock.lock_file).parent
            print(f"data.name={name}: another process prepares it in {where}. Waiting.", file=sys.stderr, flush=True)
        return lock.acquire()


def _build(folder: Path, building: Path, build: Callable[[Path], None]) -> None:
    """Fills the folder under the name `building`, and renames it."""
    shutil.rmtree(building, ignore_errors=True)  # of a killed run, as this process holds the lock
    building.mkdir()
    try:
        build(building)
        lines = [f"{checksum(path)}  {path.name}\n" for path in sorted(building.iterdir())]
        (building / SUMS).write_text("".join(lines), encoding="utf-8")
        try:
            building.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another user was faster
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)  # not there after the renaming


def checksum(path: Path, advance: Callable[[int], object] = lambda size: None) -> str:
    """SHA-256 of a file's content, in hexadecimal. `advance` is called with the bytes that have been read."""
    hashed = sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            hashed.update(block)
            advance(len(block))
    return hashed.hexdigest()


def known_checksums(paths: Sequence[Path], cache: Path) -> list[str]:
    """`checksum` of files of text. A large file whose size, times and samples are as before is not read again."""
    sizes = [path.stat().st_size for path in paths]
    with progress(sum(sizes), "reading files", "B", unit_scale=True, delay=1, leave=False) as bar:
        return [_known_checksum(path, cache, bar.update) for path in paths]


def _known_checksum(path: Path, cache: Path, advance: Callable[[int], object]) -> str:
    status = path.stat()
    if status.st_size <= SAMPLES * SAMPLE:
        return checksum(path, advance)
    now = sha256(repr((path.absolute(), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)).encode())
    with path.open("rb") as file:
        for at in range(SAMPLES):
            file.seek((status.st_size - SAMPLE) * at // (SAMPLES - 1))
            now.update(file.read(SAMPLE))
    known = cache / ".sums" / now.hexdigest()
    with suppress(OSError):
        if len(digest := known.read_text()) == 64:  # else it is being written, or its writer was killed
            advance(status.st_size)
            return digest
    digest = checksum(path, advance)
    with suppress(OSError):  # a cache that can't be written
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(digest)
    return digest


def verify(folder: Path, parts: Iterable[str] | None = None, largest: float = float("inf")) -> None:
    """Compares the files of a folder with its SHA256SUMS.

    Args:
        parts: only these files; None: all that are listed.
        largest: files with more bytes only have to be there.

    Raises:
        PermissionError: a file may not be read.
        ValueError: a file is missing, not listed, or not as it was written. The message names it.
    """
    path = folder / SUMS
    try:
        sums = {name: digest for digest, name in (line.split("  ") for line in path.read_text(encoding="utf-8").splitlines())}
        for name in list(sums if parts is None else parts) or [SUMS]:
            path = folder / name
            if path.stat().st_size <= largest and checksum(path) != sums.get(path.name):
                raise ValueError("it is not as it was written")
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', error)}") from error
