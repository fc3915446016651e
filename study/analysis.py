"""From runs to statements: the best rate of each arm, what differs there, how runs fail, and what a step costs.

measure/differences.py has the test. It is made of runs whose seeds had no part in the choice of a rate; of the baseline these
are also those of A/A. What the choice of a rate may have cost enters the interval and the test.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from measure.comparison import TORCH, cycle_times, differs, reach
from measure.differences import Difference, Sample, difference, differences
from measure.statistics import Interval, mean_interval, paired_ratio
from study.arms import Arm, Study
from study.runs import CONTROL, FRESH, SEARCH, TIME, Found
from study.timing import OWN_AGAIN, as_baseline

ONE_SIDED = 1.645  # standard errors above which a twentieth lies


@dataclass(frozen=True)
class Price:
    """The time of an arm's step, paired over cycles. Ratios are None where nothing was timed."""

    ms: dict[str, float]  # by contender, see study/timing.py
    over_torch: Interval | None  # time with PyTorch's norms over the arm's own
    again: Interval | None  # A/A of the arm's own step
    of_baseline: Interval | None  # the arm's time over the baseline's


@dataclass(frozen=True)
class ArmReport:
    """An arm at its best rate. Losses are the last ones, in nats per token."""

    name: str
    rate: float
    at_end: str  # "lowest" or "highest": the best rate is so of all that were trained
    sample: Sample
    against: Difference | None  # the baseline; None of the baseline itself
    failing: str  # in words, where a run at the best rate failed
    sensitivity: Interval | None  # to the rate
    searched: tuple[int, int]  # how many runs of the search failed, of how many
    price: Price
    slower: bool  # its step takes longer or shorter than the baseline's, beyond A/A
    steps: int | None  # in the time in which the fastest arm makes all; None without times
    equal_time: tuple[Sample, Difference | None] | None  # of runs with a schedule of these steps, and against the baseline's


@dataclass(frozen=True)
class Report:
    arms: list[ArmReport]
    baseline: str
    again: Difference | None  # A/A: the baseline with other seeds − the baseline
    pairs: dict[tuple[str, str], Difference]  # of all arms, where they are asked for
    runs: int
    tuned: bool  # whether there was a choice of rates
    fresh: bool  # whether the seeds that are compared had no part in the choice of rates; if not, nothing is called different


def analyse(study: Study, found: Found) -> Report:
    """
    Raises:
        ValueError: an arm has no runs.
    """
    baseline, names = study.baseline.name, [arm.name for arm in study.arms]
    rates = {name: found.best_rate(name) for name in names}
    fresh = bool(study.compared)
    stage = FRESH if fresh else SEARCH
    samples = {name: with_cost(found, name, found.sample(found.of(name, stage, rate=rate))) for name, rate in rates.items()}
    own, again = samples[baseline], found.sample(found.of(baseline, CONTROL, rate=rates[baseline]))
    pooled = replace(own, losses=[*own.losses, *again.losses], failed=own.failed + again.failed)
    against, pairs = judged(study, samples | {baseline: pooled}, fresh)
    prices = {arm.name: price(found, arm, baseline) for arm in study.arms}
    noise = reach(of.again for of in prices.values() if of.again)
    steps = steps_at_equal_time(prices, study.cfg.train.steps, noise)
    timed = equal_time(study, found, samples, rates, steps)
    then = judged(study, timed, fresh)[0] if timed else {}

    def report(name: str) -> ArmReport:
        searched = found.losses(found.of(name, SEARCH))
        tried, ratio, sample = found.rates(name), prices[name].of_baseline, pooled if name == baseline else samples[name]
        return ArmReport(
            name=name,
            rate=rates[name],
            at_end={min(tried): "lowest", max(tried): "highest"}.get(rates[name], "") if len(tried) > 1 else "",
            sample=sample,
            against=against.get(name),
            failing=failing(found, name, sample, rates[name]),
            sensitivity=sensitivity(study, found, name),
            searched=(searched.count(math.inf), len(searched)),
            price=prices[name],
            slower=name != baseline and ratio is not None and differs(ratio, noise),
            steps=steps.get(name),
            equal_time=(timed[name], then.get(name)) if timed else None,
        )

    aa = difference(again, replace(own, cost=0.0)) if again.runs else None  # both at one rate
    return Report([report(name) for name in names], baseline, aa, pairs, len(found.results), len(study.rates) > 1, fresh)


Judged = tuple[dict[str, Difference], dict[tuple[str, str], Difference]]


def judged(study: Study, samples: Mapping[str, Sample], fresh: bool) -> Judged:
    """By arm its difference from the baseline; and all pairs, if they are asked for, which then are judged together."""
    names, baseline = list(samples), study.baseline.name
    asked = [(name, baseline) for name in names if name != baseline]
    if study.cfg.compare.all_pairs:
        others = [name for name in names if name != baseline]
        asked += [(arm, base) for at, base in enumerate(others) for arm in others[at + 1 :]]
    if fresh:
        made = differences(samples, asked)
    else:
        made = {(arm, base): replace(difference(samples[arm], samples[base]), p_loss=None) for arm, base in asked}
    return {arm: of for (arm, base), of in made.items() if base == baseline}, made if study.cfg.compare.all_pairs else {}


