"""Pictures of an ablation. One axis for all cells, so that lengths can be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ablation.gpu_time import parts_ms
from ablation.records import Cell, Parity
from ablation.rounding import MARGIN
from measure.comparison import AGAIN
from measure.plots import ARMS, DPI, EDGE, GREY, GROUP_FILLS, INK, NAMES, bare, finish, legend_below, pyplot, styled, ticker
from measure.statistics import Interval, Spread, spread
from measure.tables import interval_text, label

WIDTH = 7.4  # inches
DRAWN = (0.1, 100.0)  # error ratios; those beyond are at the edge


@dataclass(frozen=True)
class Bars:
    """A group of the lead picture: one configuration."""

    title: str
    steps_ms: Mapping[str, Spread]  # by arm; the last is the subject
    speedups: Mapping[str, Interval]  # of the subject, by base, the fastest first


def bars_of(cell: Cell) -> Bars:
    steps = {name: spread([ms for block in arm.blocks_ms for ms in block]) for name, arm in cell.arms.items() if name != AGAIN}
    return Bars(label(cell.overrides, cell.mode), steps, {base: cell.against(base).speedup for base in cell.opponents})


def lead(groups: Sequence[Bars], path: Path, footer: str, title: str = "Step time") -> None:
    """Step times on one axis, a bar for each arm; on the right the subject's speed-up over each other arm with its interval."""
    lines = [(group, name) for group in groups for name in group.steps_ms]
    height = 1.5 + 0.22 * len(lines) + 0.16 * len(groups)
    figure, axes = pyplot.subplots(figsize=(WIDTH + 1.6, height), dpi=DPI, layout="constrained")
    at, ticks = 0.0, []
    most = max(steps.p90 for group in groups for steps in group.steps_ms.values())
    for group in groups:
        ticks.append((at + 0.5 * (len(group.steps_ms) - 1), group.title.replace(", ", "\n", 1)))
        for name, steps in group.steps_ms.items():
            whiskers = [[steps.median - steps.p10], [steps.p90 - steps.median]]
            colour = ARMS.get(name, {"color": GREY})["color"]
            axes.barh(at, steps.median, 0.82, color=colour, xerr=whiskers, ecolor=EDGE, error_kw={"linewidth": 0.8})
            words = f"{steps.median:.1f} ms" if steps.median >= 10 else f"{steps.median:.2f} ms"
            if (speedup := group.speedups.get(name)) is not None:
                words += f"    {list(group.steps_ms)[-1]} {interval_text(speedup)} ×"
            axes.text(steps.p90 + 0.015 * most, at, words, va="center", fontsize=7.5, color=INK)
            at += 1
        at += 0.7
    axes.set_yticks(*zip(*ticks, strict=True), fontsize=8)
    axes.set_ylim(at - 0.9, -0.7)
    axes.set_xlim(0, 1.62 * most)
    axes.xaxis.set_major_locator(
        ticker.FixedLocator([tick for tick in ticker.MaxNLocator(6).tick_values(0, most) if tick <= 1.05 * most])
    )
    axes.set_xlabel("ms a step (median; whiskers 10 to 90 %). Right: speed-up over this arm, 95 % interval", fontsize=8)
    bare(axes, "x")
    names = styled({name for _, name in lines})
    legend_below(figure, {NAMES.get(name, name): pyplot.Rectangle((0, 0), 1, 1, color=ARMS[name]["color"]) for name in names})
    finish(figure, title, footer, path)


