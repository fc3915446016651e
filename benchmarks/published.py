"""Comparisons that others have published, repeated with ours added.

python -m benchmarks.published [--figure a b c d]

a  LayerNorm forward, 4096 rows of fp16: the figure of Triton's tutorial
b  LayerNorm forward + backward, batch 128 × sequence 1024, fp16, over the hidden size
c  LayerNorm forward, 49152 rows of fp16, from 32 to 32768 features: time and bandwidth
d  low-memory dropout against F.dropout, bf16, forward + backward: time, and memory kept for backward

Bandwidth in a and c is the minimum traffic, x read and y written once, over the time with cold L2.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import command
from benchmarks.cases import CASES, FORWARD, Inputs, Setting, check_forward, make_inputs, minimum_bytes
from benchmarks.command import Record
from benchmarks.providers import PROVIDERS, Function, compiled
from benchmarks.report import STYLES, finish, line, rows_label, width_axis
from measure import timing
from measure.plots import pyplot
from measure.progress import progress, show_current
from measure.tables import NOTHING, aligned, compact_markdown
from measure.timing import Call, Contender
from ops import seeded_dropout

KEY = ("figure", "M", "N", "provider")
DROPOUT_P, SEED = 0.1, 1234


@dataclass(frozen=True)
class Figure:
    rows: int
    widths: Sequence[int]
    quick: Sequence[int]
    providers: Sequence[str]


FIGURES = {
    "a": Figure(4096, range(1024, 15873, 512), (1024, 4096, 8192), ("ours", "torch", "tutorial", "apex")),
    "b": Figure(128 * 1024, range(1024, 8193, 1024), (1024, 4096), ("ours", "torch", "compile")),
    "c": Figure(49152, [2**i for i in range(5, 16)], (1024, 4096), ("ours", "torch", "compile", "apex")),
    "d": Figure(8192, [2**i for i in range(7, 17)], (1024, 4096), ("ours", "torch", "compile")),
}
HALF = Setting(x_dtype=torch.float16, weight_dtype=torch.float16)
LN = CASES["ln"]
TITLES = {
    "a": "LayerNorm forward, fp16, GB/s",
    "b": "LayerNorm forward + backward, fp16, µs",
    "c": "LayerNorm forward, fp16, µs",
    "d": "dropout forward + backward, bf16, µs",
}


def options_of(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = command.parser("published", __doc__.splitlines()[0])
    parser.add_argument("--figure", nargs="+", choices=tuple(FIGURES), default=list(FIGURES), help="(all)")
    parser.add_argument("--rows", type=command.positive, help=f"instead of each figure's own ({command.CPU_ROWS} on the CPU)")
    parser.add_argument("--width", nargs="+", type=command.positive, metavar="N", help="instead of each figure's own")
    options = command.parse(parser, argv)
    return parser, options


def norm_function(provider: str) -> Function | None:
    """LayerNorm of one contender, or None if it is not here."""
    if provider == "tutorial":
        from benchmarks.kernels import layer_norm  # imports Triton, which a machine without a GPU may lack

        def tutorial(inputs: Inputs) -> tuple[Tensor, ...]:
            assert inputs.bias is not None, "LayerNorm"
            return (layer_norm(inputs.x, inputs.weight, inputs.bias, HALF.eps),)

        return tutorial
    return PROVIDERS[provider].make(LN, HALF)


def forward_calls(function: Function, sets: Sequence[Inputs]) -> Sequence[Call]:
    check_forward(LN, HALF, sets[0], function(sets[0]))
    return [partial(function, inputs) for inputs in sets]


def both_calls(function: Function, sets: Sequence[Inputs]) -> Sequence[Call]:
    """Forward and backward as one call."""
    check_forward(LN, HALF, sets[0], function(sets[0]))

    def both(inputs: Inputs) -> object:
        return torch.autograd.grad(function(inputs), inputs.leaves, inputs.upstream)

    return [partial(both, inputs) for inputs in sets]


def norms_records(figure: str, rows: int, width: int, names: Sequence[str], device: torch.device, rounds: int) -> list[Record]:
    """One width of figure a, b or c."""
    bytes_ = minimum_bytes(LN, FORWARD, rows, width)
    sets = make_inputs(LN, HALF, rows, width, timing.rotating_sets(bytes_, device), device)
    if figure == "a":  # the tutorial's kernel has no backward here, so nobody stores anything for it
        for inputs in sets:
            for leaf in inputs.leaves:
                leaf.requires_grad_(False)
    calls = both_calls if figure == "b" else forward_calls

    def build(name: str) -> Sequence[Call]:
        function = norm_function(name)
        assert function is not None, f"{name} offers LayerNorm"
        return calls(function, sets)

    contenders = [Contender(name, partial(build, name)) for name in names]
    outcomes = timing.measure(contenders, device, rounds=rounds, move_outputs=True)
    cell: Record = {"figure": figure, "M": rows, "N": width, "dtype": "fp16"}
    records = [{**cell, "provider": name, **o.record(outcomes.get("ours"))} for name, o in outcomes.items()]
    for record in records:
        if figure != "b" and record["us"] is not None:
            record |= {"bytes": bytes_, "gb_per_s": round(bytes_ / record["us"] / 1000, 1)}
    return records


def dropout_function(provider: str, seed: Tensor) -> Callable[[Tensor], Tensor]:
    if provider == "ours":
        return lambda x: seeded_dropout(x, DROPOUT_P, seed)
    dropout = partial(F.dropout, p=DROPOUT_P)
    return compiled(lambda x: F.dropout(x, DROPOUT_P)) if provider == "compile" else dropout


def dropout_records(rows: int, width: int, names: Sequence[str], device: torch.device, rounds: int) -> list[Record]:
    """One size of figure d."""
    count = timing.rotating_sets(2 * 2 * rows * width, device)
    normal = partial(torch.randn, rows, width, device=device, dtype=torch.bfloat16)
    sets = [(normal(requires_grad=True), normal()) for _ in range(count)]
    seed = torch.tensor([SEED], device=device)
    kept: dict[str, int | None] = {}

    def build(name: str) -> Sequence[Call]:
        function = dropout_function(name, seed)
        x, dy = sets[0]
        torch.autograd.grad(function(x), x, dy)  # compiles, and allocates what stays
        kept[name] = kept_bytes(function, x, device)
        return [partial(lambda x, dy: torch.autograd.grad(function(x), x, dy), x, dy) for x, dy in sets]

    contenders = [Contender(name, partial(build, name)) for name in names]
    outcomes = timing.measure(contenders, device, rounds=rounds, move_outputs=True)
    cell: Record = {"figure": "d", "M": rows, "N": width, "dtype": "bf16"}
    return [
        {**cell, "provider": name, **o.record(outcomes.get("ours")), "kept": kept.get(name)} for name, o in outcomes.items()
    ]


def kept_bytes(function: Callable[[Tensor], Tensor], x: Tensor, device: torch.device) -> int | None:
    """Bytes that are held between forward and backward beside x and y. None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    y = function(x)
    return torch.cuda.memory_allocated(device) - before - y.nbytes


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser, options = options_of(argv)
    if options.plot_only:
        file = command.recorded(options.output / "published.json")
        show(file["records"])
        plot(file, options.output)
        return
    device = command.pick_device(parser, options)
    wanted = list(dict.fromkeys(name for figure in options.figure for name in FIGURES[figure].providers))
    here = command.importable(None, [name for name in wanted if name in PROVIDERS])
    if device.type == "cuda":
        here.append("tutorial")
    results = command.open_results("published", KEY, options, device, [n for n in here if n in PROVIDERS], argv)
    cells = [
        (figure, options.rows or command.rows_on(options.device, FIGURES[figure].rows), width)
        for figure in options.figure
        for width in options.width or (FIGURES[figure].quick if options.quick else FIGURES[figure].widths)
    ]
    with timing.side_stream(device), progress(len(cells), "published comparisons") as bar:
        for figure, rows, width in cells:
            show_current(bar, f"{figure} {rows}×{width}")
            torch._dynamo.reset()
            names = [name for name in FIGURES[figure].providers if name in here]
            if figure == "d":
                results.add(dropout_records(rows, width, names, device, options.rounds))
            else:
                results.add(norms_records(figure, rows, width, names, device, options.rounds))
            timing.free_memory(device)
            bar.update()
    show(results.records)
    plot({"environment": results.environment, "records": results.records}, results.path.parent)


