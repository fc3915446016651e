"""Pictures of an ablation. One axis for all cells, so that lengths can be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ablation.records import Cell, Parity
from ablation.rounding import MARGIN
from measure.comparison import AGAIN, FUSED, TORCH
from measure.plots import ARMS, DPI, EDGE, GREY, GROUP_FILLS, INK, NAMES, bare, finish, legend_below, pyplot, styled, ticker
from measure.statistics import Interval, Spread, spread
from measure.tables import interval_text, label

WIDTH = 7.4  # inches
FARTHEST = 1000.0  # error ratio that is drawn


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


def step_times(cells: Sequence[Cell], path: Path, footer: str) -> None:
    """A panel for each cell: by arm a box between quartiles, whiskers p10 to p90; the medians of its blocks as dots."""
    figure, panels = _panels([0.5 + 0.3 * len(cell.arms) for cell in cells])
    for axes, cell in zip(panels, cells, strict=True):
        scatter = np.random.default_rng(0)
        for at, (name, arm) in enumerate(cell.arms.items()):
            axes.boxplot(
                [list(chain(*arm.blocks_ms))], positions=[at], whis=(10, 90), orientation="horizontal", widths=0.62,
                showfliers=False, patch_artist=True, medianprops={"color": "#c2410c", "linewidth": 2.0},
                boxprops={"facecolor": ARMS.get(name, {"color": "white"})["color"], "edgecolor": EDGE, "alpha": 0.7},
            )  # fmt: skip
            heights = at + scatter.uniform(-0.24, 0.24, len(arm.blocks_ms))
            axes.plot(list(map(median, arm.blocks_ms)), heights, "o", markersize=2.6, color=INK, markerfacecolor="white")
        _named(axes, label(cell.overrides, cell.mode), list(cell.arms))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6))
        _plain(axes, "x")
    panels[-1].set_xlabel("ms a step: box 25 to 75 %, line the median, whiskers 10 to 90 %, dots blocks", fontsize=8)
    finish(figure, "Step time (axes need not begin at 0)", footer, path)


def attributions(cells: Sequence[Cell], path: Path, footer: str) -> bool:
    """Time of a step by kind of work and idle time, a bar for each arm, all on one axis; whether any cell was profiled."""
    of_groups = list(GROUP_FILLS)
    stacks: list[tuple[str, dict[str, dict[str, float]]]] = []  # title, by arm: kind of work → ms
    for cell in (cell for cell in cells if cell.attribution is not None):
        arms = {}
        for name, shares in cell.attribution.shares.items() if cell.attribution else ():
            if name != AGAIN:
                parts = {share.group: share.ms for share in sorted(shares, key=lambda one: of_groups.index(one.group.lower()))}
                arms[name] = parts | {"idle": max(0.0, median(chain(*cell.arms[name].blocks_ms)) - sum(parts.values()))}
        stacks.append((label(cell.overrides, cell.mode), arms))
    if not stacks:
        return False
    figure, panels = _panels([0.45 + 0.27 * len(arms) for _, arms in stacks], sharex=True)
    most = max(sum(parts.values()) for _, arms in stacks for parts in arms.values())
    entries: dict[str, Any] = {}
    for axes, (title, arms) in zip(panels, stacks, strict=True):
        for at, parts in enumerate(arms.values()):
            left = 0.0
            for group, ms in parts.items():
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
        _named(axes, title, list(arms))
        _plain(axes, "")
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
    if not any(quantity.startswith("row scale") for one in found for quantity in one.distances):  # losses are compared
        kinds.remove("row scales")
    figure, panels = _panels([0.6 + 0.3 * len(kinds)] * len(panels_of), sharex=True)
    drawn = [0.5 / 0.8, 2.0 / 1.25]  # at least what is drawn
    for axes, (title, tests) in zip(panels, panels_of.items(), strict=True):
        axes.axvspan(1e-9, MARGIN, color="#dcfce7", zorder=0)
        axes.axvline(1.0, color=GREY, linewidth=1.0)
        for which, one in enumerate(tests):
            style = ARMS.get(one.arm, {"color": GREY, "marker": "o"})
            scatter = np.random.default_rng(which)
            for quantity, distances in one.distances.items():
                of_layers, layer, _ = quantity.partition(" of ")
                row = kinds.index(f"{of_layers}s" if layer else quantity)
                ratio = float(np.exp(np.mean([np.log(of.tested / of.reordered) for of in distances])))
                drawn.append(min(max(ratio, 1e-2), FARTHEST))
                y = row + (which - 0.5 * (len(tests) - 1)) * 0.3 + scatter.uniform(-0.08, 0.08)
                axes.plot(drawn[-1:], [y], style["marker"], color=style["color"], markersize=4, alpha=0.75, markeredgewidth=0)
        axes.set_xscale("log")
        axes.set_yticks(range(len(kinds)), kinds)
        axes.set_ylim(len(kinds) - 0.5, -0.5)
        axes.set_title(f"{title}, {tests[0].precision}, {len(tests[0].seeds)} seeds", loc="left", fontsize=9)
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if max(drawn) < 50 else (1,)))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        bare(axes, "x")
    panels[-1].set_xlim(0.8 * min(drawn), 1.25 * max(drawn))
    words = f"found over expected error; green: accepted, up to {MARGIN}; {FARTHEST:g} is that or more"
    panels[-1].set_xlabel(words, fontsize=8)
    dots = {}
    for name in styled({one.arm for one in found}):
        style = {"marker": ARMS[name]["marker"], "color": ARMS[name]["color"]}
        dots[NAMES.get(name, name)] = pyplot.Line2D([], [], linestyle="", **style)
    legend_below(figure, dots)
    finish(figure, "Parity: the error beside that of torch summed in another order", footer, path)


# Its operator, seed, and step and loss of each evaluation.
TrainedRun = tuple[str, int, Sequence[tuple[float, float]]]


def losses_apart(runs: Sequence[TrainedRun], path: Path) -> None:
    """How far fused is above torch as they trained, a line for each seed that has both (means of runs made again), and a wide
    one for their mean; dotted, how far each run made again is from the first.
    """
    curves: dict[tuple[str, int], list[dict[float, float]]] = {}
    for name, seed, evaluated in runs:
        curves.setdefault((name, seed), []).append(dict(evaluated))
    means = {which: _mean(made) for which, made in curves.items()}
    apart = [_minus(of, means[TORCH, seed]) for (name, seed), of in means.items() if name == FUSED and (TORCH, seed) in means]
    again = [_minus(of, first) for first, *more in curves.values() for of in more]
    figure, axes = pyplot.subplots(figsize=(WIDTH, 3.4), dpi=DPI, layout="constrained")
    lines: list[tuple[dict[float, float], str, dict[str, Any]]] = [
        (one, "a seed", {"color": GREY, "linewidth": 0.8}) for one in apart
    ]
    made_again = {"color": ARMS[TORCH]["color"], "linewidth": 0.8, "linestyle": ":"}
    lines += [(one, "a run made again, minus the first (A/A)", made_again) for one in again]
    lines += [(_mean(apart), "mean", {"color": INK, "linewidth": 2.0})] if apart else []
    entries = {words: axes.plot(list(of), list(of.values()), **style)[0] for of, words, style in lines}
    axes.axhline(0.0, color=GREY, linewidth=1.0, linestyle="--")
    axes.set_ylabel("validation loss, fused − torch,\nnats per token", fontsize=9)
    axes.set_xlabel("step")
    _plain(axes, "both")
    legend_below(figure, entries)
    finish(figure, "Runs to their end", "", path)


def _mean(curves: Sequence[Mapping[float, float]]) -> dict[float, float]:
    """At the steps that all of them have."""
    return {step: float(np.mean([of[step] for of in curves])) for step in sorted(set.intersection(*map(set, curves)))}


def _minus(curve: Mapping[float, float], other: Mapping[float, float]) -> dict[float, float]:
    return {step: curve[step] - other[step] for step in sorted(curve.keys() & other.keys())}


def _panels(heights: Sequence[float], sharex: bool = False) -> tuple[Any, list[Any]]:
    """A figure of panels one below the other, of these heights in inches."""
    figure, grid = pyplot.subplots(
        len(heights), 1, figsize=(WIDTH, 1.1 + sum(heights)), dpi=DPI, layout="constrained", squeeze=False,
        height_ratios=heights, sharex=sharex,
    )  # fmt: skip
    return figure, list(grid.flat)


def _named(axes: Any, title: str, arms: Sequence[str]) -> None:
    """A line for each arm, the first at the top."""
    axes.set_yticks(range(len(arms)), [NAMES.get(name, name) for name in arms])
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_title(title, loc="left", fontsize=9)


def _plain(axes: Any, grid: str) -> None:
    axes.ticklabel_format(axis="x", useOffset=False, style="plain")
    bare(axes, grid)
