"""Pictures of a study: differences, loss against learning rate, and what the probes saw along the depth."""

import math
from pathlib import Path
from typing import Any

from measure.plots import GREY, INK, bare, finish, legend_below, look, pyplot, ticker
from study.analysis import Report
from study.arms import Study
from study.runs import FRESH, SEARCH, Found

FAILED, LINEAR = "#b91c1c", 0.05  # nats
STREAM = ("rms", "most")
PROBED = {"rms": "RMS of the stream", "most": "max |r|", "logit": "largest attention logit", "saturated": "saturated share"}


def differences(made: Report, path: Path, footer: str) -> None:
    """Arms as rows: the difference from the baseline with its interval, over the band of A/A. Filled: it is called one."""
    others = [arm for arm in made.arms if arm.against is not None]
    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.34 * len(others)))
    if made.again and made.again.loss:
        axes.axvspan(made.again.loss.low, made.again.loss.high, color=GREY, alpha=0.18, linewidth=0, label="A/A, 95 %")
    axes.axvline(0, color=GREY, linewidth=1)
    for row, arm in enumerate(others):
        of = arm.against
        if of is not None and of.loss is not None:
            ends = [end if math.isfinite(end) else of.loss.median for end in (of.loss.low, of.loss.high)]
            whiskers = [[of.loss.median - ends[0]], [ends[1] - of.loss.median]]
            filled = INK if of.verdict else "white"
            style: dict[str, Any] = {"fmt": "o", "color": INK, "markerfacecolor": filled, "capsize": 3, "markersize": 5}
            axes.errorbar(of.loss.median, row, xerr=whiskers, **style)
        if arm.sample.failed:
            axes.annotate(f"× {arm.sample.failed} of {arm.sample.runs} failed", (1.0, row), xycoords=axes.get_yaxis_transform(),
                          ha="right", va="bottom", fontsize=7, color=FAILED)  # fmt: skip
    axes.set_yticks(range(len(others)), [arm.name for arm in others])
    axes.set_ylim(len(others) - 0.5, -0.5)
    axes.set_xscale("symlog", linthresh=LINEAR)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    said = f"loss − that of {made.baseline}, nats per token, 95 %; linear to {LINEAR}. Filled: different. Grey: A/A"
    axes.set_xlabel(said, fontsize=8)
    bare(axes, "x")
    finish(figure, "Each arm at its best rate, against the baseline", footer, path)


def rates(study: Study, found: Found, made: Report, path: Path, footer: str) -> None:
    """The last validation loss of every run that chose a rate, and a line through the medians over seeds. A run that failed is
    a cross at the top, and no point of the line."""
    figure, axes = pyplot.subplots(figsize=(8, 4.6))
    ended = {arm.name: found.of(arm.name, SEARCH) or found.of(arm.name, FRESH) for arm in made.arms}
    losses = [run.last for of in ended.values() for run in of if not found.failed(run)]
    top = min(max(losses, default=1.0), min(losses, default=0.0) + study.cfg.compare.diverged)
    entries = {}
    for number, arm in enumerate(made.arms):
        style, moved = look(number), 1.03 ** (number - len(made.arms) / 2)
        failed = [run.rate * moved for run in ended[arm.name] if found.failed(run)]
        axes.plot(failed, [1.02 * top] * len(failed), color=style["color"], marker="x", linestyle="none", markersize=5)
        trained = [run for run in ended[arm.name] if not found.failed(run)]
        shown = [min(run.last, top) for run in trained]
        axes.plot([run.rate * moved for run in trained], shown, **style | {"linestyle": "none", "alpha": 0.6})
        medians = {rate: min(loss, top) for rate, loss in found.rates(arm.name).items() if math.isfinite(loss)}
        [entries[arm.name]] = axes.plot([rate * moved for rate in medians], list(medians.values()), **style | {"markersize": 6})
    axes.set(xscale="log", xlabel="learning rate", ylabel="last validation loss, nats per token")
    axes.set_xticks(study.rates, [f"{rate:g}" for rate in study.rates])
    bare(axes)
    legend_below(figure, entries)
    finish(figure, f"Loss against learning rate; ×: the run failed; losses above {top:.2f} are drawn there", footer, path)


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