def show(records: Sequence[Record]) -> None:
    """Microseconds a call, a block for each figure."""
    for figure, (title, header, rows) in tables(records).items():
        print(f"{figure}: {title}")
        print(aligned(header, rows), end="\n\n")
    for record in records:
        if record.get("error"):
            print(f"failed: {record['provider']}, figure {record['figure']} {record['M']}×{record['N']}: {record['error']}")


def markdown(file: dict[str, Any]) -> str:
    """The tables of README.md."""
    found = tables(file["records"])
    return "\n\n".join(f"{title}\n\n{compact_markdown(header, rows)}" for title, header, rows in found.values())


def tables(records: Sequence[Record]) -> dict[str, tuple[str, list[str], list[list[str]]]]:
    """Figure → title, header, rows: a line for each width, a column for each provider."""
    found = {}
    for figure, title in TITLES.items():
        chosen = [record for record in records if record["figure"] == figure]
        if not chosen:
            continue
        names = list(dict.fromkeys(record["provider"] for record in chosen))
        cells = {(record["N"], record["provider"]): record for record in chosen}
        field = "gb_per_s" if figure == "a" else "us"

        def cell(record: Record | None, field: str = field) -> str:
            if record is None:
                return NOTHING
            return (
                "failed" if record.get("error") else f"{record[field]:.0f}" if record[field] >= 100 else f"{record[field]:.1f}"
            )

        widths = sorted({record["N"] for record in chosen})
        rows = [[str(n), *(cell(cells.get((n, name))) for name in names)] for n in widths]
        found[figure] = (f"{title}, {rows_label({r['M'] for r in chosen})}", ["N", *names], rows)
    return found


