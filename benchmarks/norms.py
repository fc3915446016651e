"""Every norm case × width × library: GPU time with cold L2, as a share of the copy bandwidth that this card reaches.

Beside them, on a GPU, a plain kernel that only moves the same tensors (`kernels.py`): what there is to reach.

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
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import command, report
from benchmarks.cases import BACKWARD, CASES, DIRECTIONS, FORWARD, MODEL_WIDTHS, Shape, capped_rows, make_inputs, minimum_bytes
from benchmarks.command import Record, Results
from benchmarks.providers import PEERS, PROVIDERS, TRAFFIC, Function, compile_in_processes, contender, functions_of, load_before
from measure import timing
from measure.progress import progress, show_current

KEY = ("case", "direction", "residual_dtype", "weight_dtype", "M", "N", "provider")
ROUNDS = (9, 7)  # many cells in little time


def options_of(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = command.parser("norms", __doc__.splitlines()[0], ROUNDS)
    add_shape_options(parser)
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
    settle_shapes(parser, options)
    if options.missing and options.fresh:
        parser.error("--missing keeps what is recorded and --fresh forgets it; give one")
    if options.renew and options.fresh:
        parser.error("--renew keeps what is recorded and --fresh forgets it; give one")
    if options.plot_only and (options.renew or options.fresh):
        parser.error("--plot-only measures nothing: leave --renew and --fresh out")
    return parser, options


def providers_of(options: argparse.Namespace) -> list[str]:
    """All providers. With --models and --random only the fast ones; with --before that copy too."""
    most = (name for name in PROVIDERS if name != "before")
    names = command.importable(options.provider, most if options.name == SWEEP else ("ours", *PEERS))
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
            from benchmarks import kernels  # a kernel: without a GPU there may be no Triton either

            contenders.append(kernels.traffic_contender(shape.case, direction, sets))
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
        for shape in shapes_of(options)
        if (directions := [d for d in options.direction if not options.missing or lacks(results, shape, d, names, options)])
    ]
    budget, left, failures = command.Budget(options.minutes), [], []
    if options.warm:
        compile_in_processes([shape for shape, _ in todo], names, device, options.warm, options.before)

    with timing.side_stream(device), progress(len(todo), "norms") as bar:
        gigabytes = 2.0 if device.type == "cuda" else 0.01
        copy_gb_per_s = timing.copy_bandwidth(device, gigabytes)
        timing.free_memory(device)
        for shape, directions in todo:
            if budget.spent:
                left.append(shape)
                continue
            show_current(bar, str(shape))
            torch._dynamo.reset()
            functions = functions_of(shape.case, shape.setting, names, shape.width)
            for records in measure_shape(shape, directions, functions, device, options.rounds, copy_gb_per_s):
                results.add(records)
                failures += [record for record in records if record.get("error")]
            bar.update()
    show({"environment": results.environment, "records": results.records}, options, results.path.parent)
    for record in failures:
        print(f"failed: {record['provider']}, {report.cell_label(record)}: {record['error']}")
    if left:
        how = "--missing --renew" if options.renew else "--missing"
        print(f"{len(left)} of {len(todo)} shapes not started after {options.minutes:g} minutes; go on with {how}")


def lacks(results: Results, shape: Shape, direction: str, names: Sequence[str], options: argparse.Namespace) -> bool:
    cell = cell_of(shape, direction)
    moved = [TRAFFIC] if options.device == "cuda" else []
    return not all(
        results.has(**cell, provider=name) for name in [*functions_of(shape.case, shape.setting, names, shape.width), *moved]
    )


def show(file: dict[str, Any], options: argparse.Namespace, folder: Path) -> None:
    """Prints the table and the cells under their floor. For the sweep it draws plots beside the JSON."""
    print(report.norms_text(file["records"]), floors_summary(file["records"]), sep="\n\n")
    if options.name == SWEEP:
        report.plot_norms(file, folder)


# ---- which shapes -----------------------------------------------------------------------------------------------------------


ROWS = 32768
WIDTHS = (768, 1024, 1600, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536)
SMALL_WIDTHS = (32, 64, 128, 256, 512)
QUICK_CASES, QUICK_WIDTHS = ("add_rms", "dropout_add_ln"), (4096,)
WIDEST = 16384  # of what is drawn
# The tensors that six libraries keep for backward, on two sets of inputs with a stream in fp32, fit 80 GB.
MOST_ELEMENTS = 2**28
SWEEP, MODELS, RANDOM = "norms", "norms_models", "norms_random"  # each has a file of results


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), metavar="CASE", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--width", nargs="+", type=command.positive, metavar="N", help=f"row widths ({WIDTHS})")
    parser.add_argument("--small", action="store_true", help=f"the widths {SMALL_WIDTHS} instead")
    parser.add_argument(
        "--rows", nargs="+", type=command.positive, metavar="M",
        help=f"rows ({ROWS}, {command.CPU_ROWS} on the CPU); fewer above 2^29 elements, 2^28 with --models",
    )  # fmt: skip
    parser.add_argument("--residual", nargs="+", choices=("bf16", "fp32"), help="dtype of the residual stream (both)")
    parser.add_argument(
        "--weight-dtype", nargs="+", choices=("bf16", "fp32"), help="weights and biases (bf16; fp32 with --models)"
    )
    parser.add_argument(
        "--models", action="store_true",
        help=f"the widths of well-known models, {tuple(MODEL_WIDTHS)}, as they train: fp32 weights, cases with a stream",
    )  # fmt: skip
    parser.add_argument(
        "--random", nargs="+", type=int, metavar="COUNT",
        help=f"COUNT shapes drawn at random, from 512 to {WIDEST} columns and from 2^26 elements up; a second COUNT draws "
        "smaller ones, from 256 columns and 2^22 elements up",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of --random (%(default)s)")


def settle_shapes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Checks the options and fills in those that were not given."""
    chosen = [f"--{n}" for n in ("case", "width", "small", "rows", "residual", "weight_dtype", "models") if getattr(options, n)]
    if options.random and chosen:
        parser.error(f"--random draws the shapes; leave {', '.join(chosen).replace('_', '-')} out")
    if options.random and (len(options.random) > 2 or min(options.random) < 0):
        parser.error("--random takes one count or two, 0 or more")
    if options.small and (options.width or options.models):
        parser.error("--small, --width and --models choose the widths; leave --small out")
    options.name = RANDOM if options.random else MODELS if options.models else SWEEP
    widths = SMALL_WIDTHS if options.small else QUICK_WIDTHS if options.quick else MODEL_WIDTHS if options.models else WIDTHS
    cases = QUICK_CASES if options.quick else [n for n, case in CASES.items() if case.add or not options.models]
    options.rows = options.rows or [command.rows_on(options.device, ROWS)]
    options.case = options.case or list(cases)
    options.width = options.width or list(widths)
    options.residual = options.residual or (["bf16"] if options.quick and not options.models else ["bf16", "fp32"])
    options.weight_dtype = options.weight_dtype or ["fp32" if options.models else "bf16"]


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    """The shapes in the order in which they run. Widths are outermost, so that a run that ends early has whole columns."""
    if options.random:
        found = random_shapes(options.seed, *options.random)
        return found if options.device == "cuda" else [replace(s, rows=min(s.rows, command.CPU_ROWS)) for s in found]
    most = {"most": MOST_ELEMENTS} if options.models else {}
    by_cell: dict[tuple[object, ...], Shape] = {}
    for width in options.width:
        for name in options.case:
            for weights in options.weight_dtype:
                for residual in options.residual if CASES[name].add else (None,):
                    for asked in options.rows:
                        rows = capped_rows(asked, width, **most)
                        shape = Shape(CASES[name], residual, weights, rows, width, asked)
                        by_cell.setdefault((name, weights, residual, rows, width), shape)
    return list(by_cell.values())


