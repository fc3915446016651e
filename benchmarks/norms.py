"""Every norm case × width × library: GPU time with cold L2, as a share of the copy bandwidth that this card reaches.

Beside them, on a GPU, a plain kernel that only moves the same tensors (`traffic.py`): what there is to reach.

python -m benchmarks.norms                                       everything that can be imported; hours of compilation in all
python -m benchmarks.norms --case ln --width 768 1024            some of it; records add up in one file
python -m benchmarks.norms --missing --minutes 8                 what the file lacks, as far as eight minutes go
python -m benchmarks.norms --width 768 --warm 12                 compiled by twelve processes first
python -m benchmarks.norms --case rms --width 4096 --renew       these again in results of another revision
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ablation.statistics import LEAST_SAMPLES, paired_ratio, spread
from benchmarks import command, plots, tables, timing
from benchmarks.cases import (
    CASES,
    DIRECTIONS,
    DTYPES,
    Case,
    Setting,
    capped_rows,
    make_inputs,
    minimum_bytes,
)
from benchmarks.contenders import contender
from benchmarks.providers import PROVIDERS, TRAFFIC, Function
from benchmarks.results import Record, Results
from benchmarks.warm import compile_in_processes, forget_tuning, run_once, share_of

KEY = ("case", "direction", "residual_dtype", "weight_dtype", "M", "N", "provider")
ROWS = 32768
WIDTHS = (768, 1024, 1600, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536)
SMALL_WIDTHS = (32, 64, 128, 256, 512)
QUICK_CASES, QUICK_WIDTHS = ("add_rms", "dropout_add_ln"), (4096,)


@dataclass(frozen=True)
class Shape:
    """What shares inputs and compiled functions: both directions of a case."""

    case: Case
    residual: str | None  # name of the dtype
    rows: int
    width: int
    asked_rows: int  # before the cap on elements


def options_of(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = command.parser("norms", __doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), metavar="CASE", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--width", nargs="+", type=command.positive, metavar="N", help=f"row widths ({WIDTHS})")
    parser.add_argument("--small", action="store_true", help=f"the widths {SMALL_WIDTHS} instead")
    parser.add_argument(
        "--rows", nargs="+", type=command.positive, metavar="M",
        help=f"rows ({ROWS}, {command.CPU_ROWS} on the CPU); fewer where M × N would exceed 2^29 elements",
    )  # fmt: skip
    parser.add_argument("--residual", nargs="+", choices=("bf16", "fp32"), help="dtype of the residual stream (both)")
    parser.add_argument("--weight-dtype", choices=("bf16", "fp32"), default="bf16", help="weights and biases (%(default)s)")
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS), help="(both)")
    parser.add_argument("--missing", action="store_true", help="skip what the file already has")
    parser.add_argument(
        "--renew", action="store_true",
        help="measure these again in results of another git revision; the others stay and say where they come from",
    )  # fmt: skip
    parser.add_argument("--minutes", type=command.minutes, help="start no cell after this long")
    parser.add_argument("--warm", type=command.positive, metavar="PROCESSES", help="compile in this many processes first")
    parser.add_argument("--compile-only", type=share_of, metavar="I/N", help="what those processes do: compile their share")
    command.add_providers(parser)
    options = command.parse(parser, argv)
    if options.small and options.width:
        parser.error("--small and --width both choose the widths; give one")
    if options.missing and options.fresh:
        parser.error("--missing keeps what is recorded and --fresh forgets it; give one")
    if options.renew and options.fresh:
        parser.error("--renew keeps what is recorded and --fresh forgets it; give one")
    if options.plot_only and (options.renew or options.fresh):
        parser.error("--plot-only measures nothing: leave --renew and --fresh out")
    options.rows = options.rows or [command.rows_on(options.device, ROWS)]
    options.case = options.case or list(QUICK_CASES if options.quick else CASES)
    options.width = options.width or list(SMALL_WIDTHS if options.small else QUICK_WIDTHS if options.quick else WIDTHS)
    options.residual = options.residual or (["bf16"] if options.quick else ["bf16", "fp32"])
    return parser, options


def shapes(options: argparse.Namespace) -> list[Shape]:
    """In the order in which they run: widths outermost, so that a run that ends early has whole columns."""
    found: dict[tuple[str, str | None, int, int], Shape] = {}
    for width in options.width:
        for name in options.case:
            for residual in options.residual if CASES[name].add else (None,):
                for asked in options.rows:
                    rows = capped_rows(asked, width)
                    found.setdefault((name, residual, rows, width), Shape(CASES[name], residual, rows, width, asked))
    return list(found.values())


def functions_of(shape: Shape, setting: Setting, names: Sequence[str]) -> dict[str, Function]:
    made = {name: PROVIDERS[name].make(shape.case, setting) for name in names}
    return {name: function for name, function in made.items() if function is not None}


def measure_shape(
    shape: Shape,
    setting: Setting,
    directions: Sequence[str],
    functions: dict[str, Function],
    device: torch.device,
    rounds: int,
    copy_gb_per_s: float,
) -> Iterator[list[Record]]:
    """The records of each direction in turn."""
    for direction in directions:
        bytes_ = bytes_of(shape, setting, direction)
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
        cell = cell_of(shape, setting, direction)
        yield [
            {**cell, "provider": name, **record_of(outcome, outcomes.get("ours"), bytes_, copy_gb_per_s), "sets": count}
            for name, outcome in outcomes.items()
        ]


def cell_of(shape: Shape, setting: Setting, direction: str) -> Record:
    return {
        "case": shape.case.name,
        "direction": direction,
        "residual_dtype": shape.residual,
        "weight_dtype": name_of(setting.weight_dtype),
        "M": shape.rows,
        "N": shape.width,
        "asked_rows": shape.asked_rows,
    }


def bytes_of(shape: Shape, setting: Setting, direction: str) -> int:
    residual_bytes = setting.residual_dtype.itemsize if setting.residual_dtype is not None else None
    return minimum_bytes(shape.case, direction, shape.rows, shape.width, setting.x_dtype.itemsize, residual_bytes)


def name_of(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def record_of(outcome: timing.Outcome, ours: timing.Outcome | None, bytes_: int, copy_gb_per_s: float) -> Record:
    """Times in microseconds a call; `times_ours` is this time over ours of the same round, above 1 where ours is faster.

    Its interval is `times_ours_95`; fewer rounds than LEAST_SAMPLES have none.
    """
    record: Record = {"bytes": bytes_, "copy_gb_per_s": round(copy_gb_per_s, 1)}
    if outcome.error is not None:
        return {**record, "us": None, "error": outcome.error}
    times = spread(outcome.us)
    gb_per_s = bytes_ / times.median / 1000
    record |= {
        "us": round(times.median, 3),
        "p10": round(times.p10, 3),
        "p90": round(times.p90, 3),
        "gb_per_s": round(gb_per_s, 1),
        "share": round(gb_per_s / copy_gb_per_s, 4),
    }
    if ours is not None and ours is not outcome and ours.us:
        ratio = paired_ratio(outcome.us, ours.us)
        record |= {"times_ours": round(ratio.median, 4)}
        if len(ours.us) >= LEAST_SAMPLES:
            record |= {"times_ours_95": [round(ratio.low, 4), round(ratio.high, 4)]}
    return record


def setting_of(shape: Shape, options: argparse.Namespace) -> Setting:
    residual = DTYPES[shape.residual] if shape.residual else None
    return Setting(residual_dtype=residual, weight_dtype=DTYPES[options.weight_dtype])


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser, options = options_of(argv)
    if options.plot_only:
        show(command.recorded(options.output / "norms.json"), options)
        return
    device = command.pick_device(parser, options)
    everything, worker = set(options.provider) == set(PROVIDERS), options.compile_only is not None
    names = command.importable(options.provider, optional=everything, quiet=worker)
    results = command.open_results("norms", KEY, options, device, names, argv, renew=options.renew)
    todo = [
        (shape, directions)
        for shape in shapes(options)
        if (directions := [d for d in options.direction if not options.missing or lacks(results, shape, d, names, options)])
    ]
    budget, left, failures = command.Budget(options.minutes), [], []
    if options.compile_only:
        compile_only([shape for shape, _ in todo[options.compile_only]], names, device, options)
        return
    if options.warm:
        compile_in_processes(argv, options.warm, len(todo))

    with timing.side_stream(device), command.progress(len(todo), "norms") as bar:
        gigabytes = 2.0 if device.type == "cuda" else 0.01
        copy_gb_per_s = timing.copy_bandwidth(device, gigabytes)
        timing.free_memory(device)
        for shape, directions in todo:
            if budget.spent:
                left.append(shape)
                continue
            setting = setting_of(shape, options)
            command.now(bar, f"{shape.case.name} {shape.residual or ''} {shape.rows}×{shape.width}")
            torch._dynamo.reset()
            functions = functions_of(shape, setting, names)
            for records in measure_shape(shape, setting, directions, functions, device, options.rounds, copy_gb_per_s):
                results.add(records)
                failures += [record for record in records if record.get("error")]
            bar.update()
    show({"environment": results.environment, "records": results.records}, options, results.path.parent)
    for record in failures:
        where = f"{record['case']} {record['direction']} {record['residual_dtype'] or ''} {record['M']}×{record['N']}"
        print(f"failed: {record['provider']}, {where}: {record['error']}")
    if left:
        how = "--missing --renew" if options.renew else "--missing"
        print(f"{len(left)} of {len(todo)} shapes not started after {options.minutes:g} minutes; go on with {how}")


def lacks(results: Results, shape: Shape, direction: str, names: Sequence[str], options: argparse.Namespace) -> bool:
    setting = setting_of(shape, options)
    cell = cell_of(shape, setting, direction)
    moved = [TRAFFIC] if options.device == "cuda" else []
    return not all(results.has(**cell, provider=name) for name in [*functions_of(shape, setting, names), *moved])


def compile_only(todo: Sequence[Shape], names: Sequence[str], device: torch.device, options: argparse.Namespace) -> None:
    """What a process of --warm does; it prints a line for each shape and records nothing."""
    forget_tuning()
    with timing.side_stream(device):
        for shape in todo:
            setting = setting_of(shape, options)
            torch._dynamo.reset()
            (inputs,) = make_inputs(shape.case, setting, shape.rows, shape.width, 1, device)
            run_once(functions_of(shape, setting, names), inputs)
            del inputs
            timing.free_memory(device)
            print(shape, flush=True)


def show(file: dict[str, Any], options: argparse.Namespace, folder: Any = None) -> None:
    """The table on the terminal and the plots beside the JSON."""
    folder = folder or options.output
    print(tables.norms_text(file["records"]))
    plots.norms(file, folder)


if __name__ == "__main__":
    command.run(main)
