"""The report of a study: report.md, report.json and pictures, all from the same figures."""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from measure import tables
from measure.comparison import AGAIN as TORCH_AGAIN
from measure.statistics import Interval
from measure.tables import NOTHING, interval_text, number
from study import plots
from study.analysis import ArmReport, Report, at_rate, reach
from study.arms import Study
from study.runs import Found
from training.storage import replace_text

HEADER = ["arm", "best rate", "last loss", "− baseline (95 %)", "different", "steps saved", "sensitivity", "diverged"]

Table = tuple[list[str], list[list[str]]]


def write(made: Report, study: Study, found: Found, facts: dict[str, Any], folder: Path) -> None:
    """Raises StorageError: a file can't be written."""
    footer = tables.machine(facts)
    plots.rates(study, found, made, folder / "rates.png", footer)
    pictures = "![loss against learning rate](rates.png)"
    if plots.depth(found, made, folder / "depth.png", footer):
        pictures += "\n\n![along the depth](depth.png)"
    parts = [
        "# Study",
        *(tables.wrapped(f"{name.capitalize()}: {text}") for name, text in study.words.items()),
        tables.wrapped(words(made, study)),
        pictures,
        tables.markdown(HEADER, rows(made)),
        tables.section("Best checkpoint", tables.markdown(*_best(made))),
        *([tables.section("Time", tables.markdown(*_times(made)))] if found.times else []),
        tables.section("All runs", tables.markdown(*_runs(study, found))),
        tables.section("Environment", tables.environment(facts)),
    ]
    replace_text(folder / "report.md", "\n\n".join(parts) + "\n")
    results = [asdict(run) for run in found.results]
    data = {"report": asdict(made), "environment": facts, "results": results, "times": found.times}
    replace_text(folder / "report.json", json.dumps(data, indent=1) + "\n")


def words(made: Report, study: Study) -> str:
    """What was found, and what was not."""
    seeds = len(study.seeds)
    said = [f"{made.runs} runs; each arm at its best learning rate, {seeds} seeds; the baseline is {made.baseline}."]
    for arm in made.arms:
        if arm.name != made.baseline:
            time = f"; a step takes {interval_text(arm.price.of_baseline)} × its time" if arm.price.of_baseline else ""
            said.append(f"{arm.name}: {_finding(arm)}{time}.")
    again = f"The baseline with other seeds (A/A) differs by {interval_text(made.again, 4)} nats"
    if seeds == 1:
        said.append(f"{again}. One seed has no interval, so nothing can be called different.")
    else:
        said.append(f"{again}: no difference within ±{reach(made.again):.4f} is called one.")
    ends = {min(study.rates), max(study.rates)} if len(study.rates) > 1 else set()
    if edges := [arm.name for arm in made.arms if arm.rate in ends]:
        said.append(f"The best rate is the lowest or the highest of those given for {', '.join(edges)}: add rates beyond it.")
    if failed := [f"{arm.name} ({arm.diverged:.0%})" for arm in made.arms if arm.diverged]:
        said.append(f"Runs that diverged: {', '.join(failed)}.")
    return " ".join(said)


def _finding(arm: ArmReport) -> str:
    """The difference from the baseline, and what may be said of it."""
    if arm.different:
        said = "loss lower" if arm.difference.median < 0 else "loss higher"
    else:
        said = "no difference was found" + ("" if arm.difference.holds(0.0) else " beyond that of other seeds")
    said += f", {interval_text(arm.difference, 4)} nats"
    return f"{said}; {arm.diverged_at_best} runs at its best rate diverged" if arm.diverged_at_best else said


def rows(made: Report) -> list[list[str]]:
    """Of the main table, a line for each arm."""
    return [
        [
            arm.name,
            f"{arm.rate:g}",
            f"{arm.last.median:.4f}",
            _against_baseline(made, arm, arm.difference),
            NOTHING if arm.name == made.baseline else "yes" if arm.different else "no",
            _against_baseline(made, arm, arm.speedup, 2),
            interval_text(arm.sensitivity),
            f"{arm.diverged:.0%}",
        ]
        for arm in made.arms
    ]


def summary(made: Report) -> str:
    """For the terminal."""
    return tables.aligned(HEADER, rows(made))


def _best(made: Report) -> Table:
    lines = [[arm.name, f"{arm.best.median:.4f}", _against_baseline(made, arm, arm.best_difference)] for arm in made.arms]
    return ["arm", "best loss", "− baseline (95 %)"], lines


def _times(made: Report) -> Table:
    """Step times of each arm, with PyTorch's norms too, and what is learned in the same time."""
    impls = list(dict.fromkeys(impl for arm in made.arms for impl in arm.price.ms if impl != TORCH_AGAIN))
    lines = []
    for arm in made.arms:
        price = arm.price
        cells = [number(price.ms[impl]) if impl in price.ms else NOTHING for impl in impls]
        cells += [interval_text(ratio) if ratio else NOTHING for ratio in (price.over_torch, price.again)]
        cells += [_against_baseline(made, arm, price.of_baseline, 3)]
        cells += [f"{arm.equal_time.median:.4f}" if arm.equal_time else NOTHING]
        lines.append([arm.name, *cells, _against_baseline(made, arm, arm.equal_time_difference)])
    ratios = ["torch / own (95 %)", "A/A (95 %)", "× the baseline's (95 %)"]
    return ["arm", *(f"{impl}, ms" for impl in impls), *ratios, "loss at equal GPU time", "− baseline (95 %)"], lines


def _against_baseline(made: Report, arm: ArmReport, interval: Interval | None, digits: int = 4) -> str:
    if arm.name == made.baseline:
        return "baseline"
    return interval_text(interval, digits) if interval else NOTHING


def _runs(study: Study, found: Found) -> Table:
    """The last loss of every run, and the spikes and gradient norms of the arm."""
    lines = []
    for arm in study.arms:
        runs = [at_rate(found, arm.name, rate) for rate in study.rates]
        cells = [" / ".join(f"{run.last:.3f}" + "*" * bool(run.over) for run in of) for of in runs]
        flat = found.of(arm.name)
        lines.append([arm.name, *cells, str(sum(run.spikes for run in flat)), f"{fmean(run.grad_norm for run in flat):.2f}"])
    return ["arm (* stopped early)", *(f"{rate:g}" for rate in study.rates), "spikes", "gradient norm"], lines
