"""Pictures of a study: differences, loss against learning rate, and what the probes saw along the depth."""

import math
from pathlib import Path

from measure.plots import GREY, INK, band, bare, beside, dot, finish, legend_below, look, pyplot, rows
from measure.tables import interval_text
from study.analysis import Report
from study.arms import Study
from study.runs import FRESH, SEARCH, Found

STREAM = ("rms", "most")
PROBED = {"rms": "RMS of the stream", "most": "max |r|", "logit": "largest attention logit", "saturated": "saturated share"}


def differences(made: Report, path: Path, footer: str) -> None:
    """Arms as rows: the difference from the baseline with its interval, over the band of A/A. Filled: it is called one."""
    others = [arm for arm in made.arms if arm.against is not None]
    failed = {arm.name: f", {arm.sample.failed} of {arm.sample.runs} failed" if arm.sample.failed else "" for arm in others}
    figure, (axes,), heights = rows([("", [name + said for name, said in failed.items()])])
    losses = [arm.against.loss if arm.against else None for arm in others]
    again = made.again.loss if made.again else None
    ends = [0.0, *(end for of in (*losses, again) if of for end in (of.low, of.median, of.high) if math.isfinite(end))]
    room = 0.05 * (max(ends) - min(ends)) or 0.01
    axes.set_xlim(min(ends) - room, max(ends) + room)
    axes.axvline(0, color=GREY, linewidth=1)
    if again and heights:
        band(axes, again.low, again.high, heights[0], heights[-1])
    for y, arm, loss in zip(heights, others, losses, strict=True):
        if loss:
            dot(axes, y, loss, filled=bool(arm.against and arm.against.verdict))
            beside(axes, y, interval_text(loss).replace("inf", "∞"))
    said = f"last validation loss minus that of {made.baseline}, nats per token, 95 %"
    axes.set_xlabel(f"{said}\n(filled: different; grey: {made.baseline} with other seeds)", fontsize=8)
    finish(figure, "Each arm at its best rate, against the baseline", footer, path)


def rates(study: Study, found: Found, made: Report, path: Path, footer: str) -> None:
    """The last validation loss of every run that chose a rate, and a line through the medians over seeds; at the best rate a
    bar from the lowest to the highest of the fresh seeds. A run that failed is a cross at the top, and no point of the line."""
    figure, axes = pyplot.subplots(figsize=(8, 4.6))
    ended = {arm.name: found.of(arm.name, SEARCH) or found.of(arm.name, FRESH) for arm in made.arms}
    losses = [run.last for of in ended.values() for run in of if not found.failed(run)]
    top = min(max(losses, default=1.0), min(losses, default=0.0) + study.cfg.compare.diverged)
    entries, said = {}, ["Loss against learning rate"]
    for number, arm in enumerate(made.arms):
        style, moved = look(number), 1.03 ** (number - len(made.arms) / 2)
        failed = [run.rate * moved for run in ended[arm.name] if found.failed(run)]
        axes.plot(failed, [1.02 * top] * len(failed), color=style["color"], marker="x", linestyle="none", markersize=5)
        trained = [run for run in ended[arm.name] if not found.failed(run)]
        shown = [min(run.last, top) for run in trained]
        axes.plot([run.rate * moved for run in trained], shown, **style | {"linestyle": "none", "alpha": 0.6})
        medians = {rate: min(loss, top) for rate, loss in found.rates(arm.name).items() if math.isfinite(loss)}
        [entries[arm.name]] = axes.plot([rate * moved for rate in medians], list(medians.values()), **style | {"markersize": 6})
        if len(fresh := found.sample(found.of(arm.name, FRESH, rate=arm.rate)).losses) > 1:
            axes.vlines(arm.rate * moved, min(*fresh, top), min(max(fresh), top), color=style["color"], linewidth=4, alpha=0.4)
            said[1:] = ["bars: seeds at the best rate"]
    if any(found.failed(run) for of in ended.values() for run in of):
        said.append("×: the run failed")
    if max(losses, default=0.0) > top:
        said.append(f"losses above {top:.2f} are drawn there")
    axes.set(xscale="log", xlabel="learning rate", ylabel="last validation loss, nats per token")
    tried = [run.rate for of in ended.values() for run in of] or study.rates
    ticks = [rate for rate in study.rates if min(tried) <= rate <= max(tried)]
    axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
    axes.set_xlim(0.85 * min(tried), 1.15 * max(tried))
    bare(axes)
    legend_below(figure, entries)
    finish(figure, "; ".join(said), footer, path)


def depth(found: Found, made: Report, path: Path, footer: str) -> bool:
    """Arms as rows, norm sites as x: what the last probe of the first seed saw at the arm's best rate. False without probes.

    What the final norm puts out is no point of the stream, and left out.
    """
    ran = {arm.name: found.of(arm.name, SEARCH, FRESH, rate=arm.rate) for arm in made.arms}
    last = {name: runs[0].probes[-1] for name, runs in ran.items() if runs and runs[0].probes}
    columns = [key for key in PROBED if any(key in probe for probe in last.values())]
    if not columns:
        return False
    size = (2.6 * len(columns) + 1, 1.1 * len(last) + 1.2)
    figure, grid = pyplot.subplots(len(last), len(columns), figsize=size, sharex="col", sharey="col", squeeze=False)
    for row, (name, seen) in zip(grid, last.items(), strict=True):
        for axes, key in zip(row, columns, strict=True):
            if key in seen:
                axes.plot(seen[key][:-1] if key in STREAM else seen[key], color=INK, marker=".", linewidth=1.2)
            else:
                axes.text(0.5, 0.5, "none", color=GREY, fontsize=7, ha="center", transform=axes.transAxes)
            if key in STREAM:
                axes.set_yscale("log")
            bare(axes)
        row[0].set_ylabel("\n".join(name.split()), fontsize=6, rotation=0, ha="right", va="center")
    for above, below, key in zip(grid[0], grid[-1], columns, strict=True):
        above.set_title(PROBED[key], fontsize=8)
        below.set_xlabel("layer" if key == "logit" else "norm site", fontsize=8)
    finish(figure, "Along the depth, at the end of training and at each arm's best rate", footer, path)
    return True
