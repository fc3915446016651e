"""The report of a study: report.md, report.json and pictures, all from the same figures."""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from measure import tables
from measure.comparison import AGAIN as TORCH_AGAIN
from measure.files import replace_text
from measure.statistics import Interval
from measure.tables import NOTHING, interval_text, number
from study import plots
from study.analysis import ArmReport, Report, reach
from study.arms import Arm, Study
from study.runs import Found

Row = dict[str, str]  # cells by the heading of their column


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
        tables.markdown(*table(made)),
        tables.section("Best checkpoint", _markdown([_best(made, arm) for arm in made.arms])),
        *([tables.section("Time", _markdown([_time(made, arm) for arm in made.arms]))] if found.times else []),
        tables.section("All runs", _markdown([_runs(study, found, arm) for arm in study.arms])),
        tables.section("Environment", tables.environment(facts)),
    ]
    replace_text(folder / "report.md", "\n\n".join(parts) + "\n")
    data = {"report": asdict(made), "environment": facts, **asdict(found)}
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


def table(made: Report) -> tuple[list[str], list[list[str]]]:
    """The main table: its header, and a line for each arm."""
    found = [_main(made, arm) for arm in made.arms]
    return list(found[0]), [list(row.values()) for row in found]


def _markdown(rows: list[Row]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return tables.markdown(columns, [[row.get(column, NOTHING) for column in columns] for row in rows])


def _main(made: Report, arm: ArmReport) -> Row:
    return {
        "arm": arm.name,
        "best rate": f"{arm.rate:g}",
        "last loss": f"{arm.last.median:.4f}",
        "− baseline (95 %)": _against_baseline(made, arm, arm.difference),
        "different": NOTHING if arm.name == made.baseline else "yes" if arm.different else "no",
        "steps saved": _against_baseline(made, arm, arm.speedup, 2),
        "sensitivity": interval_text(arm.sensitivity),
        "diverged": f"{arm.diverged:.0%}",
    }


def _best(made: Report, arm: ArmReport) -> Row:
    difference = _against_baseline(made, arm, arm.best_difference)
    return {"arm": arm.name, "best loss": f"{arm.best.median:.4f}", "− baseline (95 %)": difference}


def _time(made: Report, arm: ArmReport) -> Row:
    """Step times, with PyTorch's norms too, and what is learned in the same time."""
    return {
        "arm": arm.name,
        **{f"{impl}, ms": number(ms) for impl, ms in arm.price.ms.items() if impl != TORCH_AGAIN},
        "torch / own (95 %)": interval_text(arm.price.over_torch),
        "A/A (95 %)": interval_text(arm.price.again),
        "× the baseline's (95 %)": _against_baseline(made, arm, arm.price.of_baseline, 3),
        "loss at equal GPU time": f"{arm.equal_time.median:.4f}" if arm.equal_time else NOTHING,
        "− baseline (95 %)": _against_baseline(made, arm, arm.equal_time_difference),
    }


def _against_baseline(made: Report, arm: ArmReport, interval: Interval | None, digits: int = 4) -> str:
    return "baseline" if arm.name == made.baseline else interval_text(interval, digits)


def _runs(study: Study, found: Found, arm: Arm) -> Row:
    """The last loss of every run, and the spikes and gradient norms of the arm."""
    runs = found.of(arm.name)
    return {
        "arm (* stopped early)": arm.name,
        **{
            f"{rate:g}": " / ".join(f"{run.last:.3f}" + "*" * bool(run.over) for run in found.at(arm.name, rate))
            for rate in study.rates
        },
        "spikes": str(sum(run.spikes for run in runs)),
        "gradient norm": f"{fmean(run.grad_norm for run in runs):.2f}",
    }
