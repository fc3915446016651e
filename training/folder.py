"""A run's folder: claimed by one run, locked by one process."""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from configs import ConfigError
from training import storage
from training.storage import relative


def claim(folder: Path, exact: bool = False) -> Path:
    """Makes the folder this run's own: two runs that start in the same second, or in a folder named twice, get two folders.

    Args:
        exact: refuse a folder that another run has, instead of appending a number.

    Raises:
        ConfigError: the folder can't be made or written, or another run has it.
    """
    candidate, number = folder, 1
    while True:
        try:
            candidate.mkdir(parents=True, exist_ok=True)
            if storage.kept(candidate):  # of a run, copied without its config
                raise FileExistsError
            # exclusive creation is what makes it atomic
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
    """Keeps a folder to this process; the lock ends with the process, however that ends.

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
    """The run's W&B id and group, which it keeps whenever it goes on in its folder: run.json."""
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
    storage.replace_text(path, json.dumps({"wandb_id": wandb_id, "group": group}) + "\n")
    return wandb_id, group
