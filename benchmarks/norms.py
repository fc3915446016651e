"""Every norm case × width × library: GPU time with cold L2, as a share of the copy bandwidth that this card reaches.

Beside them, on a GPU, a plain kernel that only moves the same tensors (`traffic.py`): what there is to reach.

python -m benchmarks.norms                                       everything that can be imported; hours of compilation in all
python -m benchmarks.norms --case ln --width 768 1024            some of it; records add up in one file
python -m benchmarks.norms --missing --minutes 8                 what the file lacks, as far as eight minutes go
python -m benchmarks.norms --width 768 --warm 12                 compiled by twelve processes first
python -m benchmarks.norms --case rms --width 4096 --renew       these again in results of another revision
python -m benchmarks.norms --models --warm 16                    the widths and dtypes of well-known models: norms_models.json
python -m benchmarks.norms --random 40 20 --seed 1 --warm 16     40 large and 20 small cells at random: norms_random.json
python -m benchmarks.norms --width 768 --before PATH             beside another revision's ops/, from its folder
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import command, floors, plots, selection, tables, timing
from benchmarks.cases import DIRECTIONS, make_inputs, minimum_bytes
from benchmarks.contenders import contender
from benchmarks.providers import PEERS, PROVIDERS, TRAFFIC, Function, functions_of, load_before
from benchmarks.results import Record, Results
from benchmarks.selection import Shape
from benchmarks.warm import compile_in_processes

KEY = ("case", "direction", "residual_dtype", "weight_dtype", "M", "N", "provider")
ROUNDS = (9, 7)  # many cells in little time


def options_of(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = command.parser("norms", __doc__.splitlines()[0], ROUNDS)
    selection.add_options(parser)
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS), help="(both)")
    parser.add_argument("--missing", action="store_true", help="skip what the file already has")
    parser.add_argument(
        "--renew", action="store_true",
        help="measure these again in results of another git revision; the others stay and say where they come from",
    )  # fmt: skip
    parser.add_argument("--minutes", type=command.minutes, help="start no cell after this long")
    parser.add_argument("--warm", type=command.positive, metavar="PROCESSES", help="compile in this many processes first")
    command.add_providers(parser)
    parser.add_argument(
        "--before", type=Path, metavar="PATH", help="folder of another revision's ops/, timed in the same rounds as `before`"
    )
    options = command.parse(parser, argv, ROUNDS)
    selection.settle(parser, options)
    if options.missing and options.fresh:
        parser.error("--missing keeps what is recorded and --fresh forgets it; give one")
    if options.renew and options.fresh:
        parser.error("--renew keeps what is recorded and --fresh forgets it; give one")
    if options.plot_only and (options.renew or options.fresh):
        parser.error("--plot-only measures nothing: leave --renew and --fresh out")
    return parser, options


def providers_of(options: argparse.Namespace) -> list[str]:
    """With --models and --random, those that may be the fastest other; with --before, that copy besides."""
    most = (name for name in PROVIDERS if name != "before")
    names = command.importable(options.provider, most if options.name == selection.SWEEP else ("ours", *PEERS))
    return names if options.before is None else [*names, "before"]


def measure_shape(
    shape: Shape,
    directions: Sequence[str],
    functions: dict[str, Function],
    device: torch.device,
    rounds: int,
    copy_gb_per_s: float,
) -> Iterator[list[Record]]:
    """The records of each direction in turn."""
    setting = shape.setting
    for direction in directions:
        bytes_ = bytes_of(shape, direction)
        count = timing.rotating_sets(bytes_, device)
        sets = make_inputs(shape.case, setting, shape.rows, shape.width, count, device)
        contenders = [
            contender(name, function, shape.case, setting, direction, sets, shape.case.name in PROVIDERS[name].overwrites_dy)
            for name, function in functions.items()
        ]
        if device.type == "cuda":
            from benchmarks import traffic  # a kernel: without a GPU there may be no Triton either

            contenders.append(traffic.contender(shape.case, direction, sets))
        outcomes = timing.measure(contenders, device, rounds=rounds, round_ms=1.0, move_outputs=True)
        del contenders, sets
        timing.free_memory(device)
        cell = cell_of(shape, direction)
        yield [
            {**cell, "provider": name, **record_of(outcome, outcomes.get("ours"), bytes_, copy_gb_per_s), "sets": count}
            for name, outcome in outcomes.items()
        ]


def cell_of(shape: Shape, direction: str) -> Record:
    return {
        "case": shape.case.name,
        "direction": direction,
        "residual_dtype": shape.residual,
        "weight_dtype": shape.weights,
        "M": shape.rows,
        "N": shape.width,
        "asked_rows": shape.asked_rows,
    }


def bytes_of(shape: Shape, direction: str) -> int:
    setting = shape.setting
    residual_bytes = setting.residual_dtype.itemsize if setting.residual_dtype is not None else None
    return minimum_bytes(shape.case, direction, shape.rows, shape.width, setting.x_dtype.itemsize, residual_bytes)


def record_of(outcome: timing.Outcome, ours: timing.Outcome | None, bytes_: int, copy_gb_per_s: float) -> Record:
    record: Record = {"bytes": bytes_, "copy_gb_per_s": round(copy_gb_per_s, 1), **outcome.record(ours)}
    if record["us"] is not None:
        gb_per_s = bytes_ / record["us"] / 1000
        record |= {"gb_per_s": round(gb_per_s, 1), "share": round(gb_per_s / copy_gb_per_s, 4)}
    return record


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser, options = options_of(argv)
    if options.plot_only:
        show(command.recorded(options.output / f"{options.name}.json"), options, options.output)
        return
    device = command.pick_device(parser, options)
    if options.before is not None:
        try:
            load_before(options.before)
        except ImportError as error:
            parser.error(f"--before: {error}")
    names = providers_of(options)
    results = command.open_results("norms", KEY, options, device, names, argv, renew=options.renew, file=options.name)
    todo = [
        (shape, directions)
        for shape in selection.shapes(options)
        if (directions := [d for d in options.direction if not options.missing or lacks(results, shape, d, names, options)])
    ]
    budget, left, failures = command.Budget(options.minutes), [], []
    if options.warm:
        compile_in_processes([shape for shape, _ in todo], names, device, options.warm, options.before)

    with timing.side_stream(device), command.progress(len(todo), "norms") as bar:
        gigabytes = 2.0 if device.type == "cuda" else 0.01
        copy_gb_per_s = timing.copy_bandwidth(device, gigabytes)
        timing.free_memory(device)
        for shape, directions in todo:
            if budget.spent:
                left.append(shape)
                continue
            command.now(bar, str(shape))
            torch._dynamo.reset()
            functions = functions_of(shape.case, shape.setting, names)
            for records in measure_shape(shape, directions, functions, device, options.rounds, copy_gb_per_s):
                results.add(records)
                failures += [record for record in records if record.get("error")]
            bar.update()
    show({"environment": results.environment, "records": results.records}, options, results.path.parent)
    for record in failures:
        print(f"failed: {record['provider']}, {tables.cell_label(record)}: {record['error']}")
    if left:
        how = "--missing --renew" if options.renew else "--missing"
        print(f"{len(left)} of {len(todo)} shapes not started after {options.minutes:g} minutes; go on with {how}")


def lacks(results: Results, shape: Shape, direction: str, names: Sequence[str], options: argparse.Namespace) -> bool:
    cell = cell_of(shape, direction)
    moved = [TRAFFIC] if options.device == "cuda" else []
    return not all(results.has(**cell, provider=name) for name in [*functions_of(shape.case, shape.setting, names), *moved])


def show(file: dict[str, Any], options: argparse.Namespace, folder: Path) -> None:
    """The table on the terminal with what is under its floor or behind; of the sweep, plots beside the JSON."""
    print(tables.norms_text(file["records"]), floors.summary(file["records"]), sep="\n\n")
    if options.name == selection.SWEEP:
        plots.norms(file, folder)


if __name__ == "__main__":
    command.run(main)
