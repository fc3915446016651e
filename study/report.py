"""The report of a study: report.md, report.json and pictures, all from the same figures."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from measure import tables
from measure.differences import Difference
from measure.tables import NOTHING, interval_text, number
from study import plots
from study.analysis import ArmReport, Report
from study.arms import Arm, Study
from study.runs import RACE, SEARCH, Found, finite
from training.storage import replace_text

Row = dict[str, str]  # cells by the heading of their column


def write(made: Report, study: Study, found: Found, facts: dict[str, Any], folder: Path, *more: str) -> None:
    """
    Args:
        more: sections of the report, in Markdown.

    Raises:
        StorageError or OSError: a file can't be written.
    """
    footer = tables.machine(facts)
    plots.differences(made, folder / "differences.png", footer)
    plots.rates(study, found, made, folder / "rates.png", footer)
    pictures = "![differences from the baseline](differences.png)\n\n![loss against learning rate](rates.png)"
    if plots.depth(found, made, folder / "depth.png", footer):
        pictures += "\n\n![along the depth](depth.png)"
    parts = [
        "# Study",
        *(tables.wrapped(f"{name.capitalize()}: {text}") for name, text in study.words.items()),
        tables.wrapped(words(made, study)),
        *more,
        pictures,
        tables.markdown(*table(made)),
        *([tables.section("Every pair", _markdown(_pairs(made)))] if made.pairs else []),
        *([tables.section("Time", _markdown([_time(made, arm) for arm in made.arms]))] if found.times else []),
        tables.section("All runs of the search", _markdown([_runs(found, arm) for arm in study.arms])),
        tables.section("Environment", tables.environment(facts)),
    ]
    replace_text(folder / "report.md", "\n\n".join(parts) + "\n")
    pairs = [{"arm": arm, "base": base, **asdict(of)} for (arm, base), of in made.pairs.items()]
    data = {"report": asdict(made) | {"pairs": pairs}, "environment": facts, **asdict(found)}
    replace_text(folder / "report.json", json.dumps(finite(data), indent=1, allow_nan=False) + "\n")


def words(made: Report, study: Study) -> str:
    """What was found, and what was not."""
    base = next(arm for arm in made.arms if arm.name == made.baseline)
    alone = f", {base.failing}" if base.failing else ""
    said = [f"{made.runs} runs; each arm at its best learning rate; the baseline is {made.baseline}{alone}."]
    said += [f"{arm.name}: {finding(arm, base)}{_step(arm)}." for arm in made.arms if arm.name != made.baseline]
    if made.again and made.again.loss:
        said.append(f"The baseline with other seeds (A/A) differs by {interval_text(made.again.loss, 4)} nats.")
    if made.chosen_by_same:
        said.append("The seeds that are compared have chosen the rates too; the intervals allow for that.")
    if edges := [f"{arm.name} ({arm.at_end})" for arm in made.arms if arm.at_end]:
        said.append(f"Not tuned, as the best rate is at the end of those that were trained: {', '.join(edges)}. Add rates.")
    if failed := [f"{arm.name} ({arm.failed[0]} of {arm.failed[1]})" for arm in made.arms if arm.failed[0]]:
        said.append(f"Runs of the search that failed, at any rate: {', '.join(failed)}.")
    return " ".join(said)


def finding(arm: ArmReport, base: ArmReport) -> str:
    """What may be said of the difference from the baseline."""
    of = arm.against
    assert of is not None
    said = []
    if of.p_failed is not None:
        said.append(arm.failing or f"no run of {len(arm.sample.losses)} fails")
        said[-1] += f" (baseline {base.sample.failed} of {base.sample.runs}"
        said[-1] += f"; exact test, p = {_p(of.p_failed)})" + (", which differs" if of.fails else "")
    if of.loss is None:
        return "; ".join([*said, "too few runs that trained for an interval of their loss"])
    if of.lower or of.higher:
        said.append("loss lower" if of.lower else "loss higher")
    else:
        said.append("no difference was found" if of.none else "between the runs that trained no difference of loss was found")
    bound = ", a bound: one of the two is not tuned" if arm.at_end or base.at_end else ""
    said[-1] += f", {interval_text(of.loss, 4)} nats, p = {_p(of.p_loss)}{bound}"
    if of.none and not of.loss.holds(0.0):
        said[-1] += ": of so many arms one may be as far by chance"
    return "; ".join(said)


def _step(arm: ArmReport) -> str:
    if arm.price.of_baseline is None:
        return ""
    times = interval_text(arm.price.of_baseline)
    return f"; a step takes {times} × its time" if arm.slower else f"; no difference in the time of a step was found, {times} ×"


def _p(p: float | None) -> str:
    return NOTHING if p is None else "below 0.0001" if p < 1e-4 else f"{p:.2g}"


def table(made: Report) -> tuple[list[str], list[list[str]]]:
    """The main table: its header, and a line for each arm."""
    return _columns([_main(made, arm) for arm in made.arms])


def _columns(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    columns = list(dict.fromkeys(column for row in sorted(rows, key=len, reverse=True) for column in row))
    return columns, [[row.get(column, NOTHING) for column in columns] for row in rows]


def _markdown(rows: list[Row]) -> str:
    return tables.markdown(*_columns(rows))


def _main(made: Report, arm: ArmReport) -> Row:
    return {
        "arm": arm.name,
        "best rate": f"{arm.rate:g}" + (f" ({arm.at_end})" if arm.at_end else ""),
        "runs": str(arm.sample.runs),
        "failed": str(arm.sample.failed),
        "last loss": f"{arm.last.median:.4f}" if arm.last else NOTHING,
        **(
            {"− baseline (95 %)": "baseline", "p": NOTHING, "different": NOTHING}
            if arm.against is None
            else _judged(arm.against)
        ),
        "rate error": f"{arm.sample.error:.4f}",
        "sensitivity": interval_text(arm.sensitivity),
    }


def _judged(of: Difference) -> Row:
    loss = "lower" if of.lower else "higher" if of.higher else "no" if of.none else NOTHING
    p = min((one for one in (of.p_loss, of.p_failed) if one is not None), default=None)
    return {
        "− baseline (95 %)": interval_text(of.loss, 4),
        "p": _p(p),
        "different": ", ".join([*([loss] if loss != NOTHING or not of.fails else []), *(["fails"] if of.fails else [])]),
    }


def _pairs(made: Report) -> list[Row]:
    return [
        {"pair": f"{arm} − {base}"} | {name.replace("− baseline ", "nats "): cell for name, cell in _judged(of).items()}
        for (arm, base), of in made.pairs.items()
    ]


def _time(made: Report, arm: ArmReport) -> Row:
    """Step times, with PyTorch's norms too, and what is learned in the same time."""
    timed, base = arm.at_equal_time, arm.name == made.baseline
    return {
        "arm": arm.name,
        **{f"{impl}, ms": number(ms) for impl, ms in arm.price.ms.items()},
        "torch / own (95 %)": interval_text(arm.price.over_torch),
        "A/A (95 %)": interval_text(arm.price.again),
        "× the baseline's (95 %)": "baseline" if base else interval_text(arm.price.of_baseline),
        "differs": NOTHING if base or arm.price.of_baseline is None else "yes" if arm.slower else "no",
        **({"steps in equal time": str(timed[0])} if timed else {}),
        **({"loss then": f"{fmean(timed[1].losses):.4f}"} if timed and timed[1].losses else {}),
        **({f"then {name}": cell for name, cell in _judged(arm.equal_time).items()} if arm.equal_time else {}),
    }


def _runs(found: Found, arm: Arm) -> Row:
    """The last loss of every run that chose the rate, and the spikes and gradient norms of the arm. * failed, ° raced"""
    runs, rates = found.of(arm.name, SEARCH), sorted({run.rate for run in found.of(arm.name, RACE, SEARCH)})

    def losses(rate: float) -> str:
        ended = found.at(arm.name, rate)
        said = [f"{run.last:.3f}" + "*" * found.failed(run) for run in ended or found.at(arm.name, rate, RACE)]
        return " / ".join(said) + ("" if ended else "°")

    norms = [run.grad_norm for run in runs if run.grad_norm is not None and math.isfinite(run.grad_norm)]
    return {
        "arm (* failed, ° at the end of the race)": arm.name,
        **{f"{rate:g}": losses(rate) for rate in rates},
        "spikes": str(sum(run.spikes for run in runs)),
        "gradient norm": f"{fmean(norms):.2f}" if norms else NOTHING,
    }
