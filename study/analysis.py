"""From runs to statements: the best rate of each arm, differences paired over seeds, sensitivity, steps saved."""

import math
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from scipy import stats

from measure.comparison import AGAIN as TORCH_AGAIN
from measure.comparison import TORCH, cycle_times
from measure.statistics import Interval, mean_interval, paired_ratio
from study.arms import Arm, Study
from study.runs import AGAIN, Found, Result
from study.timing import BASELINE


@dataclass(frozen=True)
class Price:
    """The time of an arm's step, paired over cycles. Ratios are None where nothing was timed."""

    ms: dict[str, float]  # by contender, see study/timing.py
    over_torch: Interval | None  # time with PyTorch's norms over the arm's own
    again: Interval | None  # A/A of PyTorch's norms
    of_baseline: Interval | None  # the arm's time over the baseline's


@dataclass(frozen=True)
class ArmReport:
    """An arm at its best rate, against the baseline at its own. Differences are arm − baseline, in nats per token, paired over
    seeds; those of the baseline are 0."""

    name: str
    rate: float
    last: Interval  # over seeds
    best: Interval  # the lowest validation loss of each run
    difference: Interval  # of last losses
    best_difference: Interval
    different: bool
    sensitivity: Interval  # to the rate
    diverged: float  # share of all runs
    diverged_at_best: int  # runs
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
    baseline, names = study.baseline.name, [arm.name for arm in study.arms]
    best = {name: found.at(name, found.best_rate(name)) for name in names}
    base = best[baseline]
    again = unpaired(found.of(baseline + AGAIN), base)
    prices = {arm.name: price(found, arm, baseline) for arm in study.arms}
    reached = steps_at_equal_time(prices, study.cfg.train.steps)
    at_equal_time = {name: [loss_at(run, step) for run in best[name]] for name, step in reached.items()}
    made = []
    for name, runs in best.items():
        difference = paired([run.counted for run in runs], [run.counted for run in base])
        made.append(
            ArmReport(
                name=name,
                rate=runs[0].rate,
                last=mean_interval([run.counted for run in runs]),
                best=mean_interval([run.best for run in runs]),
                difference=difference,
                best_difference=paired([run.best for run in runs], [run.best for run in base]),
                different=len(runs) > 1 and is_different(difference, again),
                sensitivity=mean_interval([sensitivity(found, name, seed) for seed in study.seeds]),
                diverged=fmean(bool(run.over) for run in found.of(name)),
                diverged_at_best=sum(bool(run.over) for run in runs),
                speedup=speedup(runs, base),
                price=prices[name],
                equal_time=mean_interval(at_equal_time[name]) if reached else None,
                equal_time_difference=paired(at_equal_time[name], at_equal_time[baseline]) if reached else None,
            )
        )
    return Report(made, baseline, again, len(found.results))


def paired(first: list[float], second: list[float]) -> Interval:
    """The mean of the differences of two lists in the order of seeds, with Student's 95 % interval."""
    return mean_interval(np.subtract(first, second))


def unpaired(again: list[Result], base: list[Result]) -> Interval:
    """The difference of the mean last losses of one model with other seeds, with Student's 95 % interval."""
    losses = [[run.counted for run in runs] for runs in (again, base)]
    mean = fmean(losses[0]) - fmean(losses[1])
    if len(again) == 1:
        return Interval(mean, mean, mean)
    found = stats.ttest_ind(*losses).confidence_interval()
    return Interval(mean, float(found.low), float(found.high))


def is_different(difference: Interval, again: Interval) -> bool:
    """Whether the interval leaves out 0, and the mean is further from 0 than both ends of A/A's interval.

    The first alone calls one of twenty equal arms different, so one study of seven equal arms in four. Both call fewer than
    one of a hundred.
    """
    return not difference.holds(0.0) and abs(difference.median) > reach(again)


def reach(again: Interval) -> float:
    """The largest difference that A/A allows, in either direction."""
    return max(abs(again.low), abs(again.high))


def sensitivity(found: Found, arm: str, seed: int) -> float:
    """Wortsman et al., arXiv:2309.14322: the mean over rates of min(loss, initial loss) − the lowest loss of any rate."""
    losses = [run.counted for run in found.of(arm) if run.seed == seed]
    return fmean(losses) - min(losses)


# ---- steps saved -------------------------------------------------------------------------------------------------------------


def speedup(runs: list[Result], base: list[Result]) -> Interval | None:
    """The geometric mean over seeds of `saved`. None without losses between first and last, or if a run learned nothing."""
    if any(len(run.evaluated) < 3 or run.counted == run.initial for run in (*runs, *base)):
        return None
    logs = mean_interval([math.log(saved(a, b)) for a, b in zip(runs, base, strict=True)])
    return Interval(*(math.exp(x) for x in (logs.median, logs.low, logs.high)))


def saved(arm: Result, base: Result) -> float:
    """How many times fewer steps the arm takes than the baseline to a loss that both reach: the higher of the two last ones."""
    target = max(arm.counted, base.counted)
    return steps_to(base, target) / steps_to(arm, target)


def steps_to(run: Result, target: float) -> float:
    """The first step at which the interpolated curve of validation losses reaches the target."""
    for (before, high), (after, low) in zip(run.evaluated, run.evaluated[1:], strict=False):
        if low <= target:
            return after if high <= low else max(before + (after - before) * (high - target) / (high - low), 1.0)
    return run.evaluated[-1][0]


# ---- time --------------------------------------------------------------------------------------------------------------------


def price(found: Found, arm: Arm, baseline: str) -> Price:
    blocks, own = found.times.get(arm.name, {}), str(arm.cfg.norm.impl)

    def ratio(numerator: str, denominator: str) -> Interval | None:
        if not {numerator, denominator} <= blocks.keys():
            return None
        return paired_ratio(*(cycle_times([[ms] for ms in blocks[name]]) for name in (numerator, denominator)))

    return Price(
        ms={name: median(of) for name, of in blocks.items() if name != BASELINE},
        over_torch=ratio(TORCH, own) if own != TORCH else None,
        again=ratio(TORCH, TORCH_AGAIN),
        of_baseline=ratio(own, own if arm.name == baseline else BASELINE),
    )


def steps_at_equal_time(prices: dict[str, Price], steps: int) -> dict[str, float]:
    """How many steps each arm makes while the fastest one makes all of them; empty where an arm has no time."""
    times = {name: of.of_baseline.median for name, of in prices.items() if of.of_baseline is not None}
    return {name: steps * min(times.values()) / time for name, time in times.items()} if len(times) == len(prices) else {}


def loss_at(run: Result, step: float) -> float:
    steps, losses = zip(*run.evaluated, strict=True)
    return float(np.interp(step, steps, np.nan_to_num(losses, nan=run.initial, posinf=run.initial)))
