"""Folders that are built once. A folder is complete or absent, also after a process was killed while it built one."""

import errno
import json
import shutil
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock

from configs import machine


def cached_folder(cache_dir: str, name: str, settings: dict[str, Any], build: Callable[[Path], None]) -> Path:
    """The folder of `settings` (JSON). `build(folder)` fills it if it does not exist.

    The folder is built under another name and then renamed, so that a killed run leaves no incomplete folder. Processes that
    want the same folder at once, such as the ranks of a run, wait until the first has built it.

    Raises:
        ValueError: nothing can be kept in cache_dir.
    """
    cache = machine.expanded(cache_dir)
    key = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache / f"{_file_name(name)}-{key}"
    try:
        if folder.is_dir():
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()  # FileLock would wait for ever if no file can be made
    except OSError as error:
        raise _unusable(cache_dir, error) from error
    with FileLock(cache / f".{key}.lock"):
        if folder.is_dir():  # another process built it while this one waited
            return folder
        unfinished = f".{key}.building-"
        for leftover in cache.glob(f"{unfinished}*"):  # of a killed run, as this process holds the lock
            shutil.rmtree(leftover, ignore_errors=True)
        building = Path(tempfile.mkdtemp(prefix=unfinished, dir=cache))
        try:
            build(building)
            building.chmod(0o755)  # mkdtemp permits one user alone; users may share a cache
            building.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise _unusable(cache_dir, error) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)  # not there after the renaming
    return folder


def _unusable(cache_dir: str, error: OSError) -> ValueError:
    return ValueError(
        f"data.cache_dir={cache_dir}: no corpus can be kept there ({error.strerror}). Use another data.cache_dir=PATH."
    )


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name).lstrip(".") or "corpus"
