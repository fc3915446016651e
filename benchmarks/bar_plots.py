"""Bars of what has no width to go along: host cost and memory, in the styles of `plots`."""

from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.cases import CASES
from benchmarks.plots import GREY, LABELS, STYLES, finish, pyplot

HEIGHT = 0.8  # of all bars of a group, which are 1 apart


def host(file: dict[str, Any], folder: Path) -> list[Path]:
    """host.png: CPU time of a call, a line of panels for each case; returns what it wrote."""
    records = [record for record in file["records"] if record.get("us") is not None]
    if not records:
        return []
    cases = list(dict.fromkeys(record["case"] for record in records))
    directions = list(dict.fromkeys(record["direction"] for record in records))
    figure, grid = _grid(len(cases), len(directions), groups=1)
    for line, case in zip(grid, cases, strict=True):
        for axes, direction in zip(line, directions, strict=True):
            found = {r["provider"]: r for r in records if r["case"] == case and r["direction"] == direction}
            values = {name: record["us"] for name, record in found.items()}
            ranges = {name: (record["us"] - record["p10"], record["p90"] - record["us"]) for name, record in found.items()}
            _bars(axes, {CASES[case].label: values}, ranges)
            axes.set_title(direction.replace("+", " + "), loc="left", fontsize=10)
            axes.set_xlabel("CPU microseconds a call, median, 10th to 90th percentile")
    shape = f"{records[0]['M']} × {records[0]['N']} elements"
    path = folder / "host.png"
    finish(figure, list(grid.flat), f"host cost of one call, {shape}", file["environment"], path)
    return [path]


def memory(file: dict[str, Any], folder: Path) -> list[Path]:
    """memory.png: MiB a block, a line of panels for each chain; returns what it wrote."""
    records = [record for record in file["records"] if record.get("peak") is not None]
    if not records:
        return []
    chains = list(dict.fromkeys((record["M"], record["N"], record["blocks"]) for record in records))
    groups = list(dict.fromkeys((record["case"], record["residual_dtype"]) for record in records))
    figure, grid = _grid(len(chains), 2, len(groups))
    for line, (rows, width, blocks) in zip(grid, chains, strict=True):
        for axes, field, title in zip(line, ("kept", "peak"), ("kept for backward", "at the peak"), strict=True):
            values: dict[str, dict[str, float]] = {tables.label(*group): {} for group in groups}
            for r in records:
                if (r["M"], r["N"], r["blocks"]) == (rows, width, blocks):
                    values[tables.label(r["case"], r["residual_dtype"])][r["provider"]] = r[field] / blocks / 2**20
            _bars(axes, values, {})
            axes.set_title(f"{blocks} blocks of {rows} × {width}, {title}", loc="left", fontsize=10)
            axes.set_xlabel("MiB a block")
    path = folder / "memory.png"
    finish(figure, list(grid.flat), "memory of chains of fused blocks and others, x in bf16", file["environment"], path)
    return [path]


def _grid(lines: int, columns: int, groups: int) -> tuple[Any, Any]:
    height = 1.0 + max(1.5, groups)
    return pyplot.subplots(
        lines, columns, figsize=(5.6 * columns, height * lines + 1.1), dpi=110, layout="constrained", squeeze=False, sharey=True
    )


def _bars(axes: Any, groups: dict[str, dict[str, float]], ranges: dict[str, tuple[float, float]]) -> None:
    """Groups from the top down, in each a bar for each provider.

    ranges: how far a provider's whiskers reach down and up; for one group alone.
    """
    names = _order(groups)
    thick = HEIGHT / max(1, len(names))  # none where all that were tried have failed
    for i, name in enumerate(names):
        at = [(place + (i - (len(names) - 1) / 2) * thick, v[name]) for place, v in enumerate(groups.values()) if name in v]
        heights, values = [y for y, _ in at], [value for _, value in at]
        whiskers = [[down] for down in ranges[name]] if name in ranges else None
        color = STYLES.get(name, {"color": GREY})["color"]
        drawn = axes.barh(heights, values, 0.9 * thick, label=LABELS.get(name, name), color=color, xerr=whiskers, ecolor=GREY)
        axes.bar_label(drawn, [f"{value:.{1 if value < 100 else 0}f}" for value in values], padding=4, fontsize=8)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=GREY, alpha=0.18, linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _order(groups: dict[str, dict[str, float]]) -> list[str]:
    """The providers that are there: as in the other plots, then those that these alone have."""
    present = dict.fromkeys(name for values in groups.values() for name in values)
    return [*(name for name in STYLES if name in present), *(name for name in present if name not in STYLES)]
