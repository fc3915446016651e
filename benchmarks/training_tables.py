"""Tables and pictures of train_step and scaling, for a terminal and for README.md."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import Record
from measure.plots import GREY, GROUP_FILLS, bare, pyplot, save
from measure.tables import NOTHING, aligned, compact_markdown, machine
from training.attribution import GROUPS

# ---- train_step -------------------------------------------------------------------------------------------------------------


IDLE = "idle"
STEP_HEADER = ("", "ms", "p10", "p90", "tokens/s", "MFU %", "GiB", "× as fast", "95 %", "last loss")


def step_cells(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records by the title of their cell, the slowest mode first as they were measured."""
    found: dict[str, list[Record]] = {}
    for r in records:
        sizes = f"{r['layers']} × {r['width']}, {r['batch_size']} × {r['context']} tokens, {r['precision']}"
        found.setdefault(f"{r['mode']}, dropout {r['dropout']:g}: {sizes}", []).append(r)
    return found


def steps_text(records: Sequence[Record]) -> str:
    """Times of each cell, under them the milliseconds of each kind of work, and what failed."""
    parts = []
    for title, of in step_cells(records).items():
        versus = next((r["versus"] for r in of if "versus" in r), None)
        timed, profiled = [r for r in of if r["ms"] is not None], [r for r in of if "breakdown_ms" in r]
        lines = [title + (f" (× as fast as {versus})" if versus else ""), aligned(STEP_HEADER, map(_times, timed))]
        if profiled:
            lines += ["", aligned(("ms of a step", *GROUPS, IDLE, "launches"), map(_breakdown, profiled))]
        lines += [f"failed: {r['contender']}: {r['error']}" for r in of if r["ms"] is None]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def steps_markdown(file: dict[str, Any]) -> str:
    """A row for each contender of each cell that was timed."""
    rows = []
    for title, of in step_cells(file["records"]).items():
        for r in of:
            if r["ms"] is not None:
                _, ms, p10, p90, tokens, mfu, gib, speedup, interval, _ = _times(r)
                faster = f"{speedup} ({interval})" if "speedup_95" in r else speedup
                rows.append([title.partition(":")[0], r["contender"], f"{ms} ({p10} to {p90})", tokens, mfu, gib, faster])
    versus = next((r["versus"] for r in file["records"] if "versus" in r), None)
    faster = f"times as fast as {versus} (95 %)" if versus else "times as fast (95 %)"
    return compact_markdown(["", "", "ms a step (p10 to p90)", "tokens/s", "MFU %", "peak GiB", faster], rows)


def plot_steps(file: dict[str, Any], folder: Path) -> Path | None:
    """train_step.png: a panel for each cell, a bar for each contender; None where nothing was timed.

    A bar is the step's median. Where it was profiled on a GPU, it is cut into kinds of work, idle time the last of them; a
    profile that is longer than the step is drawn to its scale.
    """
    panels = {
        title: timed for title, of in step_cells(file["records"]).items() if (timed := [r for r in of if r["ms"] is not None])
    }
    if not panels:
        return None
    heights = [0.9 + 0.42 * len(of) for of in panels.values()]
    figure, grid = pyplot.subplots(
        len(panels), 1, figsize=(9.6, 1.3 + sum(heights)), dpi=110, layout="constrained", squeeze=False, height_ratios=heights
    )
    entries: dict[str, Any] = {}
    for axes, (title, of) in zip(grid.flat, panels.items(), strict=True):
        for at, record in enumerate(of):
            left = 0.0
            for group, ms in _parts(record).items():
                colour, hatch = GROUP_FILLS.get(group.lower(), ("#ffffff", ""))
                bar = axes.barh(at, ms, 0.66, left=left, color=colour, hatch=hatch, edgecolor="#374151", linewidth=0.8)
                entries.setdefault(group, bar[0])
                left += ms
            axes.text(left, at, f"  {_caption(record)}", va="center", fontsize=8)
        axes.set_yticks(range(len(of)), [record["contender"] for record in of], fontsize=9)
        axes.set_ylim(len(of) - 0.5, -0.5)
        axes.set_xlim(0, 1.45 * max(record["ms"] for record in of))
        axes.set_title(title, loc="left", fontsize=10)
        bare(axes, "x")
    grid.flat[-1].set_xlabel("ms a step, median")
    if len(entries) > 1:
        figure.legend(entries.values(), entries, loc="outside lower center", ncols=len(entries), frameon=False, fontsize=9)
    figure.suptitle(f"A training step\n{machine(file['environment'])}", x=0.01, ha="left", fontsize=10)
    path = folder / "train_step.png"
    save(figure, path)
    return path


def _times(r: Record) -> list[str]:
    optional = [
        NOTHING if r["mfu"] is None else f"{100 * r['mfu']:.1f}",
        NOTHING if r["peak_gb"] is None else f"{r['peak_gb']:.2f}",
        f"{r['speedup']:.3f}" if "speedup" in r else NOTHING,
        "{:.3f} to {:.3f}".format(*r["speedup_95"]) if "speedup_95" in r else NOTHING,
    ]
    return [
        r["contender"],
        *(f"{r[key]:.2f}" for key in ("ms", "p10", "p90")),
        f"{r['tokens_per_s']:,.0f}",
        *optional,
        f"{r['last_loss']:.4f}",
    ]


def _breakdown(r: Record) -> list[str]:
    idle = NOTHING if r["idle_ms"] is None else f"{r['idle_ms']:.2f}"
    return [r["contender"], *(f"{r['breakdown_ms'].get(group, 0.0):.2f}" for group in GROUPS), idle, f"{r['launches']:,}"]


def _parts(r: Record) -> dict[str, float]:
    """The parts of a step's bar by kind of work, or one part without a profile. They sum to the median."""
    if "breakdown_ms" not in r:
        return {"step": r["ms"]}
    parts = {**r["breakdown_ms"], IDLE: r["idle_ms"] or 0.0}
    scale = r["ms"] / sum(parts.values())
    return {group: scale * ms for group, ms in parts.items()}


def _caption(r: Record) -> str:
    pieces = [f"{r['ms']:.1f} ms"]
    if "speedup" in r:
        pieces.append(f"{r['speedup']:.3f} × {r['versus']}")
    if r["mfu"] is not None:
        pieces.append(f"MFU {100 * r['mfu']:.0f} %")
    if r["peak_gb"] is not None:
        pieces.append(f"{r['peak_gb']:.1f} GiB")
    return ", ".join(pieces)


# ---- scaling ----------------------------------------------------------------------------------------------------------------


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


def plot_scaling(file: dict[str, Any], folder: Path) -> Path | None:
    """scaling.png: efficiency over ranks, a line for each model and way to share the work; None where none has two points."""
    lines = {
        (name, parallel): points
        for name, of in scaling_cells(file["records"]).items()
        for parallel in MARKS
        if len(points := [r for r in timed_records(of) if r["parallel"] == parallel and "efficiency" in r]) > 1
    }
    if not lines:
        return None
    figure, axes = pyplot.subplots(figsize=(8.4, 5.2), dpi=110, layout="constrained")
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
    figure.suptitle(
        f"Weak scaling of a training step, with 95 % intervals\n{machine(file['environment'])}", x=0.01, ha="left", fontsize=10
    )
    path = folder / "scaling.png"
    save(figure, path)
    return path
