"""From runs to statements: the best rate of each arm, paired differences, sensitivity, steps saved."""

import math
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from measure.comparison import AGAIN as TORCH_AGAIN
from measure.comparison import TORCH, compare_blocks
from measure.statistics import Interval, mean_interval
from study.arms import Arm, Study
from study.runs import AGAIN, Found, Result
from study.timing import BASELINE


@dataclass(frozen=True)
class Price:
    """The time of an arm's step, paired over cycles. Ratios are None where nothing was timed."""

    ms: dict[str, float]  # by contender, see study/timing.py
    over_torch: Interval | None = None  # time with PyTorch's norms over the arm's own
    again: Interval | None = None  # A/A of PyTorch's norms
    of_baseline: Interval | None = None  # the arm's time over the baseline's


@dataclass(frozen=True)
class ArmReport:
    """An arm at its best rate, against the baseline at its own. Differences are arm − baseline, in nats per token."""

    name: str
    rate: float
    last: Interval  # over seeds
    best: Interval  # the lowest validation loss of each run
    difference: Interval | None  # of last losses, paired over seeds; None of the baseline
    best_difference: Interval | None
    different: bool  # the interval excludes 0, and the mean is larger than that of A/A
    sensitivity: Interval  # to the rate
    diverged: float  # share of all runs
    speedup: Interval | None  # steps of the baseline over steps of the arm, to the same loss
    price: Price
    equal_time: Interval | None  # loss after the GPU time in which the fastest arm makes all its steps
    equal_time_difference: Interval | None


@dataclass(frozen=True)
class Report:
    arms: list[ArmReport]
    baseline: str
    again: Interval  # A/A: the baseline with other seeds − the baseline
    runs: int


def analyse(study: Study, found: Found) -> Report:
    baseline, threshold = study.baseline.name, study.cfg.compare.diverged
    base = at_rate(found, baseline, best_rate(found, baseline))
    others = sorted(found.of(baseline + AGAIN), key=lambda run: run.seed)
    again = mean_interval([a.last - b.last for a, b in zip(others, base, strict=True)])
    prices = {arm.name: price(found, arm, baseline) for arm in study.arms}
    reached = steps_at_equal_time(prices, study.cfg.train.steps)
    base_at = [loss_at(run, reached[baseline]) for run in base] if reached else []
    made = []
    for arm in study.arms:
        rate = best_rate(found, arm.name)
        runs = at_rate(found, arm.name, rate)
        pairs = None if arm.name == baseline else list(zip(runs, base, strict=True))
        difference = mean_interval([a.last - b.last for a, b in pairs]) if pairs else None
        ratios = mean_interval([math.log(saved(a, b)) for a, b in pairs]) if pairs else None
        finite = difference is not None and math.isfinite(difference.median)
        at = [loss_at(run, reached[arm.name]) for run in runs] if reached else []
        made.append(
            ArmReport(
                name=arm.name,
                rate=rate,
                last=mean_interval([run.last for run in runs]),
                best=mean_interval([run.best for run in runs]),
                difference=difference,
                best_difference=mean_interval([a.best - b.best for a, b in pairs]) if pairs else None,
                different=bool(finite and difference and is_different(difference, again)),
                sensitivity=mean_interval([sensitivity(found, arm.name, seed) for seed in study.seeds]),
                diverged=fmean(diverged(run, found, threshold) for run in found.of(arm.name)),
                speedup=Interval(*(math.exp(x) for x in (ratios.median, ratios.low, ratios.high))) if ratios else None,
                price=prices[arm.name],
                equal_time=mean_interval(at) if at else None,
                equal_time_difference=mean_interval(np.subtract(at, base_at)) if at and pairs else None,
            )
        )
    return Report(made, baseline, again, len(found.results))


def price(found: Found, arm: Arm, baseline: str) -> Price:
    blocks, own = found.times.get(arm.name, {}), str(arm.cfg.norm.impl)

    def ratio(numerator: str, denominator: str) -> Interval | None:
        if not {numerator, denominator} <= blocks.keys():
            return None
        return compare_blocks(*([[ms] for ms in blocks[name]] for name in (numerator, denominator))).speedup

    return Price(
        ms={name: median(of) for name, of in blocks.items() if name != BASELINE},
        over_torch=ratio(TORCH, own) if own != TORCH else None,
        again=ratio(TORCH, TORCH_AGAIN),
        of_baseline=ratio(own, BASELINE) if arm.name != baseline else Interval(1.0, 1.0, 1.0) if blocks else None,
    )


def steps_at_equal_time(prices: dict[str, Price], steps: int) -> dict[str, float]:
    """How many steps each arm makes while the fastest one makes all of them; empty where an arm has no time."""
    times = {name: of.of_baseline.median for name, of in prices.items() if of.of_baseline is not None}
    fastest = min(times.values(), default=math.nan)
    return {name: steps * fastest / time for name, time in times.items()} if len(times) == len(prices) else {}


def is_different(difference: Interval, again: Interval) -> bool:
    return not difference.holds(0.0) and abs(difference.median) > abs(again.median) and difference.low < difference.high


def best_rate(found: Found, arm: str) -> float:
    """The rate with the lowest mean of last losses over seeds. A run that was stopped early counts as its initial loss."""
    rates = dict.fromkeys(run.rate for run in found.of(arm))
    return min(rates, key=lambda rate: fmean(_bounded(run) for run in at_rate(found, arm, rate)))


def at_rate(found: Found, arm: str, rate: float) -> list[Result]:
    return sorted((run for run in found.of(arm) if run.rate == rate), key=lambda run: run.seed)


def sensitivity(found: Found, arm: str, seed: int) -> float:
    """Wortsman et al., arXiv:2309.14322: the mean over rates of min(loss, initial loss) − the lowest loss of any rate."""
    losses = [_bounded(run) for run in found.of(arm) if run.seed == seed]
    return fmean(losses) - min(losses)


def _bounded(run: Result) -> float:
    """The last loss, at most the initial one; that of a run that was stopped early is the initial one."""
    return run.initial if run.over or not math.isfinite(run.last) else min(run.last, run.initial)


def diverged(run: Result, found: Found, threshold: float) -> bool:
    lowest = min(_bounded(other) for other in found.of(run.arm))
    return bool(run.over) or not run.last <= lowest + threshold


def saved(arm: Result, base: Result) -> float:
    """How many times fewer steps the arm takes than the baseline to a loss that both reach: the higher of the two last ones."""
    target = max(arm.last, base.last)
    taken = [steps_to(run, target) for run in (base, arm)]
    return taken[0] / taken[1]


def steps_to(run: Result, target: float) -> float:
    """The first step at which the interpolated curve of validation losses reaches the target."""
    for (before, high), (after, low) in zip(run.evaluated, run.evaluated[1:], strict=False):
        if low <= target:
            return after if high <= low else max(before + (after - before) * (high - target) / (high - low), 1.0)
    return run.evaluated[-1][0]


def loss_at(run: Result, step: float) -> float:
    steps, losses = zip(*run.evaluated, strict=True)
    return float(np.interp(step, steps, losses))