def attributions(cells: Sequence[Cell], path: Path, footer: str) -> bool:
    """Time of a step by kind of work and idle time, a bar for each arm, all on one axis; whether any cell was profiled."""
    stacks = [(label(cell.overrides, cell.mode), parts_ms(cell)) for cell in cells if cell.attribution]
    if not stacks:
        return False
    figure, panels = _panels([0.45 + 0.27 * len(arms) for _, arms in stacks])
    most = max(sum(parts.values()) for _, arms in stacks for parts in arms.values())
    of_groups, entries = list(GROUP_FILLS), dict[str, Any]()
    for axes, (title, arms) in zip(panels, stacks, strict=True):
        for at, parts in enumerate(arms.values()):
            left = 0.0
            for group, ms in sorted(parts.items(), key=lambda part: of_groups.index(part[0].lower())):
                colour, hatch = GROUP_FILLS[group.lower()]
                line = {"edgecolor": EDGE, "linewidth": 0.7, "linestyle": ":" if group == "idle" else "-"}
                entries.setdefault(group, axes.barh(at, ms, 0.72, left=left, color=colour, hatch=hatch, **line)[0])
                if ms > 0.045 * most:
                    box = None if group == "norm" else {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.9}
                    ink = "white" if group == "norm" else INK
                    axes.text(left + ms / 2, at, f"{ms:.1f}", ha="center", va="center", fontsize=7, color=ink, bbox=box)
                left += ms
            axes.text(left + 0.01 * most, at, f"{left:.1f} ms", va="center", fontsize=8)
        axes.set_xlim(0, 1.1 * most)
        axes.set_yticks(range(len(arms)), [NAMES.get(name, name) for name in arms])
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.set_title(title, loc="left", fontsize=9)
        bare(axes, "")
    panels[-1].set_xlabel("ms of a step, by a profile of the GPU; idle: the rest of a timed step", fontsize=8)
    legend_below(figure, entries)
    finish(figure, "Where the time of a step goes", footer, path)
    return True


def parity(found: Sequence[Parity], path: Path, footer: str) -> None:
    """Error ratios: dots for every quantity and arm, beside the band that is accepted.

    The ratio is the arm's distance from the reference over that of torch summed in another order, a geometric mean over seeds.
    """
    panels_of: dict[str, list[Parity]] = {}
    for one in found:
        panels_of.setdefault(label(one.overrides), []).append(one)
    kinds = ["loss", "gradient norm", "gradients", "row scales", "parameters"]
    figure, panels = _panels([0.6 + 0.3 * len(kinds)] * len(panels_of))
    for axes, (title, tests) in zip(panels, panels_of.items(), strict=True):
        axes.axvspan(1e-9, MARGIN, color="#dcfce7", zorder=0)
        axes.axvline(1.0, color=GREY, linewidth=1.0)
        for which, one in enumerate(tests):
            style = ARMS.get(one.arm, {"color": GREY, "marker": "o"})
            scatter = np.random.default_rng(which)
            for quantity, distances in one.distances.items():
                of_layers, layer, _ = quantity.partition(" of ")
                y = kinds.index(f"{of_layers}s" if layer else quantity) + (which - 0.5 * (len(tests) - 1)) * 0.3
                ratio = np.exp(np.mean([np.log(of.tested / of.reordered) for of in distances])).clip(*DRAWN)
                dot = {"color": style["color"], "markersize": 4, "alpha": 0.75, "markeredgewidth": 0}
                axes.plot([ratio], [y + scatter.uniform(-0.08, 0.08)], style["marker"], **dot)
        axes.set_xscale("log")
        axes.set_yticks(range(len(kinds)), kinds)
        axes.set_ylim(len(kinds) - 0.5, -0.5)
        axes.set_title(f"{title}, {tests[0].precision}, {len(tests[0].seeds)} seeds", loc="left", fontsize=9)
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
        bare(axes, "x")
    panels[-1].set_xlim(0.8 * DRAWN[0], 1.25 * DRAWN[1])
    panels[-1].set_xlabel(f"error ratio; green: accepted, up to {MARGIN}; {DRAWN[1]:g} is that or more", fontsize=8)
    names = {name: (ARMS[name]["marker"], ARMS[name]["color"]) for name in styled({one.arm for one in found})}
    legend_below(figure, {NAMES.get(n, n): pyplot.Line2D([], [], ls="", marker=m, color=c) for n, (m, c) in names.items()})
    finish(figure, "Parity: the error beside that of torch summed in another order", footer, path)


def _panels(heights: Sequence[float]) -> tuple[Any, list[Any]]:
    """A figure of panels one below the other, of these heights in inches, with one x axis."""
    size = (WIDTH, 1.1 + sum(heights))
    figure = pyplot.figure(figsize=size, dpi=DPI, layout="constrained")
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    return figure, list(grid.flat)
