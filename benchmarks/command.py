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
from measure import sources
from measure.environment import environment as facts_of
from measure.environment import git_state, libraries
from measure.files import replace_text
from measure.sources import ROOT

FOLDER = Path(__file__).parent / "results"
SCRATCH = Path(".cache/benchmarks")  # for what was measured on a CPU, which is not published
Record = dict[str, Any]
CPU_ROWS = 64  # on the CPU, where programs are tried and nothing is learnt from large tensors
NOT_CODE = ("benchmarks/results", "README.md", "docs")  # results, and the pages that are made from them


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def parser(program: str, doc: str | None, known: Iterable[str] = (), rounds: int | None = None) -> argparse.ArgumentParser:
    """A parser with the options that the programs have; doc: of the program, described by its first line.

    Args:
        program: its module in benchmarks, or another folder and module; its first word names the record.
        known: the names of the providers, for a program that compares some.
        rounds: by default, for a program that has rounds.
    """
    module = program if "." in program else f"benchmarks.{program}"
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").partition("\n")[0])
    parser.set_defaults(program=program.partition(".")[0], module=module)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try the program (%(default)s)")
    if rounds:
        parser.add_argument("--rounds", type=positive, default=rounds, help="turns of each contender (%(default)s)")
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
    options.argv = sys.argv[1:] if argv is None else argv
    return options


def rows_on(device: torch.device, rows: int) -> int:
    """`rows` on a GPU, few on a CPU."""
    return rows if device.type == "cuda" else CPU_ROWS


def importable(asked: Sequence[str] | None, otherwise: Iterable[str]) -> list[str]:
    """The providers that were asked for, or else those that can be imported. Prints those that can't."""
    if asked is not None:
        return list(asked)
    found = []
    for name in otherwise:
        try:
            import_module(providers.MODULES.get(name, "ops"))
            found.append(name)
        except Exception as error:  # without a GPU some fail in other ways than by ImportError
            print(f"missing: {name} ({type(error).__name__}: {error})".splitlines()[0], file=sys.stderr)
    return found


# ---- recorded results -------------------------------------------------------------------------------------------------------


def slug(environment: dict[str, Any]) -> str:
    """The machine as a folder name, without the size of its memory: nvidia-h200, or cpu."""
    name = re.sub(r" \d+GB.*", "", environment["gpu"]["name"]) if environment["gpu"] else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def environment(device: torch.device) -> dict[str, Any]:
    """The facts of this machine, without those of the code that runs: `Results` notes them when it has run."""
    facts = facts_of(device)
    del facts["command"]  # recorded beside the environment
    facts["versions"] = {name: of for name, of in facts["versions"].items() if of is not None}
    return facts | {"git": git_state(ROOT, NOT_CODE)}


class Results:
    """The records of one run. They are on disk after every cell, and complete after `finish`."""

    def __init__(self, path: Path, environment: dict[str, Any], command: str) -> None:
        self.path, self.part = path, path.with_suffix(".json.part")
        self.environment, self.command = environment, command
        self.records: list[Record] = []
        self.of_others: list[sources.Code] = []  # what processes that this one started have run
        sources.code()  # of what is loaded, as it is now: its files may change before the record has it

    def add(self, records: Iterable[Record]) -> None:
        """Writes one record a line, so that a diff shows the changed cells, and what has run so far."""
        self.records += records
        versions = self.environment["versions"] | libraries()
        code = sources.together([sources.code(), *self.of_others])
        head = json.dumps({"environment": self.environment | {"versions": versions}, "command": self.command}, indent=1)
        lines = ",\n".join(f"  {json.dumps(record, separators=(',', ':'))}" for record in self.records)
        replace_text(self.part, f'{head[:-2]},\n "code": {json.dumps(code)},\n "records": [\n{lines}\n ]\n}}\n')

    def finish(self) -> list[Record]:
        """Puts the file in its place; returns its records."""
        self.part.replace(self.path)
        print(f"records: {self.path}")
        return self.records


def open_results(options: argparse.Namespace, published: bool = False) -> Results:
    """The record that this run makes. published: of a CPU too, as that of a computation that any machine repeats."""
    facts = environment(options.device)
    folder = FOLDER if options.device.type == "cuda" or published else SCRATCH
    command = shlex.join(["python", "-m", options.module, *options.argv])
    return Results(folder / slug(facts) / f"{options.program}.json", facts, command)
