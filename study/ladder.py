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

import numpy as np
import torch

from measure.statistics import RESAMPLES, Interval
from measure.tables import document, interval_text, listed, markdown
from model import GPT
from study import plan
from study.arms import Arm, Study
from study.runs import FRESH, SEARCH, Runs

EXPONENTS = np.linspace(0.02, 1.0, 99)


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
        *known, end = rungs
        if all(one.losses for one in rungs):
            told = predicted([one.compute for one in known], [one.losses for one in known], end.compute)
            loss = end.losses[0]
            if all(len(one.losses) == 1 for one in known):
                said.append(f"{arm}: predicted {told.median:.4f}, of one seed, which has no interval; found {loss:.4f}.")
            else:
                within = "within" if told.holds(loss) else "outside of"
                said.append(f"{arm}: predicted {interval_text(told, 4)}, found {loss:.4f}, {within} the interval.")
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
    return document("Ladder", listed(said), table)


# ---- the law -----------------------------------------------------------------------------------------------------------------


def law(compute: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E, A and α of L = E + A·C^−α by least squares over α in EXPONENTS, with E and A of 0 or more; C in units of the first.

    Args:
        compute: [sizes], of three sizes or more.
        losses: [..., sizes]: each line has a law of its own.
    """
    x = (compute / compute[0])[None, :] ** -EXPONENTS[:, None]  # [exponents, sizes]
    y, mean = losses[..., None, :], x.mean(-1)
    slope = ((x - mean[:, None]) * y).sum(-1) / ((x - mean[:, None]) ** 2).sum(-1)
    floor = y.mean(-1) - slope * mean
    slope = np.where(floor < 0, (x * y).sum(-1) / (x * x).sum(-1), slope)
    flat = slope < 0
    floor, slope = np.where(flat, y.mean(-1), np.maximum(floor, 0.0)), np.where(flat, 0.0, slope)
    misses = ((floor[..., None] + slope[..., None] * x - y) ** 2).sum(-1)
    at = misses.argmin(-1)
    chosen = [np.take_along_axis(of, at[..., None], -1)[..., 0] for of in (floor, slope)]
    return chosen[0], chosen[1], EXPONENTS[at]


def predicted(compute: Sequence[float], losses: Sequence[Sequence[float]], at: float) -> Interval:
    """The loss of one run at another size, with a 95 % interval: a bootstrap over the seeds of each size, and the noise of the
    run as at the last size.

    Args:
        losses: by size those of its seeds.
    """
    sizes, draw = np.asarray(compute, np.float64), np.random.default_rng(0)

    def value(of: np.ndarray) -> np.ndarray:
        floor, slope, exponent = law(sizes, of)
        return floor + slope * (at / sizes[0]) ** -exponent

    drawn = np.stack([draw.choice(np.asarray(of), (RESAMPLES, len(of))).mean(-1) for of in losses], -1)
    last = np.asarray(losses[-1])
    found = value(drawn) + draw.choice(last - last.mean(), RESAMPLES)
    low, high = np.percentile(found, (2.5, 97.5))
    return Interval(float(value(np.array([np.mean(of) for of in losses]))), float(low), float(high))
