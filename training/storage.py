"""Checkpoints of a run, each written whole or not at all, its metrics, and the folder that a program keeps its files in.

    runs/NAME/checkpoints/step_00000200/    model.safetensors, training.safetensors, state.json, tokenizer.json, SHA256SUMS

A run goes on from its newest checkpoint whose files have their sums. SHA256SUMS has the format of `sha256sum --check`.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from configs import ConfigError, as_config_errors
from configs.compose import as_typed
from data.cache import SUMS, verify
from measure.files import as_storage_errors, discard, relative, replacing, sync

FOLDER, METRICS = "checkpoints", "metrics.jsonl"
MARK = ".program"  # in each folder that a program has claimed: its name
TRAIN = "train.py"
BEFORE_START = {MARK, ".lock", "config.yaml", "environment.json", "tokenizer.json"}  # of a run, before its first step


def advice(run: Path) -> str:
    """What to do when the run can't write any more."""
    if checkpoints(run):
        return f"Earlier checkpoints are whole. Make room, then go on: {resume_command(run)}"
    return "There is no checkpoint yet: make room, or choose another place with folder=PATH, and give the command again."


def resume_command(run: Path) -> str:
    """The command that resumes a run."""
    return f"python train.py {as_typed('resume', relative(run))}"


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
    final = folder / name(step)
    with as_storage_errors(final, advice(run)):
        if (run / METRICS).is_file():
            sync(run / METRICS)  # so that a checkpoint is never newer than the lines of metrics
        with replacing(final) as temporary:
            temporary.mkdir()
            sums = ""
            for part, make in parts.items():
                sums += f"{_write(temporary / part, make())}  {part}\n"
            _write(temporary / SUMS, sums.encode())
        for changed in (run, run.parent):  # the first checkpoint is in a new folder, and the run may be
            sync(changed)
        for old in checkpoints(run)[keep:] if keep else ():
            if step_of(old) != best:  # renamed first: a folder that is deleted in part must not look like a checkpoint
                old.rename(old.with_name(f".{old.name}.tmp"))
    for trash in folder.glob(".step_*.tmp"):  # also of killed processes
        discard(trash)
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
            discard(aside)
            checkpoint.rename(aside)


def _write(path: Path, content: bytes) -> str:
    """Writes a file and flushes it to the disk. Returns its SHA-256."""
    path.write_bytes(content)
    sync(path)
    return sha256(content).hexdigest()


# ---- metrics -----------------------------------------------------------------------------------------------------------------


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl: `step`, and figures by name, all of them finite. Other lines, such as those that a
    crash has damaged, are left out."""
    lines, path = [], run / METRICS
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, TypeError, OverflowError):
            record = json.loads(line)
            if isinstance(record, dict) and "step" in record and all(map(math.isfinite, record.values())):
                lines.append(record)
    return lines


# ---- folders -----------------------------------------------------------------------------------------------------------------


@contextmanager
def claim(folder: Path, program: str, *, resumes: bool = False) -> Iterator[Path]:
    """Takes a folder that is new or empty for the files of `program`, such as "compare.py", and locks it until the block or
    the process ends. With `resumes` it may be one that `program` has. Else its name gets a number if a program has it.

    Raises:
        ConfigError: the folder can't be made or written, has files that are not of `program`, or is locked.
    """
    with as_config_errors(f"folder={folder}"):
        taken = _take(folder, program, resumes)
        try:
            lock = FileLock(taken / ".lock", timeout=0).acquire()
        except Timeout:
            raise ConfigError(
                f"{relative(taken)}: another process is at work there. Wait for it or stop it. If there is none, as on a file "
                "system without locks after a kill, delete the file .lock there."
            ) from None
    with lock:
        yield taken


def _take(folder: Path, program: str, resumes: bool) -> Path:
    named = folder if folder.name.strip(".") else folder.resolve()  # a number can't be appended to `.`
    for number in count(1):
        candidate = folder if number == 1 else named.with_name(f"{named.name}_{number}")
        candidate.mkdir(parents=True, exist_ok=True)
        if not any(candidate.iterdir()):
            with suppress(FileExistsError), (candidate / MARK).open("x") as mark:  # x: one process alone makes the file
                mark.write(program)
                return candidate
        its = owner(candidate)
        if its in (program, "") and (resumes or _was_left(candidate)):
            return candidate
        if resumes or its is None:
            whose = f"files of {its}" if its else "other files"
            raise ConfigError(f"folder={candidate}: it has {whose}. Name a new folder, such as folder=runs/NAME.")
    raise AssertionError("the numbers have no end")


def _was_left(folder: Path) -> bool:
    """Whether a run was killed there before its first step."""
    if {path.name for path in folder.iterdir()} <= BEFORE_START:
        with suppress(Timeout), FileLock(folder / ".lock", timeout=0):
            return True
    return False


def owner(folder: Path) -> str | None:
    """The program that has this folder; "" if it was killed as it took it, None if none has."""
    if (folder / MARK).is_file():
        return (folder / MARK).read_text(encoding="utf-8")
    return TRAIN if checkpoints(folder) else None  # which were copied without the rest, or are of an older version
