"""What the programs share: options, the device and the providers that are here, and the file of recorded results.

A record is benchmarks/results/<gpu>/<name>.json = {"environment", "command", "records"}: one file of one revision by one
command. While a run goes on, its file is <name>.json.part, whole after each cell. The last cell puts it in the place of the
earlier record.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks import providers
from measure.environment import environment as facts_of
from measure.environment import git_state
from measure.sources import ROOT, fingerprints

FOLDER = Path(__file__).parent / "results"
Record = dict[str, Any]
# For what was measured in a hurry or on a CPU: it doesn't go among the results that are published.
SCRATCH = Path(".cache/benchmarks")
ROUNDS = (25, 7)  # by default; with --quick
CPU_ROWS = 64  # by default on the CPU, where programs are tried and nothing is learnt from large tensors
NOT_CODE = ("benchmarks/results", "README.md", "docs")  # results, and the pages that are made from them


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def parser(
    program: str, description: str, known: Iterable[str] = (), rounds: tuple[int, int] = ROUNDS
) -> argparse.ArgumentParser:
    """A parser with the options that all programs have.

    Args:
        known: the names of the providers.
        rounds: those by default, and with --quick.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{program}", description=description)
    parser.set_defaults(program=program, default_rounds=rounds)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try the program (%(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"a small selection, recorded under {SCRATCH}, in under a minute")
    parser.add_argument("--rounds", type=positive, help=f"turns of each contender ({rounds[0]}; {rounds[1]} with --quick)")
    if names := tuple(known):
        parser.add_argument(
            "--provider", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)} (all that can be imported)"
        )
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """argv: None for the command line."""
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here; --device cpu tries the program on small sizes")
    options.device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    options.rounds = options.rounds or options.default_rounds[options.quick]
    options.argv = sys.argv[1:] if argv is None else argv
    return options


def rows_on(device: torch.device, rows: int) -> int:
    """The default number of rows: `rows` on a GPU, few on a CPU."""
    return rows if device.type == "cuda" else CPU_ROWS


def importable(asked: Sequence[str] | None, otherwise: Iterable[str]) -> list[str]:
    """The providers that can be imported. Prints those that can't; one that the user asked for ends the program."""
    found = []
    for name in otherwise if asked is None else asked:
        try:
            import_module(providers.MODULES.get(name, "ops"))
            found.append(name)
        except Exception as error:  # without a GPU some fail in other ways than by ImportError
            said = f"{name} ({type(error).__name__}: {error})".splitlines()[0]
            if asked is not None:
                raise SystemExit(f"--provider: not importable here: {said}") from error
            print(f"missing: {said}", file=sys.stderr)
    return found


# ---- recorded results -------------------------------------------------------------------------------------------------------


def slug(environment: dict[str, Any]) -> str:
    """The machine as a folder name, without the size of its memory: nvidia-h200, or cpu."""
    name = re.sub(r" \d+GB.*", "", environment["gpu"]["name"]) if environment["gpu"] else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def environment(device: torch.device, libraries: dict[str, str]) -> dict[str, Any]:
    """The facts of this machine and code. `libraries` are versions of what is compared."""
    facts = facts_of(device)
    del facts["command"]  # recorded beside the environment
    facts["versions"] = {name: v for name, v in {**facts["versions"], **libraries}.items() if v is not None}
    return facts | {"git": git_state(ROOT, NOT_CODE), "sources": fingerprints()}


class Results:
    """The records of one run. They are on disk after every cell, and complete after `finish`."""

    def __init__(self, path: Path, environment: dict[str, Any], command: str) -> None:
        self.path, self.environment, self.command = path, environment, command
        self.records: list[Record] = []

    @property
    def part(self) -> Path:
        return self.path.with_suffix(".json.part")

    def add(self, records: Iterable[Record]) -> None:
        self.records += records
        self.save()

    def save(self) -> None:
        """Writes one record a line, so that a diff shows the changed cells."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps({"environment": self.environment, "command": self.command}, indent=1)
        lines = ",\n".join(f"  {json.dumps(record, separators=(',', ':'))}" for record in self.records)
        self.part.write_text(f'{head[:-2]},\n "records": [\n{lines}\n ]\n}}\n', encoding="utf-8")

    def finish(self) -> list[Record]:
        """Puts the file in its place; returns its records."""
        self.save()
        self.part.replace(self.path)
        print(f"records: {self.path}")
        return self.records


def open_results(
    options: argparse.Namespace, names: Iterable[str], others: dict[str, str] | None = None, file: str | None = None
) -> Results:
    """The record that this run makes.

    Args:
        names: of providers.
        others: versions of what is compared beside providers.
        file: name of the record, if it is not the program's.
    """
    facts = environment(options.device, providers.versions(names) | (others or {}))
    published = not options.quick and options.device.type == "cuda"
    path = (FOLDER if published else SCRATCH) / slug(facts) / f"{file or options.program}.json"
    return Results(path, facts, shlex.join(["python", "-m", f"benchmarks.{options.program}", *options.argv]))
