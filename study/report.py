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
from study.analysis import ArmReport, Report, at_rate
from study.arms import Study
from study.runs import Found
from training.storage import replace_text

HEADER = ["arm", "best rate", "last loss", "− baseline (95 %)", "different", "steps saved", "sensitivity", "diverged"]


def write(made: Report, study: Study, found: Found, facts: dict[str, Any], folder: Path) -> None:
    """Raises StorageError: a file can't be written."""
    footer = tables.machine(facts)
    plots.rates(study, found, made, folder / "rates.png", footer)
    pictures = "![loss against learning rate](rates.png)"
    if plots.depth(study, found, made, folder / "depth.png", footer):
        pictures += "\n\n![along the depth](depth.png)"
    parts = [
        "# Study",
        *(tables.wrapped(f"{name.capitalize()}: {text}") for name, text in study.words.items()),
        tables.wrapped(words(made, len(study.seeds))),
        pictures,
        tables.markdown(HEADER, [row(arm) for arm in made.arms]),
        tables.section("Best checkpoint", tables.markdown(*_best(made))),
        tables.section("Time", tables.markdown(*_times(made)) if any(arm.price.ms for arm in made.arms) else ""),
        tables.section("All runs", tables.markdown(*_runs(study, found))),
        tables.section("Environment", tables.environment(facts)),
    ]
    replace_text(folder / "report.md", "\n\n".join(parts) + "\n")
    data = {
        "report": asdict(made),
        "environment": facts,
        "results": [asdict(run) for run in found.results],
        "times": found.times,
    }
    replace_text(folder / "report.json", json.dumps(data, indent=1) + "\n")


def words(made: Report, seeds: int) -> str:
    """What was found, and what was not."""
    others = [arm for arm in made.arms if arm.difference is not None]
    said = [f"{made.runs} runs; each arm at its best learning rate, {seeds} seeds; the baseline is {made.baseline}."]
    for arm in others:
        assert arm.difference is not None
        if arm.different:
            side = "lower" if arm.difference.median < 0 else "higher"
            said.append(f"{arm.name}: loss {side} by {interval_text(_abs(arm), 4)} nats.")
        else:
            said.append(f"{arm.name}: no difference was found; the interval is {interval_text(arm.difference, 4)} nats.")
        if arm.price.of_baseline:
            said[-1] = f"{said[-1][:-1]}; a step takes {interval_text(arm.price.of_baseline)} × the baseline's time."
    if seeds == 1:
        said.append("One seed has no interval, so nothing can be called different.")
    said.append(f"The baseline with other seeds (A/A) differs by {interval_text(made.again, 4)} nats.")
    if failed := [f"{arm.name} ({arm.diverged:.0%})" for arm in made.arms if arm.diverged]:
        said.append(f"Runs that diverged: {', '.join(failed)}.")
    return " ".join(said)


def _abs(arm: ArmReport) -> Any:
    found = arm.difference
    assert found is not None
    low, high = sorted((abs(found.low), abs(found.high)))
    return type(found)(abs(found.median), low, high)


def row(arm: ArmReport) -> list[str]:
    return [
        arm.name,
        f"{arm.rate:g}",
        f"{arm.last.median:.4f}",
        _against_baseline(arm.difference),
        NOTHING if arm.difference is None else "yes" if arm.different else "no",
        interval_text(arm.speedup, 2) if arm.speedup else NOTHING,
        interval_text(arm.sensitivity),
        f"{arm.diverged:.0%}",
    ]


def summary(made: Report) -> str:
    """For the terminal."""
    return tables.aligned(HEADER, [row(arm) for arm in made.arms])


def _best(made: Report) -> tuple[list[str], list[list[str]]]:
    lines = [[arm.name, f"{arm.best.median:.4f}", _against_baseline(arm.best_difference)] for arm in made.arms]
    return ["arm", "best loss", "− baseline (95 %)"], lines


def _times(made: Report) -> tuple[list[str], list[list[str]]]:
    """Step times of each arm, with PyTorch's norms too, and what is learned in the same time."""
    impls = list(dict.fromkeys(impl for arm in made.arms for impl in arm.price.ms if impl != TORCH_AGAIN))
    ratios = ["torch / own (95 %)", "A/A (95 %)", "× the baseline's (95 %)"]
    lines = []
    for arm in made.arms:
        price = arm.price
        cells = [number(price.ms[impl]) if impl in price.ms else NOTHING for impl in impls]
        ratios_of = (price.over_torch, price.again, price.of_baseline if arm.name != made.baseline else None)
        cells += [interval_text(one) if one else NOTHING for one in ratios_of]
        cells += [f"{arm.equal_time.median:.4f}" if arm.equal_time else NOTHING]
        lines.append([arm.name, *cells, _against_baseline(arm.equal_time_difference) if arm.equal_time else NOTHING])
    return ["arm", *(f"{impl}, ms" for impl in impls), *ratios, "loss at equal GPU time", "− baseline (95 %)"], lines


def _against_baseline(difference: Interval | None) -> str:
    return interval_text(difference, 4) if difference else "baseline"


def _runs(study: Study, found: Found) -> tuple[list[str], list[list[str]]]:
    """The last loss of every run, and the spikes and gradient norms of the arm."""
    lines = []
    for arm in study.arms:
        runs = [at_rate(found, arm.name, rate) for rate in study.rates]
        cells = [" / ".join(f"{run.last:.3f}" + "*" * bool(run.over) for run in of) for of in runs]
        flat = found.of(arm.name)
        lines.append([arm.name, *cells, str(sum(run.spikes for run in flat)), f"{fmean(run.grad_norm for run in flat):.2f}"])
    return ["arm (* stopped early)", *(f"{rate:g}" for rate in study.rates), "spikes", "gradient norm"], lines
