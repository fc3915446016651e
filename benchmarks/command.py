"""What the programs share on their command lines: options, progress, the folder for results."""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import providers
from benchmarks.results import FOLDER, Results, ResultsError, environment, load, slug
from training.console import take_any_encoding

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
    """The rows of tensors by default, which on a GPU are `rows`."""
    return rows if device == "cuda" else CPU_ROWS


def add_providers(parser: argparse.ArgumentParser) -> None:
    known = [name for name in providers.PROVIDERS if name != "before"]
    parser.add_argument(
        "--provider", nargs="+", choices=known, metavar="NAME", help=f"of {', '.join(known)} (all that can be imported)"
    )


def pick_device(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device:
    """The device, or the end of the program with what to do."""
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here; --device cpu tries the program on small sizes")
    return torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")


def importable(asked: Sequence[str] | None, otherwise: Iterable[str]) -> list[str]:
    """The providers that are here; says which are not. Those asked for by name must be; None: as many of the others as are."""
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
) -> Results:
    """The file of results that this run adds to; ends the program where it must not.

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


def progress(total: int, what: str, unit: str = "cell") -> Any:
    """A bar with the time left on a terminal; elsewhere a line every half minute, so that a log shows life."""
    return tqdm(total=total, desc=what, unit=unit, mininterval=0.2 if sys.stderr.isatty() else 30.0, dynamic_ncols=True)


def now(bar: Any, text: str) -> None:
    """What is being measured, behind the bar."""
    bar.set_postfix_str(text, refresh=sys.stderr.isatty())


class Budget:
    """--minutes: when to start no more cells."""

    def __init__(self, limit: float | None) -> None:
        self._ends = None if limit is None else time.monotonic() + 60 * limit

    @property
    def spent(self) -> bool:
        return self._ends is not None and time.monotonic() >= self._ends
