"""The report of a study: report.md, report.json and pictures, all from the same figures."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from measure import tables
from measure.differences import Difference, Sample
from measure.files import json_text, replace_text
from measure.sources import code
from measure.statistics import Interval
from measure.tables import NOTHING, interval_text, number
from study import plots
from study.analysis import ArmReport, Report
from study.arms import Study
from study.runs import RACE, SEARCH, Found

Row = dict[str, str]  # cells by the heading of their column


def write(made: Report, study: Study, found: Found, facts: dict[str, Any], folder: Path) -> None:
    """
    Raises:
        StorageError: a file can't be written.
    """
    footer = tables.machine(facts)
    plots.differences(made, folder / "differences.png", footer)
    plots.rates(study, found, made, folder / "rates.png", footer)
    pictures = "![differences from the baseline](differences.png)\n\n![loss against learning rate](rates.png)"
    if plots.depth(found, made, folder / "depth.png", footer):
        pictures += "\n\n![along the depth](depth.png)"
    text = tables.document(
        "Study",
        *(tables.wrapped(f"{name.capitalize()}: {text}") for name, text in study.words.items()),
        tables.wrapped(words(made)),
        pictures,
        tables.markdown(*table(made)),
        tables.section("Every pair", _markdown(_pairs(made)) if made.pairs else ""),
        tables.section("Time", _markdown([_time(made, arm) for arm in made.arms]) if found.times else ""),
        tables.section("All runs of the search", _runs(found, [arm.name for arm in study.arms])),
        tables.section("Environment", tables.environment(facts)),
    )
    replace_text(folder / "report.md", text)
    pairs = [{"arm": arm, "base": base, **asdict(of)} for (arm, base), of in made.pairs.items()]
    told = {"command": facts.get("command"), "environment": facts, "code": code(), "table": table(made)}
    data = {**told, "report": asdict(made) | {"pairs": pairs}, **asdict(found)}
    replace_text(folder / "report.json", json_text(data, indent=1) + "\n")


def words(made: Report) -> str:
    """What was found, and what was not."""
    base = next(arm for arm in made.arms if arm.name == made.baseline)
    alone = f", which {base.failing}" if base.failing else ""
    at = "its best learning rate" if made.tuned else "the one learning rate that was given, so none is tuned"
    said = [f"{made.runs} runs; each arm at {at}; the baseline is {made.baseline}{alone}."]
    said += [f"{arm.name}: {finding(arm, base)}{_step(arm)}." for arm in made.arms if arm.against]
    if made.again and made.again.loss:
        said.append(f"The baseline with other seeds (A/A) differs by {interval_text(made.again.loss, 4)} nats.")
    if not made.fresh:
        said.append(
            "The seeds that are compared have chosen the rates, so nothing is called different: compare.fresh=8 adds others."
        )
    elif base.sample.runs == 2:
        said.append("One seed has no interval, so no loss can be called different.")
    if edges := [f"{arm.name} ({arm.at_end})" for arm in made.arms if arm.at_end]:
        said.append(f"Not tuned, as the best rate is at the end of those that were trained: {', '.join(edges)}. Add rates.")
    if failed := [f"{arm.name} ({arm.searched[0]} of {arm.searched[1]})" for arm in made.arms if arm.searched[0]]:
        said.append(f"Runs of the search that failed, at any rate: {', '.join(failed)}.")
    return " ".join(said)


def finding(arm: ArmReport, base: ArmReport) -> str:
    """What may be said of the difference from the baseline."""
    of, said = arm.against, []
    assert of is not None
    if of.p_failed is not None:
        said.append(arm.failing or f"no run of {arm.sample.runs} fails")
        said[-1] += f" (baseline {base.sample.failed} of {base.sample.runs}; exact test, p {_p(of.p_failed)})"
        said[-1] += ", which differs" if of.fails else ""
    if of.loss is None:
        said += ["every run failed"] if not arm.sample.losses else ["too few runs that trained for an interval of the loss"]
        return "; ".join(said)
    figures = f"{bounded(of.loss)} nats" + (f", p {_p(of.p_loss)}" if of.p_loss is not None else "")
    trained = "of the runs that trained the " if of.p_failed is not None else ""
    if of.verdict:
        said.append(f"{trained}loss {of.verdict}, {figures}")
    elif of.none:
        beyond = "" if of.loss.holds(0.0) else ": of so many tests one may be as far by chance"
        said.append(f"no difference was found, {figures}{beyond}")
    else:
        said.append(f"{trained}loss differs by {figures}, {'not judged' if of.p_loss is None else 'which is not called one'}")
    return "; ".join(said)


def bounded(of: Interval) -> str:
    """0.010 (0.001 to 0.019). An arm that is not tuned may gain without a bound."""
    low, high = math.isfinite(of.low), math.isfinite(of.high)
    if low and high:
        return interval_text(of, 4)
    end = f"at most {of.high:.4f}" if high else f"at least {of.low:.4f}" if low else "no bound"
    return f"{of.median:.4f} ({end})".replace("-", "−")


def _step(arm: ArmReport) -> str:
    if arm.price.of_baseline is None:
        return ""
    times = interval_text(arm.price.of_baseline)
    return f"; a step takes {times} × its time" if arm.slower else f"; no difference in the time of a step was found, {times} ×"


def _p(p: float | None) -> str:
    return NOTHING if p is None else "< 0.001" if p < 1e-3 else f"= {p:.2g}"


def table(made: Report) -> tuple[list[str], list[list[str]]]:
    """The main table: its header, and a line for each arm."""
    return tables.columns([_main(arm) for arm in made.arms])


def _markdown(rows: list[Row]) -> str:
    return tables.markdown(*tables.columns(rows))


def _main(arm: ArmReport) -> Row:
    return {
        "arm": arm.name,
        "best rate": f"{arm.rate:g}" + (f" ({arm.at_end})" if arm.at_end else ""),
        "runs": str(arm.sample.runs),
        "failed": str(arm.sample.failed),
        "last loss": _mean(arm.sample),
        **_judged(arm.against),
        "a better rate gains at most": f"{arm.sample.cost:.4f}" if 0.0 < arm.sample.cost < math.inf else NOTHING,
        "sensitivity": interval_text(arm.sensitivity),
    }


def _mean(sample: Sample) -> str:
    return f"{fmean(sample.losses):.4f}" if sample.losses else NOTHING


def _judged(of: Difference | None) -> Row:
    if of is None:
        return {"− baseline (95 %)": "baseline", "p": NOTHING, "different": NOTHING}
    said = [*([of.verdict] if of.verdict else []), *(["fails"] if of.fails else [])]
    return {
        "− baseline (95 %)": bounded(of.loss) if of.loss else NOTHING,
        "p": _p(min((p for p in (of.p_loss, of.p_failed) if p is not None), default=None)).removeprefix("= "),
        "different": ", ".join(said) or ("no" if of.none else NOTHING),
    }


def _pairs(made: Report) -> list[Row]:
    cells = ({"pair": f"{arm} − {base}"} | _judged(of) for (arm, base), of in made.pairs.items())
    return [{name.replace("− baseline ", "nats "): cell for name, cell in row.items()} for row in cells]


def _time(made: Report, arm: ArmReport) -> Row:
    """Step times, with PyTorch's norms too, and what is learned in the same time."""
    base = arm.name == made.baseline
    row = {
        "arm": arm.name,
        **{f"{impl}, ms": number(ms) for impl, ms in arm.price.ms.items()},
        "torch / own (95 %)": interval_text(arm.price.over_torch),
        "A/A (95 %)": interval_text(arm.price.again),
        "× the baseline's (95 %)": "baseline" if base else interval_text(arm.price.of_baseline),
        "differs": NOTHING if base or arm.price.of_baseline is None else "yes" if arm.slower else "no",
        **({"steps in equal time": str(arm.steps)} if arm.steps is not None else {}),
    }
    if arm.equal_time:
        sample, against = arm.equal_time
        row |= {"loss then": _mean(sample)} | {f"then {name}": cell for name, cell in _judged(against).items()}
    return row


def _runs(found: Found, names: Sequence[str]) -> str:
    """The last loss of every run that chose the rates, and the spikes and gradient norms of each arm; of one rate nothing."""
    rates = sorted({run.rate for name in names for run in found.of(name, RACE, SEARCH)})

    def losses(name: str, rate: float) -> str:
        ended = found.of(name, SEARCH, rate=rate)
        runs = ended or found.of(name, RACE, rate=rate)
        said = [f"{run.last:.3f}" + "*" * found.failed(run) for run in runs]
        return " / ".join(said) + "°" * bool(runs and not ended) or NOTHING

    def row(name: str) -> Row:
        runs = found.of(name, SEARCH)
        norms = [run.grad_norm for run in runs if run.grad_norm is not None]
        return {
            "arm (* failed, ° at the end of the race)": name,
            **{f"{rate:g}": losses(name, rate) for rate in rates},
            "spikes": str(sum(run.spikes for run in runs)),
            "gradient norm": f"{fmean(norms):.2f}" if norms else NOTHING,
        }

    return _markdown([row(name) for name in names]) if rates else ""
