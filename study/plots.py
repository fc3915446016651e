"""Pictures of a study: loss against learning rate, and what the probes saw along the depth."""

from pathlib import Path
from statistics import fmean

from measure.plots import GREY, bare, finish, legend_below, pyplot, ticker
from study.analysis import Report, at_rate
from study.arms import Study
from study.runs import Found

COLORS = ["#111827", "#3b82f6", "#c2410c", "#0f8a6d", "#7c3aed", "#b58900", "#78716c", "#db2777"]
LOOKS = list(zip(COLORS, "os^DvPX*", strict=True))


def rates(study: Study, found: Found, made: Report, path: Path, footer: str) -> None:
    """The last validation loss of every run, and a line through the means of each arm. Diverged runs stand at the top."""
    figure, axes = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    runs = [run for run in found.results if run.arm in {arm.name for arm in study.arms}]
    low = min(run.last for run in runs if run.last == run.last)
    top = max(min(run.last, low + study.cfg.compare.diverged) if run.last == run.last else low for run in runs)
    entries = {}
    for number, arm in enumerate(made.arms):
        color, marker = LOOKS[number % len(LOOKS)]
        nudge = 1.03 ** (number - len(made.arms) / 2)
        means = []
        for rate in study.rates:
            of = at_rate(found, arm.name, rate)
            shown = [min(run.last, top) if run.last == run.last else top for run in of]
            axes.plot([rate * nudge] * len(of), shown, marker, color=color, markersize=4, alpha=0.6, linestyle="none")
            means.append(fmean(shown))
        [entries[arm.name]] = axes.plot(
            [rate * nudge for rate in study.rates], means, color=color, marker=marker, linewidth=1.4
        )
    axes.set(xscale="log", xlabel="learning rate", ylabel="last validation loss, nats per token")
    axes.set_xticks(study.rates, [f"{rate:g}" for rate in study.rates])
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    bare(axes)
    legend_below(figure, entries)
    title = f"Loss against learning rate, {len(study.seeds)} seeds; losses above {top:.2f} are drawn there"
    finish(figure, title, footer, path)


def depth(study: Study, found: Found, made: Report, path: Path, footer: str) -> bool:
    """Arms as rows, norm sites as x: what the last probe of the first seed saw at the arm's best rate. False without probes."""
    last = {arm.name: run.probes[-1] for arm in made.arms if (run := at_rate(found, arm.name, arm.rate)[0]).probes}
    if not last:
        return False
    columns = {
        "rms": "RMS of the stream",
        "most": "max |r|",
        "logit": "largest attention logit",
        "saturated": "saturated share",
    }
    columns = {key: words for key, words in columns.items() if any(key in probe for probe in last.values())}
    size = (2.6 * len(columns) + 1, 1.1 * len(last) + 1.2)
    figure, grid = pyplot.subplots(
        len(last), len(columns), figsize=size, layout="constrained", sharex="col", sharey="col", squeeze=False
    )
    for row, (name, seen) in zip(grid, last.items(), strict=True):
        for axes, key in zip(row, columns, strict=True):
            if key in seen:
                axes.plot(range(len(seen[key])), seen[key], color=LOOKS[0][0], marker=".", linewidth=1.2)
            else:
                axes.text(0.5, 0.5, "none", color=GREY, fontsize=7, ha="center", transform=axes.transAxes)
            bare(axes)
            if key in ("rms", "most"):
                axes.set_yscale("log")
                axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        row[0].set_ylabel("\n".join(name.split()), fontsize=6, rotation=0, ha="right", va="center")
    for axes, words in zip(grid[0], columns.values(), strict=True):
        axes.set_title(words, fontsize=8)
    for axes, key in zip(grid[-1], columns, strict=True):
        axes.set_xlabel("layer" if key == "logit" else "norm site", fontsize=8)
    finish(figure, "Along the depth, at the end of training and at each arm's best rate", footer, path)
    return True
