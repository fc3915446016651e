"""Does it hold at four times the size? The arms of a study at several sizes, with tokens in proportion.

rates      the smallest size searches the best rate of each arm. A larger one takes it times the smallest width over its own:
           the rule of µP (arXiv:2203.03466) for matrices under Adam. At the last but one size a run at twice and at half of it
           tells whether it held
losses     every size but the last has the seeds that are compared, the last one run
law        L = E + A·C^−α for each arm through all sizes but the last, C = 6 · parameters · tokens; it predicts the last
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from measure.scaling import predicted
from measure.statistics import Interval
from measure.tables import interval_text, markdown, wrapped
from model import GPT
from study import plan
from study.arms import Arm, Study
from study.runs import FRESH, SEARCH, Runs


@dataclass(frozen=True)
class Rung:
    """An arm at a size."""

    size: str
    parameters: int
    compute: float  # FLOPs of training
    rate: float
    losses: list[float]
    beside: dict[float, float]  # at other rates: loss − that of the same seed at `rate`


Climbed = dict[str, list[Rung]]  # by arm, the smallest first


def least_runs(studies: Sequence[Study]) -> int:
    """The runs of `climb` for the studies of all sizes, without those that the search of the first adds by what it finds."""
    first, *middle, _ = studies
    return plan.least_runs(first) + len(first.arms) * (sum(len(study.compared) for study in middle) + 1 + 2)


def climb(sizes: Mapping[str, Runs]) -> Climbed:
    """Makes all runs of sizes, the smallest first."""
    first, *others = sizes.values()
    plan.make_all(first.study, first.found, first.train)
    rates = {arm.name: first.found.best_rate(arm.name) for arm in first.study.arms}
    found = Climbed()
    for number, (size, runs) in enumerate(sizes.items()):
        for arm in runs.study.arms:
            rate = rates[arm.name]
            if runs is not first:
                rate = float(f"{rate * first.study.cfg.model.width / arm.cfg.model.width:.3g}")
                runs.train(arm, FRESH, [rate], runs.study.compared[: 1 if runs is others[-1] else None])
            if number == len(sizes) - 2:
                runs.train(arm, SEARCH, [rate / 2, rate * 2], runs.study.compared[:1])
            found.setdefault(arm.name, []).append(rung(size, runs, arm, rate))
    return found


def rung(size: str, runs: Runs, arm: Arm, rate: float) -> Rung:
    cfg, made = arm.cfg, runs.found.of(arm.name, FRESH, rate=rate)
    with torch.device("meta"):
        parameters = GPT(cfg.model, cfg.norm, runs.corpus.tokenizer.vocab_size, cfg.loss).parameter_count()
    compute = 6.0 * parameters * cfg.train.steps * cfg.train.batch_size * cfg.model.context
    others = runs.found.of(arm.name, SEARCH) if len(made) > 0 and rate / 2 in runs.found.rates(arm.name) else []
    beside = {run.rate: run.last - made[0].last for run in others if run.seed == made[0].seed}
    return Rung(size, parameters, compute, rate, list(runs.found.sample(made).losses), beside)


def prediction(rungs: list[Rung]) -> Interval | None:
    """Of the last size; None where runs failed at another one."""
    known = rungs[:-1]
    if not all(one.losses for one in known):
        return None
    return predicted([one.compute for one in known], [one.losses for one in known], rungs[-1].compute)


def report(found: Climbed) -> str:
    """In Markdown."""
    *_, before, last = (of.size for of in next(iter(found.values())))
    orders = {}
    for at, size in ((-2, before), (-1, last)):
        losses = {arm: fmean(rungs[at].losses) for arm, rungs in found.items() if rungs[at].losses}
        orders[size] = ", ".join(sorted(losses, key=losses.__getitem__))
    held = "as at the size before" if orders[last] == orders[before] else f"at the size before it is {orders[before]}"
    said, rows = [f"At {last} the order of arms, the lowest loss first, is {orders[last]}: {held}."], []
    for arm, rungs in found.items():
        told, end = prediction(rungs), rungs[-1].losses
        if told is not None and end:
            if all(len(one.losses) == 1 for one in rungs[:-1]):
                said.append(f"{arm}: predicted {told.median:.4f}, of one seed, which has no interval; found {end[0]:.4f}.")
            else:
                within = "within" if told.holds(end[0]) else "outside of"
                said.append(f"{arm}: predicted {interval_text(told, 4)}, found {end[0]:.4f}, {within} the interval.")
        for rate, more in rungs[-2].beside.items():
            if more < 0:
                said.append(
                    f"{arm}: at {before} a rate of {rate:g} is better by {-more:.4f}, so the rule of rates does not hold."
                )
        for one in rungs:
            mean = f"{fmean(one.losses):.4f}" if one.losses else "failed"
            rows.append(
                [arm, one.size, f"{one.parameters:,}", f"{one.compute:.1e}", f"{one.rate:g}", str(len(one.losses)), mean]
            )
    table = markdown(["arm", "size", "parameters", "FLOPs", "rate", "runs", "last loss"], rows)
    return "\n\n".join(["# Ladder", "\n".join(wrapped(f"- {line}") for line in said), table]) + "\n"
