"""From runs to statements: the best rate of each arm, what differs there, how runs fail, and what a step costs.

measure/differences.py has the test. Its samples are runs whose seeds had no part in the choice of a rate, of the baseline also
those of A/A. What the rate of an arm may cost beside its best one is estimated by a fit and enters the interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from measure.comparison import AGAIN as TORCH_AGAIN
from measure.comparison import TORCH, cycle_times
from measure.differences import Difference, Sample, differences
from measure.statistics import Interval, mean_interval, paired_ratio
from study import fit
from study.arms import Arm, Study
from study.runs import AGAIN, FRESH, RACE, SEARCH, TIME, Found, Result
from study.timing import BASELINE, OWN_AGAIN


@dataclass(frozen=True)
class Price:
    """The time of an arm's step, paired over cycles. Ratios are None where nothing was timed."""

    ms: dict[str, float]  # by contender, see study/timing.py
    over_torch: Interval | None  # time with PyTorch's norms over the arm's own
    again: Interval | None  # A/A of the arm's own step, or in older studies of PyTorch's
    of_baseline: Interval | None  # the arm's time over the baseline's


@dataclass(frozen=True)
class ArmReport:
    """An arm at its best rate. Losses are the last ones, in nats per token."""

    name: str
    rate: float
    at_end: str  # "lowest" or "highest": the best rate is so of all that were trained, and no more than a bound
    sample: Sample
    last: Interval | None  # over the runs that trained
    against: Difference | None  # the baseline; None of the baseline itself
    failing: str  # in words, where a run at the best rate failed
    sensitivity: Interval | None  # to the rate, over seeds; None unless all rates were trained to the end
    failed: tuple[int, int]  # how many of how many runs of the search, at all rates
    price: Price
    slower: bool  # its step takes longer or shorter than the baseline's, beyond A/A
    at_equal_time: tuple[int, Sample] | None  # steps in the time of the fastest arm, and the losses of such runs
    equal_time: Difference | None


@dataclass(frozen=True)
class Report:
    arms: list[ArmReport]
    baseline: str
    again: Difference | None  # A/A: the baseline with other seeds − the baseline
    pairs: dict[tuple[str, str], Difference]  # of all arms, where they are asked for
    runs: int
    chosen_by_same: bool  # the seeds that are compared have chosen the rates too
    noise: float  # of times: the furthest from 1 that an A/A interval reaches


def analyse(study: Study, found: Found) -> Report:
    """
    Raises:
        ValueError: an arm has no runs.
    """
    baseline, names = study.baseline.name, [arm.name for arm in study.arms]
    rates = {name: found.best_rate(name) for name in names}
    fresh = any(run.stage == FRESH for run in found.results)
    judged = {name: found.judged(name, rate) for name, rate in rates.items()}
    samples = {name: sample(found, runs, rate_error(found, name, runs, not fresh)) for name, runs in judged.items()}
    again, own = sample(found, found.at(baseline + AGAIN, rates[baseline])), samples[baseline]
    samples[baseline] = replace(own, losses=[*own.losses, *again.losses], failed=own.failed + again.failed)
    every = [(a, b) for at, b in enumerate(names) for a in names[at + 1 :]]
    asked = every if study.cfg.compare.all_pairs else [(name, baseline) for name in names if name != baseline]
    of_pairs = differences(samples, asked)
    against = {name: of_pairs.get((name, baseline)) or _turned(of_pairs.get((baseline, name))) for name in names}

    prices = {name: price(found, arm, baseline) for name, arm in zip(names, study.arms, strict=True)}
    noise = noise_of(prices)
    timed = equal_time(study, found, samples, prices, noise)
    at_equal_time = differences({name: of for name, (_, of) in timed.items()}, [(n, baseline) for n in timed if n != baseline])
    made = []
    for name in names:
        searched, tried = found.of(name, RACE, SEARCH), found.rates(name)
        end = {min(tried): "lowest", max(tried): "highest"}.get(rates[name], "") if len(tried) > 1 else ""
        ratio = prices[name].of_baseline
        made.append(
            ArmReport(
                name=name,
                rate=rates[name],
                at_end=end,
                sample=samples[name],
                last=mean_interval(samples[name].losses) if samples[name].losses else None,
                against=against[name] if name != baseline else None,
                failing=failing(found, name, rates[name]),
                sensitivity=sensitivity(study, found, name),
                failed=(sum(found.failed(run) for run in searched), len(searched)),
                price=prices[name],
                slower=name != baseline and ratio is not None and not ratio.holds(1.0) and abs(ratio.median - 1) > noise,
                at_equal_time=timed.get(name),
                equal_time=at_equal_time.get((name, baseline)),
            )
        )
    both = {"again": again, "own": replace(own, error=0.0)}  # at one rate
    aa = differences(both, [("again", "own")])["again", "own"] if again.runs else None
    chosen = not fresh and any(len(found.rates(name)) > 1 for name in names)
    pairs = of_pairs if study.cfg.compare.all_pairs else {}
    return Report(made, baseline, aa, pairs, len(found.results), chosen, noise)


