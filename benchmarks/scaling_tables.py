"""Tables and the picture of scaling, for a terminal and for the pages."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import Record
from measure.plots import DPI, GREY, bare, finish, pyplot
from measure.tables import NOTHING, aligned, compact_markdown, machine

SCALING_HEADER = ("", "GPUs", "ms", "p10", "p90", "tokens/s", "per GPU", "efficiency", "95 %", "of alone", "95 %", "GiB")
COLOURS = ("#111111", "#2563eb", "#c2410c", "#0f8a6d")  # of models, which differ in lightness too
MARKS = {"ddp": ("o", "-"), "fsdp": ("s", "--")}


def scaling_cells(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records by the title of their table, those of a table in the order of its lines."""
    found: dict[str, list[Record]] = {}
    for r in records:
        found.setdefault(scaling_title(r), []).append(r)
    return {name: sorted(of, key=lambda r: (r["parallel"], r["ranks"])) for name, of in found.items()}


def scaling_title(r: Record) -> str:
    how = "compiled" if r["compiled"] else "eager"
    further = [text for text in (r["common"], r["nccl"]) if text]
    return ", ".join([f"{r['model']}: {r['batch_size']} × {r['context']} tokens a GPU, {r['precision']}, {how}", *further])


def scaling_text(records: Sequence[Record]) -> str:
    """A table for each model and what it is trained with, and under it what failed."""
    parts = []
    for name, of in scaling_cells(records).items():
        lines = [name, aligned(SCALING_HEADER, map(scaling_row, timed_records(of)))]
        lines += [f"failed: {r['parallel']} on {r['ranks']}: {r['error']}" for r in of if r["ms"] is None]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def scaling_markdown(file: dict[str, Any]) -> str:
    """The tables of README.md, without empty columns."""
    parts = []
    for name, of in scaling_cells(file["records"]).items():
        if rows := [scaling_row(r) for r in timed_records(of)]:
            filled = [i for i, column in enumerate(zip(*rows, strict=True)) if set(column) != {NOTHING}]
            table = compact_markdown([SCALING_HEADER[i] for i in filled], [[line[i] for i in filled] for line in rows])
            parts.append(f"{name}\n\n{table}")
    return "\n\n".join(parts)


def timed_records(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r["ms"] is not None]


def scaling_row(r: Record) -> list[str]:
    return [
        r["parallel"],
        str(r["ranks"]),
        *(f"{r[key]:.2f}" for key in ("ms", "p10", "p90")),
        *(f"{r[key]:,.0f}" for key in ("tokens_per_s", "tokens_per_s_of_rank")),
        *_ratio(r, "efficiency"),
        *_ratio(r, "of_alone"),
        NOTHING if r["peak_gb"] is None else f"{r['peak_gb']:.2f}",
    ]


def _ratio(r: Record, name: str) -> list[str]:
    interval = r.get(f"{name}_95")
    return [f"{r[name]:.3f}" if name in r else NOTHING, "{:.3f} to {:.3f}".format(*interval) if interval else NOTHING]


def plot(file: dict[str, Any], folder: Path) -> Path | None:
    """scaling.png: efficiency over ranks, a line for each model and way to share the work; None where none has two points."""
    lines = {
        (name, parallel): points
        for name, of in scaling_cells(file["records"]).items()
        for parallel in MARKS
        if len(points := [r for r in timed_records(of) if r["parallel"] == parallel and "efficiency" in r]) > 1
    }
    if not lines:
        return None
    figure, axes = pyplot.subplots(figsize=(8.4, 5.2), dpi=DPI, layout="constrained")
    titles = list(dict.fromkeys(name for name, _ in lines))
    for at, ((name, parallel), points) in enumerate(lines.items()):
        marker, dash = MARKS[parallel]
        values = [r["efficiency"] for r in points]
        intervals = [r["efficiency_95"] or [r["efficiency"]] * 2 for r in points]
        reach = [[v - low for v, (low, _) in zip(values, intervals, strict=True)]]
        reach += [[high - v for v, (_, high) in zip(values, intervals, strict=True)]]
        axes.errorbar(
            [r["ranks"] * 2 ** (0.02 * (at - (len(lines) - 1) / 2)) for r in points],  # side by side, not over one another
            values, yerr=reach, label=textwrap.fill(f"{parallel}, {name}", 100),
            color=COLOURS[titles.index(name) % len(COLOURS)], marker=marker, linestyle=dash, linewidth=1.6,
            markersize=6, capsize=4,
        )  # fmt: skip
    ranks = sorted({r["ranks"] for points in lines.values() for r in points})
    axes.axhline(1.0, color=GREY, linewidth=1.0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.minorticks_off()
    axes.set_xlim(ranks[0] / 1.1, ranks[-1] * 1.1)
    ends = [end for points in lines.values() for r in points for end in (r["efficiency"], *(r["efficiency_95"] or ()))]
    axes.set_ylim(min(0.8, math.floor(20 * min(ends)) / 20), max(1.05, math.ceil(20 * max(ends)) / 20))
    axes.set_xlabel("GPUs, each with the same batch")
    axes.set_ylabel("efficiency: tokens/s of each GPU over that of one")
    bare(axes, "y")
    figure.legend(loc="outside lower center", frameon=False, fontsize=9)
    path = folder / "scaling.png"
    finish(figure, "Weak scaling of a training step, with 95 % intervals", machine(file["environment"]), path)
    return path
