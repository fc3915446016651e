"""Pictures of an ablation. One axis for all cells, so that lengths can be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ablation.gpu_time import parts_ms
from ablation.records import Cell, Parity
from ablation.rounding import MARGIN
from measure.comparison import is_twin
from measure.plots import ARMS, EDGE, GREY, GROUP_FILLS, INK, NAMES, bare, finish, legend_below, pyplot, ticker
from measure.statistics import Interval, Spread, spread
from measure.tables import interval_text, label

DRAWN = (0.1, 100.0)  # error ratios; those beyond are at the edge
KINDS = ("loss", "gradient norm", "gradients", "row scales", "parameters")  # of quantities that parity compares


@dataclass(frozen=True)
class Bars:
    """A group of the lead picture: one configuration."""

    title: str
    steps_ms: Mapping[str, Spread]  # by arm; the last is the subject
    speedups: Mapping[str, Interval]  # of the subject, by base, the fastest first


def bars_of(cell: Cell) -> Bars:
    arms = {name: arm for name, arm in cell.arms.items() if not is_twin(name)}
    steps = {name: spread([ms for block in arm.blocks_ms for ms in block]) for name, arm in arms.items()}
    return Bars(cell.title, steps, {base: cell.against(base).speedup for base in cell.opponents})


def lead(groups: Sequence[Bars], path: Path, footer: str, title: str = "Step time") -> None:
    """Step times, a bar for each arm; on the right the subject's speed-up over each other arm with its interval."""
    figure, axes, heights = _rows([(group.title, list(group.steps_ms)) for group in groups])
    rows = [(group, name) for group in groups for name in group.steps_ms]
    most = max(group.steps_ms[name].p90 for group, name in rows)
    for y, (group, name) in zip(heights, rows, strict=True):
        steps, colour = group.steps_ms[name], ARMS.get(name, {"color": GREY})["color"]
        whiskers = [[steps.median - steps.p10], [steps.p90 - steps.median]]
        axes.barh(y, steps.median, 0.82, color=colour, xerr=whiskers, ecolor=EDGE, error_kw={"linewidth": 0.8})
        words = f"{steps.median:.1f} ms" if steps.median >= 10 else f"{steps.median:.2f} ms"
        if (speedup := group.speedups.get(name)) is not None:
            words += f"    {list(group.steps_ms)[-1]} {interval_text(speedup)} ×"
        axes.text(steps.p90 + 0.015 * most, y, words, va="center", fontsize=7.5, color=INK)
    axes.set_xlim(0, 1.62 * most)
    shown = [tick for tick in ticker.MaxNLocator(6).tick_values(0, most) if tick <= 1.05 * most]
    axes.xaxis.set_major_locator(ticker.FixedLocator(shown))
    axes.set_xlabel("ms a step (median; whiskers 10 to 90 %). Right: speed-up over this arm, 95 % interval", fontsize=8)
    finish(figure, title, footer, path)


def attributions(cells: Sequence[Cell], path: Path, footer: str) -> None:
    """Time of a step by kind of work and idle time, a bar for each arm."""
    groups = [(cell.title, parts_ms(cell)) for cell in cells]
    figure, axes, heights = _rows([(title, list(arms)) for title, arms in groups])
    rows = [parts for _, arms in groups for parts in arms.values()]
    most, entries = max(sum(parts.values()) for parts in rows), dict[str, Any]()
    for y, parts in zip(heights, rows, strict=True):
        left = 0.0
        for group, ms in sorted(parts.items(), key=lambda part: list(GROUP_FILLS).index(part[0].lower())):
            colour, hatch = GROUP_FILLS[group.lower()]
            line = {"edgecolor": EDGE, "linewidth": 0.7, "linestyle": ":" if group == "idle" else "-"}
            entries.setdefault(group, axes.barh(y, ms, 0.8, left=left, color=colour, hatch=hatch, **line)[0])
            if ms > 0.045 * most:
                box = None if group == "norm" else {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.9}
                ink = "white" if group == "norm" else INK
                axes.text(left + ms / 2, y, f"{ms:.1f}", ha="center", va="center", fontsize=7, color=ink, bbox=box)
            left += ms
        axes.text(left + 0.01 * most, y, f"{left:.1f} ms", va="center", fontsize=8)
    axes.set_xlim(0, 1.12 * most)
    axes.set_xlabel("ms of a step, by a profile of the GPU; idle: the rest of a timed step", fontsize=8)
    legend_below(figure, entries)
    finish(figure, "Where the time of a step goes", footer, path)


def parity(found: Sequence[Parity], path: Path, footer: str) -> None:
    """Error ratios: a dot for every quantity, beside the band that is accepted.

    The ratio is the arm's distance from the reference over what rounding and other orders of sums explain, a geometric mean
    over seeds.
    """
    titles = [f"{one.arm}: {label(one.overrides)}, {one.precision}, {len(one.seeds)} seeds" for one in found]
    figure, axes, heights = _rows([(title, KINDS) for title in titles])
    axes.axvspan(1e-9, MARGIN, color="#dcfce7", zorder=0)
    axes.axvline(1.0, color=GREY, linewidth=1.0)
    scatter = np.random.default_rng(0)
    for number, one in enumerate(found):
        for quantity, distances in one.distances.items():
            kind, layer, _ = quantity.partition(" of ")
            y = heights[len(KINDS) * number + KINDS.index(f"{kind}s" if layer else quantity)]
            ratio = np.exp(np.mean([np.log(of.tested / max(of.reordered, 1.0)) for of in distances])).clip(*DRAWN)
            dot = {"color": ARMS.get(one.arm, {"color": GREY})["color"], "markersize": 4, "alpha": 0.75, "markeredgewidth": 0}
            axes.plot([ratio], [y + scatter.uniform(-0.2, 0.2)], "o", **dot)
    axes.set_xscale("log")
    axes.set_xlim(0.8 * DRAWN[0], 1.25 * DRAWN[1])
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel(f"error ratio; green: accepted, up to {MARGIN}; {DRAWN[1]:g} is that or more", fontsize=8)
    finish(figure, "Parity: the error beside what rounding and other orders of sums explain", footer, path)


def _rows(groups: Sequence[tuple[str, Sequence[str]]]) -> tuple[Any, Any, list[float]]:
    """A figure with a named row for each member of each group, beneath the group's title; and the heights of the rows."""
    heights, titles, y = list[float](), list[float](), 0.0
    for _, members in groups:
        titles.append(y)
        heights += [y + 1 + at for at in range(len(members))]
        y += len(members) + 1.3
    figure, axes = pyplot.subplots(figsize=(8.4, 1.2 + 0.21 * y))
    axes.set_yticks(heights, [NAMES.get(member, member) for _, members in groups for member in members])
    axes.set_ylim(y - 0.6, -0.6)
    for (title, _), height in zip(groups, titles, strict=True):
        axes.text(0.005, height, title, transform=axes.get_yaxis_transform(), va="center", fontsize=8, fontweight="bold")
    bare(axes, "x")
    return figure, axes, heights