def sample(found: Found, runs: Sequence[Result], error: float = 0.0) -> Sample:
    failed = [found.failed(run) for run in runs]
    return Sample([run.last for run, over in zip(runs, failed, strict=True) if not over], sum(failed), error)


def _turned(one: Difference | None) -> Difference | None:
    """base − arm as arm − base."""
    if one is None or one.loss is None:
        return one
    return replace(one, loss=Interval(-one.loss.median, -one.loss.high, -one.loss.low))


def failing(found: Found, name: str, rate: float) -> str:
    """Where runs fail: at the best rate, and at the next lower one that was trained to the end."""
    runs = found.judged(name, rate)
    if not (count := sum(found.failed(run) for run in runs)):
        return ""
    said = f"fails in {count} of {len(runs)} runs at {rate:g}"
    if lower := [other for other in found.rates(name) if other < rate]:
        beside = found.at(name, max(lower))
        said += f", in {sum(found.failed(run) for run in beside)} of {len(beside)} at {max(lower):g}"
    return said


# ---- rates -------------------------------------------------------------------------------------------------------------------


def rate_error(found: Found, name: str, judged: Sequence[Result], chosen_by_same: bool) -> float:
    """`study.fit.cost` of the arm's rate. The standard deviation of a run is the median over rates: above the best one it is
    many times as large."""
    losses, best = found.rates(name), judged[0].rate
    if len(losses) < 2 or not math.isfinite(losses[best]):
        return 0.0
    groups = [judged, *(found.at(name, rate) for rate in losses)]
    trained = [[run.last for run in of if not found.failed(run)] for of in groups]
    deviations = [float(np.std(of, ddof=1)) for of in trained if len(of) > 1]
    deviation = median(deviations) if deviations else 0.0
    noise = {rate: deviation / math.sqrt(len(found.at(name, rate))) for rate in losses}
    return fit.cost(losses, noise, best, chosen_by_same)


def sensitivity(study: Study, found: Found, name: str) -> Interval | None:
    """Wortsman et al., arXiv:2309.14322: over the given rates the mean of min(loss, initial loss) − the lowest loss.

    A run that failed has its initial loss. None where a rate has no runs to the end, or all runs failed.
    """
    every = [run for run in found.of(name, SEARCH) if run.rate in study.rates]
    seeds = {run.seed for run in every}
    whole = len(every) == len(seeds) * len(study.rates) > len(seeds)
    if not whole or all(found.failed(run) for run in every):
        return None
    capped = [(run.seed, run.initial if found.failed(run) else min(run.initial, run.last)) for run in every]
    of_seed = [[loss for seed, loss in capped if seed == one] for one in seeds]
    return mean_interval([fmean(losses) - min(losses) for losses in of_seed])


# ---- time --------------------------------------------------------------------------------------------------------------------


def price(found: Found, arm: Arm, baseline: str) -> Price:
    blocks, own = found.times.get(arm.name, {}), str(arm.cfg.norm.impl)

    def ratio(numerator: str, denominator: str) -> Interval | None:
        if not {numerator, denominator} <= blocks.keys():
            return None
        return paired_ratio(*(cycle_times([[ms] for ms in blocks[name]]) for name in (numerator, denominator)))

    return Price(
        ms={name: median(of) for name, of in blocks.items() if name not in (BASELINE, OWN_AGAIN, TORCH_AGAIN)},
        over_torch=ratio(TORCH, own) if own != TORCH else None,
        again=ratio(own, OWN_AGAIN) or ratio(TORCH, TORCH_AGAIN),
        of_baseline=ratio(own, own if arm.name == baseline else BASELINE),
    )


def noise_of(prices: dict[str, Price]) -> float:
    """The furthest from 1 that an A/A interval of the study reaches: a ratio within it is no difference. 0 without times."""
    return max((abs(end - 1) for of in prices.values() if of.again for end in (of.again.low, of.again.high)), default=0.0)


def steps_at_equal_time(prices: dict[str, Price], steps: int, noise: float) -> dict[str, int]:
    """How many steps each arm makes while the fastest one makes all of them; empty where an arm has no time. An arm whose step
    is not known to take longer makes all."""
    times = {name: of.of_baseline.median for name, of in prices.items() if of.of_baseline is not None}
    if len(times) < len(prices):
        return {}
    least = min(times.values())
    return {name: steps if time / least - 1 <= noise else round(steps * least / time) for name, time in times.items()}


def equal_time(
    study: Study, found: Found, samples: dict[str, Sample], prices: dict[str, Price], noise: float
) -> dict[str, tuple[int, Sample]]:
    """By arm the steps that it makes in the time of the fastest, and the losses of runs with a schedule of that length; empty
    unless each arm has some."""
    steps, timed = study.cfg.train.steps, dict[str, tuple[int, Sample]]()
    for name, fewer in steps_at_equal_time(prices, steps, noise).items():
        runs = [run for run in found.of(name, TIME) if run.steps == fewer]
        if fewer == steps:
            timed[name] = (steps, samples[name])
        elif runs:
            timed[name] = (fewer, sample(found, runs, samples[name].error))
    return timed if len(timed) == len(prices) and len({of[0] for of in timed.values()}) > 1 else {}