Value = Callable[[Record], float | None]


def _us(record: Record) -> float | None:
    return record["us"]


def _ms(record: Record) -> float | None:
    return record["us"] and record["us"] / 1000


def _gb_per_s(record: Record) -> float | None:
    return record.get("gb_per_s")


def _kept(record: Record) -> float | None:
    return None if record.get("kept") is None else record["kept"] / 2**20


# Figure → title, panels: (axis label, value, logarithmic).
PANELS: dict[str, tuple[str, list[tuple[str, Value, bool]]]] = {
    "a": ("LayerNorm forward, fp16", [("GB/s", _gb_per_s, False)]),
    "b": ("LayerNorm forward + backward, fp16", [("milliseconds", _ms, False)]),
    "c": ("LayerNorm forward, fp16", [("microseconds", _us, True), ("GB/s", _gb_per_s, False)]),
    "d": ("dropout forward + backward, bf16", [("microseconds", _us, True), ("MiB kept for backward", _kept, False)]),
}


LINEAR = ("a", "b")  # as they were published


def plot(file: dict[str, Any], folder: Path) -> Path | None:
    """published.png, a panel for each figure and value that has records; None without any."""
    panels = []
    for name, (title, axes) in PANELS.items():
        records = [r for r in file["records"] if r["figure"] == name and r.get("us") is not None]
        panels += [(name, title, records, axis) for axis in axes if any(axis[1](record) is not None for record in records)]
    if not panels:
        return None
    lines = -(-len(panels) // 2)
    figure, grid = pyplot.subplots(lines, 2, figsize=(13, 4.4 * lines), dpi=90, layout="constrained", squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw(axes, *panel)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    path = folder / "published.png"
    finish(figure, list(grid.flat[: len(panels)]), "Published comparisons, cold L2", file, path)
    return path


def _draw(axes: Any, name: str, title: str, records: Sequence[Record], axis: tuple[str, Value, bool]) -> None:
    label, value, logarithmic = axis
    for provider in STYLES:
        points = sorted((r["N"], v) for r in records if r["provider"] == provider and (v := value(r)) is not None)
        if points:
            line(axes, provider, points)
    width_axis(axes, sorted({r["N"] for r in records}), linear=name in LINEAR)
    axes.set_title(f"{name}: {title}, {max(r['M'] for r in records)} rows", fontsize=10)
    axes.set_xlabel("N, features in a row")
    axes.set_ylabel(label)
    if logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


if __name__ == "__main__":
    command.run(main)