def random_shapes(seed: int, large: int, small: int = 0) -> list[Shape]:
    """Random shapes that depend on the seed alone. A larger number of them begins with the smaller one's."""
    return [
        *_random_shapes(random.Random(f"{seed} large"), large, narrowest=512, elements=(26, math.log2(MOST_ELEMENTS))),
        *_random_shapes(random.Random(f"{seed} small"), small, narrowest=256, elements=(22, 26)),
    ]


def _random_shapes(draw: random.Random, count: int, narrowest: int, elements: tuple[float, float]) -> Sequence[Shape]:
    """Widths and numbers of elements are uniform in the logarithm. `elements` has the powers of two."""
    found = []
    for _ in range(count):
        width = 8 * round(2 ** draw.uniform(math.log2(narrowest), math.log2(WIDEST)) / 8)
        rows = math.ceil(2 ** draw.uniform(*elements) / width)
        rows = min(rows, max(65536, math.ceil(2 ** elements[0] / width)))
        case, residual, weights = draw.choice(list(CASES.values())), *(draw.choice(("bf16", "fp32")) for _ in range(2))
        found.append(Shape(case, residual if case.add else None, weights, rows, width, rows))
    return found


# ---- floors -----------------------------------------------------------------------------------------------------------------


# Floors are for tensors so large that a plain copy reaches its bandwidth.
LARGE = 2**26  # elements


FLOORS = {  # from this width on, widest first
    FORWARD: ((16385, 0.80), (1600, 0.93), (1024, 0.90), (512, 0.83)),
    BACKWARD: ((16385, 0.80), (1600, 0.90), (1024, 0.87), (512, 0.78)),
}


LEVEL = 0.98  # of our time: whoever takes less is ahead


def floor(direction: str, rows: int, width: int) -> float:
    """0 where there is none."""
    return 0.0 if rows * width < LARGE else next((least for n, least in FLOORS[direction] if width >= n), 0.0)


def floors_summary(records: Sequence[Record]) -> str:
    """The cells under their floor, and those where another library is faster by its whole interval."""
    cells = report.by_cell(records)
    low: list[str] = []
    behind: dict[str, list[str]] = {"the fastest other": [], "before": []}
    held = 0
    for providers in cells:
        ours = providers.get("ours")
        if ours is None:
            continue
        least = floor(ours["direction"], ours["M"], ours["N"])
        held += least > 0
        if least and (ours.get("share") or 0) < least:
            low.append(f"  {report.cell_label(ours)}: {report.bandwidth_share(ours)}, floor {least:.2f}")
        for who, other in (("the fastest other", report.best_peer(providers)), ("before", providers.get("before"))):
            if other and other.get("times_ours_95") and other["times_ours_95"][1] < LEVEL:
                behind[who].append(f"  {report.cell_label(ours)}: {other['provider']} {report.ratio(other)}")
    lines = [f"under the floor: {len(low)} of {held} cells of 2^26 elements or more", *low]
    for who, found in behind.items():
        lines += [f"more than {1 - LEVEL:.0%} behind {who}: {len(found)} of {len(cells)} cells", *found]
    return "\n".join(lines)


if __name__ == "__main__":
    command.run(main)
