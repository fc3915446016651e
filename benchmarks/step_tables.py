"""Training steps side by side: a table for a terminal, and a picture of where the time goes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ablation.plots import GROUPS as FILLS  # the same fill and hatch for the same kind of work
from benchmarks import tables
from benchmarks.plots import GREY, machine, pyplot
from training.attribution import GROUPS

Record = dict[str, Any]
IDLE = "idle"
HEADER = ("", "ms", "p10", "p90", "tokens/s", "MFU %", "GiB", "× as fast", "95 %", "last loss")


def cells(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records by the title of their cell, the slowest mode first as they were measured."""
    found: dict[str, list[Record]] = {}
    for r in records:
        sizes = f"{r['layers']} × {r['width']}, {r['batch_size']} × {r['context']} tokens, {r['precision']}"
        found.setdefault(f"{r['mode']}, dropout {r['dropout']:g}: {sizes}", []).append(r)
    return found


def text(records: Sequence[Record]) -> str:
    """Times of each cell, under them the milliseconds of each kind of work, and what failed."""
    parts = []
    for title, of in cells(records).items():
        versus = next((r["versus"] for r in of if "versus" in r), None)
        timed, profiled = [r for r in of if r["ms"] is not None], [r for r in of if "breakdown_ms" in r]
        lines = [title + (f" (× as fast as {versus})" if versus else ""), tables.aligned(HEADER, map(_times, timed))]
        if profiled:
            lines += ["", tables.aligned(("ms of a step", *GROUPS, IDLE, "launches"), map(_breakdown, profiled))]
        lines += [f"failed: {r['contender']}: {r['error']}" for r in of if r["ms"] is None]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def markdown(file: dict[str, Any]) -> str:
    """A row for each contender of each cell that was timed."""
    rows = []
    for title, of in cells(file["records"]).items():
        for r in of:
            if r["ms"] is not None:
                _, ms, p10, p90, tokens, mfu, gib, speedup, interval, _ = _times(r)
                faster = f"{speedup} ({interval})" if "speedup_95" in r else speedup
                rows.append([title.partition(":")[0], r["contender"], f"{ms} ({p10} to {p90})", tokens, mfu, gib, faster])
    versus = next((r["versus"] for r in file["records"] if "versus" in r), None)
    faster = f"times as fast as {versus} (95 %)" if versus else "times as fast (95 %)"
    return tables.markdown(["", "", "ms a step (p10 to p90)", "tokens/s", "MFU %", "peak GiB", faster], rows)


def plot(file: dict[str, Any], folder: Path) -> Path | None:
    """train_step.png: a panel for each cell, a bar for each contender; None where nothing was timed.

    A bar is the step's median. Where it was profiled on a GPU, it is cut into kinds of work, idle time the last of them; a
    profile that is longer than the step is drawn to its scale.
    """
    panels = {title: timed for title, of in cells(file["records"]).items() if (timed := [r for r in of if r["ms"] is not None])}
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
                colour, hatch = FILLS.get(group.lower(), ("#ffffff", ""))
                bar = axes.barh(at, ms, 0.66, left=left, color=colour, hatch=hatch, edgecolor="#374151", linewidth=0.8)
                entries.setdefault(group, bar[0])
                left += ms
            axes.text(left, at, f"  {_caption(record)}", va="center", fontsize=8)
        axes.set_yticks(range(len(of)), [record["contender"] for record in of], fontsize=9)
        axes.set_ylim(len(of) - 0.5, -0.5)
        axes.set_xlim(0, 1.45 * max(record["ms"] for record in of))
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(axis="x", color=GREY, alpha=0.18, linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    grid.flat[-1].set_xlabel("ms a step, median")
    if len(entries) > 1:
        figure.legend(entries.values(), entries, loc="outside lower center", ncols=len(entries), frameon=False, fontsize=9)
    figure.suptitle(f"A training step\n{machine(file['environment'])}", x=0.01, ha="left", fontsize=10)
    path = folder / "train_step.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _times(r: Record) -> list[str]:
    optional = [
        "–" if r["mfu"] is None else f"{100 * r['mfu']:.1f}",
        "–" if r["peak_gb"] is None else f"{r['peak_gb']:.2f}",
        f"{r['speedup']:.3f}" if "speedup" in r else "–",
        "{:.3f} to {:.3f}".format(*r["speedup_95"]) if "speedup_95" in r else "–",
    ]
    return [
        r["contender"],
        *(f"{r[key]:.2f}" for key in ("ms", "p10", "p90")),
        f"{r['tokens_per_s']:,.0f}",
        *optional,
        f"{r['last_loss']:.4f}",
    ]


def _breakdown(r: Record) -> list[str]:
    idle = "–" if r["idle_ms"] is None else f"{r['idle_ms']:.2f}"
    return [r["contender"], *(f"{r['breakdown_ms'].get(group, 0.0):.2f}" for group in GROUPS), idle, f"{r['launches']:,}"]


def _parts(r: Record) -> dict[str, float]:
    """Of the step's bar, by kind of work; all in one where its profile does not tell. They sum to the median."""
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
