"""What one call costs the CPU: add+RMSNorm on tensors so small that the device never holds the host up.

python -m benchmarks.host

Eager calls, and beside them two compiled ones: `compile` is torch.compile of PyTorch's operations, `ours-compiled` of ours.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import command, report
from benchmarks.cases import CASES, Inputs, Setting, make_inputs
from benchmarks.command import Record
from benchmarks.providers import OURS, PROVIDERS, Function, functions_of, ours_compiled
from measure import timing
from measure.progress import progress
from measure.tables import NOTHING, aligned, compact_markdown

DIRECTIONS = ("forward", "forward+backward")
ROWS, WIDTH = 8, 64
HEADER = ("CPU µs a call", "forward", "forward + backward")
# Calls between two synchronisations. Each launches at most a dozen kernels, and the driver queues about a thousand launches
# before it makes the host wait.
BATCH = 20


def options_of(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = command.parser("host", __doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), default=["add_rms"], metavar="CASE", help="(add_rms)")
    command.add_providers(parser)
    options = command.parse(parser, argv)
    return parser, options


def calls(function: Function, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """Both directions of one provider. Backward goes through torch.autograd.grad: no .grad to add to."""

    def both() -> object:
        return torch.autograd.grad(function(inputs), inputs.leaves, inputs.upstream)

    return {DIRECTIONS[0]: lambda: function(inputs), DIRECTIONS[1]: both}


def batch_us(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds of CPU time a call, from the first call to the return of the last, after a synchronisation."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(BATCH):
        call()
    return (time.perf_counter() - began) / BATCH * 1e6


def measure(
    functions: dict[str, Function], inputs: Inputs, direction: str, device: torch.device, rounds: int
) -> dict[str, timing.Outcome]:
    """Times the contenders one after the other, a batch of calls each, in an order that is shuffled every round."""
    outcomes = {name: timing.Outcome() for name in functions}
    ready: dict[str, Callable[[], object]] = {}
    for name, function in functions.items():
        try:
            call = calls(function, inputs)[direction]
            for _ in range(BATCH):
                call()
            ready[name] = call
        except Exception as error:  # a library's failure is a result
            outcomes[name].error = timing.describe(error)
    order, shuffle = list(ready), random.Random(0).shuffle
    for round_ in range(-1, rounds):
        shuffle(order)
        for name in order:
            us = batch_us(ready[name], device)
            if round_ >= 0:
                outcomes[name].us.append(us)
    return outcomes


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser, options = options_of(argv)
    device = command.pick_device(parser, options)
    names = command.importable(options.provider, [name for name in PROVIDERS if name != "before"])
    results = command.open_results("host", options, device, names, argv)
    setting = Setting(residual_dtype=torch.bfloat16)
    with timing.side_stream(device), progress(len(options.case) * len(DIRECTIONS), "host") as bar:
        for case in (CASES[name] for name in options.case):
            torch._dynamo.reset()
            functions = functions_of(case, setting, names, WIDTH)
            if "ours" in functions:
                functions["ours-compiled"] = ours_compiled(case, setting)
            (inputs,) = make_inputs(case, setting, ROWS, WIDTH, 1, device)
            for direction in DIRECTIONS:
                outcomes = measure(functions, inputs, direction, device, 4 * options.rounds)
                cell = {
                    "case": case.name,
                    "direction": direction,
                    "residual_dtype": "bf16" if case.add else None,
                    "M": ROWS,
                    "N": WIDTH,
                }
                results.add({**cell, "provider": name, **o.record(outcomes.get("ours"))} for name, o in outcomes.items())
                bar.update()
    show(results.finish()["records"])


def show(records: Sequence[Record]) -> None:
    for case in dict.fromkeys(record["case"] for record in records):
        print(f"{CASES[case].label}, {ROWS} × {WIDTH}, median (10th to 90th percentile)")
        print(aligned(HEADER, host_rows([r for r in records if r["case"] == case])), end="\n\n")
    for record in records:
        if record.get("error"):
            print(f"failed: {record['provider']}, {record['case']} {record['direction']}: {record['error']}")


def host_rows(records: Sequence[Record]) -> list[list[str]]:
    """Provider, forward, forward+backward: median CPU microseconds a call and, in brackets, 10th to 90th percentile."""
    found = {(record["provider"], record["direction"]): record for record in records}
    order = dict.fromkeys((*OURS, "ours-compiled", *PROVIDERS))
    names = [name for name in order if any(provider == name for provider, _ in found)]
    return [[name, *(_host_cell(found.get((name, d))) for d in ("forward", "forward+backward"))] for name in names]


def _host_cell(record: Record | None) -> str:
    if record is None:
        return NOTHING
    return "failed" if record.get("error") else f"{record['us']:.0f} ({record['p10']:.0f} to {record['p90']:.0f})"


def markdown(file: dict[str, Any]) -> str:
    """The table of README.md: add+RMSNorm."""
    return compact_markdown(HEADER, host_rows([record for record in file["records"] if record["case"] == "add_rms"]))


def plot(file: dict[str, Any], folder: Path) -> Path | None:
    """host.png: CPU time of a call, a line of panels for each case; None without records."""
    records = [record for record in file["records"] if record.get("us") is not None]
    if not records:
        return None
    cases = list(dict.fromkeys(record["case"] for record in records))
    directions = list(dict.fromkeys(record["direction"] for record in records))
    figure, grid = report.bar_panels(len(cases), len(directions), groups=1)
    for line, case in zip(grid, cases, strict=True):
        for axes, direction in zip(line, directions, strict=True):
            found = {r["provider"]: r for r in records if r["case"] == case and r["direction"] == direction}
            values = {name: record["us"] for name, record in found.items()}
            ranges = {name: (record["us"] - record["p10"], record["p90"] - record["us"]) for name, record in found.items()}
            report.draw_bars(axes, {CASES[case].label: values}, ranges)
            axes.set_title(direction.replace("+", " + "), loc="left", fontsize=10)
            axes.set_xlabel("CPU microseconds a call, median, 10th to 90th percentile")
    shape = f"{records[0]['M']} × {records[0]['N']} elements"
    path = folder / "host.png"
    report.finish(figure, list(grid.flat), f"host cost of one call, {shape}", file, path)
    return path


if __name__ == "__main__":
    command.run(main)
