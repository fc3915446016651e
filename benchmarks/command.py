"""What the programs share: options, the devices and providers that are here, and the file of recorded results.

Results are benchmarks/results/<gpu>/<name>.json = {"environment", "command", "records"}. Several runs may share a file: a
record replaces the record of the same cell, and all others stay. That is right only for one code on one kind of machine.
So a run refuses a file from elsewhere, unless it starts afresh (--fresh). With --renew it measures some cells again at another
revision. The other records then say which revision they are of.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import providers
from training.console import take_any_encoding
from training.environment import environment as facts_of

FOLDER = Path(__file__).parent / "results"
Record = dict[str, Any]
# For what was measured in a hurry: it doesn't go among the results that are published.
SCRATCH = Path(".cache/benchmarks")
ROUNDS = (25, 7)  # by default; with --quick
CPU_ROWS = 64  # by default on the CPU, where programs are tried and nothing is learnt from large tensors


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def minutes(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def parser(program: str, description: str, rounds: tuple[int, int] = ROUNDS) -> argparse.ArgumentParser:
    """A parser with the options that all programs have; `rounds` are those by default, and with --quick."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{program}", description=description)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try the program (%(default)s)")
    parser.add_argument(
        "--output", type=Path,
        help="folder for JSON and plots (benchmarks/results/<gpu>; .cache/benchmarks/<gpu> with --quick and on the CPU)",
    )  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="start over instead of adding to recorded results")
    parser.add_argument("--quick", action="store_true", help="a small selection and fewer rounds, under a minute")
    parser.add_argument("--rounds", type=positive, help=f"turns of each contender ({rounds[0]}; {rounds[1]} with --quick)")
    parser.add_argument("--revision", help="git revision to record where the code runs without its repository")
    parser.add_argument("--plot-only", action="store_true", help="measure nothing: table and plots of what --output holds")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str], rounds: tuple[int, int] = ROUNDS) -> argparse.Namespace:
    options = parser.parse_args(argv)
    if options.plot_only and options.output is None:
        parser.error("--plot-only: name the recorded results by --output benchmarks/results/<gpu>")
    if options.rounds is None:
        options.rounds = rounds[1] if options.quick else rounds[0]
    return options


def rows_on(device: str, rows: int) -> int:
    """The default number of rows: `rows` on a GPU, few on a CPU."""
    return rows if device == "cuda" else CPU_ROWS


def add_providers(parser: argparse.ArgumentParser) -> None:
    known = [name for name in providers.PROVIDERS if name != "before"]
    parser.add_argument(
        "--provider", nargs="+", choices=known, metavar="NAME", help=f"of {', '.join(known)} (all that can be imported)"
    )


def pick_device(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device:
    """The device. Without it the program ends and says what to do."""
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here; --device cpu tries the program on small sizes")
    return torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")


def importable(asked: Sequence[str] | None, otherwise: Iterable[str]) -> list[str]:
    """The providers that can be imported. Prints those that can't; one that the user asked for ends the program."""
    names = list(otherwise if asked is None else asked)
    reasons = providers.missing(names)
    for name, reason in reasons.items():
        print(f"missing: {name} ({reason})", file=sys.stderr)
    if reasons and asked is not None:
        raise SystemExit("--provider: not importable here; see above")
    return [name for name in names if name not in reasons]


def open_results(
    program: str,
    key: Sequence[str],
    options: argparse.Namespace,
    device: torch.device,
    names: list[str],
    argv: Sequence[str],
    others: dict[str, str] | None = None,
    renew: bool | None = None,
    file: str | None = None,
) -> "Results":
    """The file of results that this run adds to. Ends the program if it must not add to it.

    Args:
        names: of providers.
        others: versions of what is compared beside providers.
        renew: as `Results` has it.
        file: name of the file without .json, if it is not the program's.
    """
    published = not options.quick and device.type == "cuda"
    command = shlex.join(["python", "-m", f"benchmarks.{program}", *argv])
    try:
        facts = environment(device, providers.versions(names) | (others or {}), options.revision)
        folder = options.output or (FOLDER if published else SCRATCH) / slug(facts)
        return Results(folder / f"{file or program}.json", key, facts, command, fresh=options.fresh, renew=renew)
    except ResultsError as error:
        raise SystemExit(str(error)) from error


def recorded(path: Path) -> dict[str, Any]:
    """A file of results, for --plot-only; ends the program where there is none."""
    try:
        return load(path)
    except ResultsError as error:
        raise SystemExit(str(error)) from error


def run(main: Callable[[], object]) -> None:
    """Runs a program; Ctrl-C ends it with a line."""
    take_any_encoding()
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped; what was recorded by then is kept", file=sys.stderr)
        raise SystemExit(130) from None


class Budget:
    """--minutes: when to start no more cells."""

    def __init__(self, limit: float | None) -> None:
        self._ends = None if limit is None else time.monotonic() + 60 * limit

    @property
    def spent(self) -> bool:
        return self._ends is not None and time.monotonic() >= self._ends


# ---- recorded results -------------------------------------------------------------------------------------------------------


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
    """Whether tracked files differ from the revision; results and the pages made from them are not code."""
    paths = (".", ":!benchmarks/results", ":!README.md", ":!docs")
    command = ["git", "-C", str(FOLDER.parent.parent), "status", "--porcelain", "--untracked-files=no", "--", *paths]
    return bool(subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip())


def revision_of(environment: dict[str, Any]) -> str | None:
    return (environment["git"] or {}).get("revision")


def differences(old: dict[str, Any], new: dict[str, Any], *, renew: bool = False) -> list[str]:
    """The differences that keep two environments from sharing a file: GPU, toolkit, git revision, common versions.

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
            is measured again go, so that nothing stands beside what it was not measured with. None: the program does not
            offer that.

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
        """The cell without the provider. Records that share it were measured side by side."""
        return tuple(record.get(name) for name in self.key if name != "provider")

    @property
    def records(self) -> list[Record]:
        return list(self._records.values())

    def has(self, **cell: Any) -> bool:
        """Whether the cell was measured; at this revision, if cells are renewed. A failure counts as measured."""
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
        """Writes one record a line, so that a diff shows the changed cells. The file is replaced in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps({"environment": self.environment, "command": " && ".join(self.commands)}, indent=1)
        lines = ",\n".join(f"  {json.dumps(record, separators=(',', ':'))}" for record in self.records)
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
