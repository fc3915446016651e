"""Pictures of a study: loss against learning rate, and what the probes saw along the depth."""

from pathlib import Path
from statistics import fmean

from measure.plots import GREY, INK, bare, finish, legend_below, look, pyplot, ticker
from study.analysis import Report
from study.arms import Study
from study.runs import Found

PROBED = {"rms": "RMS of the stream", "most": "max |r|", "logit": "largest attention logit", "saturated": "saturated share"}


def rates(study: Study, found: Found, made: Report, path: Path, footer: str) -> None:
    """The last validation loss of every run, and a line through the means of each arm. Diverged runs stand at the top."""
    figure, axes = pyplot.subplots(figsize=(8, 4.6))
    losses = [run.counted for run in found.results]
    top = min(max(losses), min(losses) + study.cfg.compare.diverged)
    entries = {}
    for number, arm in enumerate(made.arms):
        places = [rate * 1.03 ** (number - len(made.arms) / 2) for rate in study.rates]
        shown = [[min(run.counted, top) for run in found.at(arm.name, rate)] for rate in study.rates]
        axes.plot(places, shown, **look(number) | {"linestyle": "none", "alpha": 0.6})
        [entries[arm.name]] = axes.plot(places, [fmean(of) for of in shown], **look(number) | {"markersize": 6})
    axes.set(xscale="log", xlabel="learning rate", ylabel="last validation loss, nats per token")
    axes.set_xticks(study.rates, [f"{rate:g}" for rate in study.rates])
    bare(axes)
    legend_below(figure, entries)
    title = f"Loss against learning rate, {len(study.seeds)} seeds; losses above {top:.2f} are drawn there"
    finish(figure, title, footer, path)


def depth(found: Found, made: Report, path: Path, footer: str) -> bool:
    """Arms as rows, norm sites as x: what the last probe of the first seed saw at the arm's best rate. False without probes."""
    last = {arm.name: run.probes[-1] for arm in made.arms if (run := found.at(arm.name, arm.rate)[0]).probes}
    columns = [key for key in PROBED if any(key in probe for probe in last.values())]
    if not columns:
        return False
    size = (2.6 * len(columns) + 1, 1.1 * len(last) + 1.2)
    figure, grid = pyplot.subplots(len(last), len(columns), figsize=size, sharex="col", sharey="col", squeeze=False)
    for row, (name, seen) in zip(grid, last.items(), strict=True):
        for axes, key in zip(row, columns, strict=True):
            if key in seen:
                axes.plot(seen[key], color=INK, marker=".", linewidth=1.2)
            else:
                axes.text(0.5, 0.5, "none", color=GREY, fontsize=7, ha="center", transform=axes.transAxes)
            if key in ("rms", "most"):
                axes.set_yscale("log")
            axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
            bare(axes)
        row[0].set_ylabel("\n".join(name.split()), fontsize=6, rotation=0, ha="right", va="center")
    for above, below, key in zip(grid[0], grid[-1], columns, strict=True):
        above.set_title(PROBED[key], fontsize=8)
        below.set_xlabel("layer" if key == "logit" else "norm site", fontsize=8)
    finish(figure, "Along the depth, at the end of training and at each arm's best rate", footer, path)
    return True