def failing(found: Found, name: str, sample: Sample, rate: float) -> str:
    """Where runs fail: at the best rate, and at the next lower one that was trained to the end."""
    if not sample.failed:
        return ""
    said = f"fails in {sample.failed} of {sample.runs} runs at {rate:g}"
    if lower := [other for other in found.rates(name) if other < rate]:
        beside = found.sample(found.of(name, SEARCH, rate=max(lower)))
        said += f", in {beside.failed} of {beside.runs} at {max(lower):g}"
    return said


# ---- rates -------------------------------------------------------------------------------------------------------------------


def with_cost(found: Found, name: str, sample: Sample) -> Sample:
    """The sample, with the most that the arm could gain by another rate: from the best rate's loss down to the lowest point of
    the parabola in log rate through it and its two neighbours.

    Its error counts: one neighbour is taken lower and the other higher by a one-sided 95 % limit, from the spread of the
    sample; a neighbour that may be lower than the best rate by this limit is a better rate. Beside a rate at which no run
    trains no parabola goes on, and the cost is at most the limit of the rise on the other side. Infinite if the best rate has
    no neighbour on one side.
    """
    rates, best = found.rates(name), found.best_rate(name)
    if len(rates) < 2:
        return sample
    rises = {math.log(rate / best): loss - rates[best] for rate, loss in rates.items() if math.isfinite(rates[best])}
    below, above = max((x for x in rises if x < 0), default=0.0), min((x for x in rises if x > 0), default=0.0)
    if not below or not above:
        return replace(sample, cost=math.inf)
    p, q = rises[below], rises[above]
    seeds = min(len(found.sample(found.of(name, SEARCH, rate=rate)).losses) for rate in rates if math.isfinite(rates[rate]))
    deviation = float(np.std(sample.losses, ddof=1)) if len(sample.losses) > 1 else 0.0
    error = ONE_SIDED * deviation * math.sqrt(2 / seeds)
    if math.isinf(max(p, q)):
        return replace(sample, cost=min(p, q) + error)
    left, right = depth(-below, above, p + error, max(q - error, 0.0)), depth(-below, above, max(p - error, 0.0), q + error)
    return replace(sample, cost=max(left, right, error - min(p, q)))


def depth(a: float, b: float, p: float, q: float) -> float:
    """How far below 0 the parabola through (−a, p), (0, 0) and (b, q) is lowest."""
    return (q * a / b - p * b / a) ** 2 / (4 * (a + b) * (p / a + q / b)) if p + q else 0.0


def sensitivity(study: Study, found: Found, name: str) -> Interval | None:
    """Wortsman et al., arXiv:2309.14322: over the given rates the mean of min(loss, initial loss) − the lowest loss.

    A run that failed has its initial loss. None where a rate has no runs to the end, or all runs failed, or of one seed.
    """
    every = [run for run in found.of(name, SEARCH) if run.rate in study.rates and run.seed in study.seeds]
    seeds = sorted({run.seed for run in every})
    if len(seeds) < 2 or len(every) < len(seeds) * len(study.rates) or all(map(found.failed, every)):
        return None
    capped = [min(run.initial, loss) for run, loss in zip(every, found.losses(every), strict=True)]
    of_seed = [[loss for run, loss in zip(every, capped, strict=True) if run.seed == seed] for seed in seeds]
    return mean_interval([fmean(losses) - min(losses) for losses in of_seed])


# ---- time --------------------------------------------------------------------------------------------------------------------


def price(found: Found, arm: Arm, baseline: str) -> Price:
    blocks, own = found.times.get(arm.name, {}), str(arm.cfg.norm.impl)

    def ratio(numerator: str, denominator: str) -> Interval | None:
        if not {numerator, denominator} <= blocks.keys():
            return None
        return paired_ratio(*(cycle_times([[ms] for ms in blocks[name]]) for name in (numerator, denominator)))

    return Price(
        ms={name: median(blocks[name]) for name in (own, TORCH) if name in blocks},
        over_torch=ratio(TORCH, own) if own != TORCH else None,
        again=ratio(own, OWN_AGAIN),
        of_baseline=ratio(own, own if arm.name == baseline else as_baseline(baseline)),
    )


def steps_at_equal_time(prices: Mapping[str, Price], steps: int, noise: float) -> dict[str, int]:
    """How many steps each arm makes while the fastest one makes all of them; empty where an arm has no time. An arm whose step
    is not known to take longer makes all."""
    times = {name: of.of_baseline.median for name, of in prices.items() if of.of_baseline is not None}
    if len(times) < len(prices):
        return {}
    least = min(times.values())
    return {name: steps if time / least - 1 <= noise else round(steps * least / time) for name, time in times.items()}


def equal_time(
    study: Study, found: Found, samples: Mapping[str, Sample], rates: Mapping[str, float], steps: Mapping[str, int]
) -> dict[str, Sample]:
    """By arm the runs of so many steps, each with a schedule that ends there; empty unless each arm has some."""
    made = dict(samples)
    for name, fewer in steps.items():
        if fewer < study.cfg.train.steps:
            runs = [run for run in found.of(name, TIME, rate=rates[name]) if run.steps == fewer]
            made[name] = replace(found.sample(runs), cost=samples[name].cost)
    shorter = any(fewer < study.cfg.train.steps for fewer in steps.values())
    return made if shorter and all(sample.runs for sample in made.values()) else {}
