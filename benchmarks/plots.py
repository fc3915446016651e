"""Plots of the norms: share of copy bandwidth over width, readable in greyscale."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed, and none opened
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks import tables
from benchmarks.cases import DIRECTIONS
from benchmarks.providers import TRAFFIC

GREY = "#6b7280"
# Colours differ in lightness too; marker and dash tell lines apart where colour does not.
STYLES: dict[str, dict[str, Any]] = {
    TRAFFIC: {"color": GREY, "marker": "+", "linestyle": (0, (1, 2)), "linewidth": 1.0, "zorder": 1},
    "ours": {"color": "#111111", "marker": "o", "linestyle": "-", "linewidth": 2.8, "markersize": 6, "zorder": 5},
    "ours-seeded": {"color": "#111111", "marker": "o", "linestyle": ":", "linewidth": 1.6, "markerfacecolor": "white"},
    "torch": {"color": "#c2410c", "marker": "s", "linestyle": "--"},
    "compile": {"color": "#2563eb", "marker": "^", "linestyle": "-."},
    "flash-attn": {"color": "#0f8a6d", "marker": "D", "linestyle": (0, (5, 1))},
    "liger-kernel": {"color": "#b58900", "marker": "v", "linestyle": (0, (3, 1, 1, 1, 1, 1))},
    "quack-kernels": {"color": "#7c3aed", "marker": "P", "linestyle": (0, (1, 1))},
    "apex": {"color": "#8b8b8b", "marker": "x", "linestyle": (0, (4, 3))},
    "tutorial": {"color": "#0f8a6d", "marker": "D", "linestyle": (0, (5, 1))},
}
LABELS = {
    TRAFFIC: "the same tensors, moved alone",
    "compile": "torch.compile",
    "ours-seeded": "ours, seed given",
    "flash-attn": "flash-attn (Triton)",
    "liger-kernel": "Liger",
    "quack-kernels": "quack",
    "tutorial": "Triton tutorial's way",
}


def norms(file: dict[str, Any], folder: Path) -> list[Path]:
    """One picture for each direction and number of rows, a panel for each case; returns what it wrote."""
    written = []
    sweeps = tables.by_rows(file["records"])
    for weights in sorted({record["weight_dtype"] for record in file["records"]}):
        for rows, sweep in sweeps.items():
            for direction in DIRECTIONS:
                chosen = [r for r in sweep if r["direction"] == direction and r["weight_dtype"] == weights]
                if any(record.get("us") is not None for record in chosen):
                    name = f"norms_{direction}" + ("" if rows == max(sweeps) else f"_m{rows}")
                    path = folder / f"{name}{'' if weights == 'bf16' else f'_weights_{weights}'}.png"
                    _norms(file["environment"], chosen, direction, path)
                    written.append(path)
    return written


def _norms(environment: dict[str, Any], records: Sequence[dict[str, Any]], direction: str, path: Path) -> None:
    groups = tables.grouped(records)
    columns = min(2, len(groups))
    lines = math.ceil(len(groups) / columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(5.6 * columns, 3.0 * lines + 1.1), dpi=110, layout="constrained", squeeze=False,
        sharex=True, sharey=True,
    )  # fmt: skip
    panels = list(grid.flat)
    top = max(1.1, 1.05 * max(record["share"] for record in records if record.get("us") is not None))
    for axes, ((case, _, residual, _), widths) in zip(panels, groups.items(), strict=False):
        names = [name for name in STYLES if any(name in at for at in widths.values())]
        for name in names:
            points = [(n, at[name]["share"]) for n, at in sorted(widths.items()) if name in at and at[name].get("us")]
            if points:
                line(axes, name, points)
        axes.axhline(1.0, color=GREY, linewidth=1.0)
        axes.set_ylim(0, top)
        axes.set_title(tables.label(case, residual), loc="left", fontsize=10)
        width_axis(axes, sorted({record["N"] for record in records}))
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    for i, axes in enumerate(panels[: len(groups)]):
        if i + columns >= len(groups):
            axes.set_xlabel("N, features in a row")
            axes.tick_params(labelbottom=True)
        if i % columns == 0:
            axes.set_ylabel("share of copy bandwidth")
    rows = tables.rows_label({record["M"] for record in records})
    weights = records[0]["weight_dtype"]
    title = f"{direction} of norms, x in bf16, weights in {weights}, {rows}; minimum bytes over time, cold L2"
    finish(figure, panels, title, environment, path)


def line(axes: Any, name: str, points: Sequence[tuple[float, float]]) -> None:
    style = {"linewidth": 1.5, "markersize": 5, **STYLES[name]}
    axes.plot(*zip(*points, strict=True), label=LABELS.get(name, name), **style)


def width_axis(axes: Any, widths: Sequence[int], linear: bool = False) -> None:
    """Powers of two along the bottom, whatever widths were measured; or a linear axis from zero."""
    if linear:
        axes.set_xlim(left=0)
    else:
        axes.set_xscale("log", base=2)
        low, high = math.floor(math.log2(widths[0])), math.ceil(math.log2(widths[-1]))
        step = max(1, math.ceil((high - low) / 8))
        axes.set_xticks([2**i for i in range(low, high + 1, step)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 and n % 1024 == 0 else f"{n:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(color=GREY, alpha=0.18, linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def finish(figure: Any, panels: Sequence[Any], title: str, environment: dict[str, Any], path: Path) -> None:
    """One legend for all panels, a title with machine and versions; writes and closes."""
    entries: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    for columns in range(len(entries), 0, -1):  # as few lines as the picture is wide enough for
        legend = figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False)
        if columns == 1 or legend.get_window_extent().width < figure.bbox.width:
            break
        legend.remove()
    letters = int(13 * figure.get_figwidth())  # thirteen of the title's to an inch
    lines = [textwrap.fill(line, letters) for line in (title, machine(environment))]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def machine(environment: dict[str, Any]) -> str:
    """GPU, versions and revision, in one line; also other revisions that records are of, and how many."""
    gpu = environment["gpu"]["name"] if environment["gpu"] else "CPU"
    known = ("torch", "triton", "flash-attn", "liger-kernel", "quack-kernels", "apex")
    versions = [f"{name} {environment['versions'][name]}" for name in known if name in environment["versions"]]
    git = environment["git"]
    revision = [f"git {git['revision'][:8]}"] if git else []
    if git and git.get("others"):
        counts = (f"{count} records of {other[:8]}" for other, count in git["others"].items())
        revision = [f"{revision[0]} ({', '.join(counts)})"]
    return ", ".join([gpu, *versions, *revision])
