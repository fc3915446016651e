"""Pictures of an ablation. One axis for all cells, so that lengths can be compared."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ablation.gpu_time import parts_ms
from ablation.records import Cell, Parity, Recorded, controls, fastest, speedup, steps_of
from ablation.rounding import MARGIN
from measure.plots import ARMS, EDGE, GREY, GROUP_FILLS, INK, band, beside, dot, finish, legend_below, rows
from measure.tables import interval_text, label

FAR = 1.25  # a speed-up
DRAWN = (0.1, 100.0)  # error ratios; those beyond are at the edge
TICKS = (0.1, 0.2, 0.5, 0.7, 1.0, MARGIN, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
KINDS = ("loss", "gradient norm", "gradients", "row scales", "parameters")  # of quantities that parity compares


def lead(cells: Mapping[str, Recorded], path: Path, footer: str, title: str = "Step time") -> None:
    """Left a bar for each arm's step; right the subject's speed-up over each other arm with its interval, over the band of A/A.

    The axis of the speed-ups reaches FAR, or the speed-up over the fastest other arm. A larger one is an arrow and a number.

    Args:
        cells: by their titles.
    """
    figure, (bars, gains), heights = rows([(name, list(steps_of(cell))) for name, cell in cells.items()], panels=2)
    judged = [of for cell in cells.values() for of in (speedup(cell, fastest(cell)), *controls(cell))]
    others = [speedup(cell, name) for cell in cells.values() for name in steps_of(cell) if name != cell["subject"]]
    low = min([0.99, *(of.low for of in judged)])
    high = max([1.02, *(of.high for of in judged), *(min(of.high, FAR) for of in others)])
    gains.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    gains.axvline(1.0, color=GREY, linewidth=1.0)
    most, places = max(of.p90 for cell in cells.values() for of in steps_of(cell).values()), iter(heights)
    for cell in cells.values():
        at = {name: next(places) for name in steps_of(cell)}
        if same := controls(cell):
            band(gains, min(of.low for of in same), max(of.high for of in same), min(at.values()), max(at.values()))
        for name, steps in steps_of(cell).items():
            colour = ARMS.get(name, GREY)
            whiskers = [[steps.median - steps.p10], [steps.p90 - steps.median]]
            bars.barh(at[name], steps.median, 0.82, color=colour, xerr=whiskers, ecolor=EDGE, error_kw={"linewidth": 0.8})
            words = f"{steps.median:.1f} ms" if steps.median >= 10 else f"{steps.median:.2f} ms"
            bars.text(steps.p90 + 0.02 * most, at[name], words, va="center", fontsize=7.5, color=INK)
            if name != cell["subject"]:
                dot(gains, at[name], speedup(cell, name))
                beside(gains, at[name], interval_text(speedup(cell, name)))
    bars.set_xlim(0, 1.25 * most)
    bars.set_xlabel("ms a step (median; whiskers 10 to 90 %)", fontsize=8)
    subjects = " or ".join(dict.fromkeys(cell["subject"] for cell in cells.values()))
    gains.set_xlabel(f"{subjects} is so many times as fast as this arm, 95 %\n(grey: an arm against itself)", fontsize=8)
    finish(figure, title, footer, path)


def attributions(cells: Sequence[Cell], path: Path, footer: str) -> None:
    """Time of a step by kind of work and idle time, a bar for each arm."""
    groups = [(cell.title, parts_ms(cell)) for cell in cells]
    figure, (axes,), heights = rows([(title, list(arms)) for title, arms in groups])
    bars = [parts for _, arms in groups for parts in arms.values()]
    most, entries = max(sum(parts.values()) for parts in bars), dict[str, Any]()
    for y, parts in zip(heights, bars, strict=True):
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
    figure, (axes,), heights = rows([(title, KINDS) for title in titles])
    axes.axvspan(1e-9, MARGIN, color="#dcfce7", zorder=0)
    axes.axvline(1.0, color=GREY, linewidth=1.0)
    scatter, ratios = np.random.default_rng(0), [0.5, 1.5]
    for number, one in enumerate(found):
        for quantity, distances in one.distances.items():
            kind, layer, _ = quantity.partition(" of ")
            y = heights[len(KINDS) * number + KINDS.index(f"{kind}s" if layer else quantity)]
            ratio = np.exp(np.mean([np.log(of.tested / max(of.reordered, 1.0)) for of in distances])).clip(*DRAWN)
            ratios.append(ratio)
            style = {"color": ARMS.get(one.arm, GREY), "markersize": 4, "alpha": 0.75, "markeredgewidth": 0}
            axes.plot([ratio], [y + scatter.uniform(-0.2, 0.2)], "o", **style)
    axes.set_xscale("log")
    axes.set_xlim(0.9 * min(ratios), 1.1 * max(ratios))
    ticks = [tick for tick in TICKS if min(ratios) <= tick <= max(ratios)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.minorticks_off()
    beyond = f"; {DRAWN[1]:g} is that or more" if max(ratios) == DRAWN[1] else ""
    axes.set_xlabel(f"error ratio; green: accepted, up to {MARGIN}{beyond}", fontsize=8)
    finish(figure, "Parity: the error beside what rounding and other orders of sums explain", footer, path)
