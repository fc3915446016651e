"""Recorded results: benchmarks/results/<gpu>/<name>.json = {"environment", "command", "records"}, and how runs add up.

A sweep may be split over several runs: a record replaces the one of the same cell, all others stay. That holds only for runs of
one code on one kind of machine, so a file from elsewhere is refused unless the run starts afresh. Where a change reaches a few
cells alone, they may be renewed: the others then say which revision they come from.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from training.environment import environment as facts_of

FOLDER = Path(__file__).parent / "results"
Record = dict[str, Any]


class ResultsError(ValueError):
    """A file of results that this run must not add to."""


def slug(environment: dict[str, Any]) -> str:
    """The machine as a folder name: nvidia-h200, or cpu."""
    name = environment["gpu"]["name"] if environment["gpu"] else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def environment(device: torch.device, libraries: dict[str, str], revision: str | None = None) -> dict[str, Any]:
    """The facts of this machine and code.

    Args:
        libraries: versions of the libraries compared.
        revision: of the code, where it runs without its git repository.

    Raises:
        ResultsError: a revision is given and the repository is there, whose own revision counts.
    """
    facts = facts_of(device)
    if revision and facts["git"] is not None:
        raise ResultsError(
            f"--revision {revision}: the code runs in its git repository, at {facts['git']['revision'][:8]}, which is what is "
            "recorded. Leave the option out"
        )
    del facts["command"]  # recorded beside the environment, which several commands share
    facts["versions"] = {name: v for name, v in {**facts["versions"], **libraries}.items() if v is not None}
    if facts["git"] is not None:
        facts["git"]["dirty"] = _code_is_dirty()
    if revision:
        facts["git"] = {"revision": revision, "dirty": False}
    return facts


def _code_is_dirty() -> bool:
    """Whether tracked files differ from the revision; results and the README made from them are not code."""
    paths = (".", ":!benchmarks/results", ":!README.md")
    command = ["git", "-C", str(FOLDER.parent.parent), "status", "--porcelain", "--untracked-files=no", "--", *paths]
    return bool(subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip())


def revision_of(environment: dict[str, Any]) -> str | None:
    return (environment["git"] or {}).get("revision")


def differences(old: dict[str, Any], new: dict[str, Any], *, renew: bool = False) -> list[str]:
    """What keeps two environments from sharing a file: GPU, toolkit, git revision, and versions that both have.

    Args:
        renew: they may be of two revisions, as long as these say what the code was: both known, without uncommitted changes.
    """
    clean = all(environment["git"] and not environment["git"].get("dirty") for environment in (old, new))
    allowed = {"git revision"} if renew and clean else set()
    found = []
    for name, of in (
        ("GPU", lambda e: (e["gpu"] or {}).get("name")),
        ("CUDA", lambda e: e["cuda"]),
        ("HIP", lambda e: e["hip"]),
        ("git revision", revision_of),
        ("uncommitted changes", lambda e: (e["git"] or {}).get("dirty", False)),
    ):
        if of(old) != of(new) and name not in allowed:
            found.append(f"{name} {of(old)} there, {of(new)} here")
    for name in sorted(old["versions"].keys() & new["versions"].keys()):
        if old["versions"][name] != new["versions"][name]:
            found.append(f"{name} {old['versions'][name]} there, {new['versions'][name]} here")
    return found


class Results:
    """The records of one benchmark, kept on disk after every cell.

    Args:
        key: the fields of a record that name its cell.
        fresh: forget what the file has.
        renew: add to a file of another git revision too. Its records keep that one, as `revision`; those of a comparison that
            is measured again go, so that nothing stands beside what it was not measured with. How many records come from
            which other revision is in environment["git"]["others"]. None: the program does not offer that.

    Raises:
        ResultsError: the file is of another environment, or no such file.
    """

    def __init__(
        self,
        path: Path,
        key: Sequence[str],
        environment: dict[str, Any],
        command: str,
        *,
        fresh: bool = False,
        renew: bool | None = None,
    ) -> None:
        self.path, self.key, self.environment, self.renew = path, tuple(key), environment, renew
        self.commands = [command]
        self._records: dict[tuple[Any, ...], Record] = {}
        if not fresh and path.exists():
            self._continue(load(path))

    def _continue(self, file: dict[str, Any]) -> None:
        differing = differences(file["environment"], self.environment, renew=bool(self.renew))
        if differing:
            ways = ["--fresh to start over"]
            if self.renew is False and not differences(file["environment"], self.environment, renew=True):
                ways.append("--renew to measure these cells again and keep the others")
            raise ResultsError(
                f"{self.path} was recorded elsewhere: {'; '.join(differing)}. Pass {', '.join(ways)}, or another --output."
            )
        self.environment["versions"] = {**file["environment"]["versions"], **self.environment["versions"]}
        earlier = file["command"].split(" && ")
        self.commands = [*(command for command in earlier if command not in self.commands), *self.commands]
        here, there = revision_of(self.environment), revision_of(file["environment"])
        for record in file["records"]:
            measured_at = record.pop("revision", there)
            if measured_at != here:
                record["revision"] = measured_at
            self._records[self.cell(record)] = record

    def cell(self, record: Record) -> tuple[Any, ...]:
        return tuple(record.get(name) for name in self.key)

    def comparison(self, record: Record) -> tuple[Any, ...]:
        """The cell but for the provider: what shares it is measured side by side."""
        return tuple(record.get(name) for name in self.key if name != "provider")

    @property
    def records(self) -> list[Record]:
        return list(self._records.values())

    def has(self, **cell: Any) -> bool:
        """Whether the cell was measured, of this revision if cells are renewed; a failure counts."""
        record = self._records.get(self.cell(cell))
        return record is not None and not (self.renew and "revision" in record)

    def add(self, records: Iterable[Record]) -> None:
        """Takes records in and saves."""
        new = {self.cell(record): record for record in records}
        measured = {self.comparison(record) for record in new.values()}
        for cell, record in list(self._records.items()):
            if "revision" in record and cell not in new and self.comparison(record) in measured:
                print(f"dropped, as not measured again beside the others: {cell} of {record['revision']}", file=sys.stderr)
                del self._records[cell]
        self._records |= new
        self.save()

    def save(self) -> None:
        """One record a line, so that a diff shows which cells changed. Replaced in one step: a kill leaves a whole file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.environment["git"] is not None:
            self.environment["git"].pop("others", None)
            if others := Counter(record["revision"] for record in self.records if "revision" in record):
                self.environment["git"]["others"] = dict(others)
        head = json.dumps({"environment": self.environment, "command": " && ".join(self.commands)}, indent=1)
        lines = ",\n".join(f"  {json.dumps(record)}" for record in self.records)
        temporary = self.path.with_suffix(".json.new")
        temporary.write_text(f'{head[:-2]},\n "records": [\n{lines}\n ]\n}}\n', encoding="utf-8")
        temporary.replace(self.path)


def load(path: Path) -> dict[str, Any]:
    """A file of results; its fields are checked here, once."""
    try:
        file = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ResultsError(f"{path} is not there: nothing was recorded in that folder") from error
    except json.JSONDecodeError as error:
        raise ResultsError(f"{path} is not JSON: {error}") from error
    if not isinstance(file, dict) or not {"environment", "command", "records"} <= file.keys():
        raise ResultsError(f"{path} is not a file of results: it needs environment, command and records")
    return file
