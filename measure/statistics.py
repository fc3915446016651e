"""Spread of repeated measurements, and intervals of paired differences, ratios and means."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

# For a bootstrap interval of a median: with 4 samples it misses the truth 1 time in 8, with 2 every other time.
LEAST_SAMPLES = 6
RESAMPLES = 2000


@dataclass(frozen=True)
class Spread:
    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Interval:
    """A median, or a mean, with its 95 % interval."""

    median: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def spread(samples: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile, in the unit of the samples."""
    p10, median, p90 = np.percentile(np.asarray(samples, dtype=np.float64), (10, 50, 90))
    return Spread(float(median), float(p10), float(p90))


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """Median over rounds of numerator / denominator, with its bootstrap 95 % interval.

    Sample i of both comes from the same round, so whatever slows a whole round (clocks, neighbours) cancels.
    """
    return _bootstrap((np.asarray(numerator, np.float64) / np.asarray(denominator, np.float64),), np.median)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Median over rounds of first − second, with its bootstrap 95 % interval."""
    return _bootstrap((np.asarray(first, np.float64) - np.asarray(second, np.float64),), np.median)


def ratio_of_means(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """Mean of the numerator over that of the denominator, with its bootstrap 95 % interval over rounds, paired."""
    pairs = (np.asarray(numerator, np.float64), np.asarray(denominator, np.float64))
    return _bootstrap(pairs, lambda x, y, axis: x.mean(axis) / y.mean(axis))


def mean_interval(samples: Sequence[float] | np.ndarray) -> Interval:
    """The mean with Student's 95 % interval. One sample is its own interval.

    For seeds, of which there are few: a bootstrap of three values covers the truth three times in four.
    """
    values = np.asarray(samples, np.float64)
    mean, half = float(values.mean()), 0.0
    if len(values) > 1:
        half = float(special.stdtrit(len(values) - 1, 0.975) * values.std(ddof=1) / np.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half)


def geometric_mean(ratios: Sequence[float]) -> Interval:
    """With the interval of `mean_interval` of the logarithms."""
    found = mean_interval(np.log(ratios))
    return Interval(*(float(np.exp(x)) for x in (found.median, found.low, found.high)))


def _bootstrap(samples: tuple[np.ndarray, ...], statistic: Callable[..., Any]) -> Interval:
    """With its percentile bootstrap (Efron 1979). The seed is fixed, so the same samples give the same interval."""
    from scipy import stats  # a tenth of the time to the first step of train.py, which needs none of it

    value = float(statistic(*samples, axis=-1))
    if len(samples[0]) < 2:
        return Interval(value, value, value)
    how: dict[str, Any] = {"vectorized": True, "paired": len(samples) > 1, "method": "percentile"}
    found = stats.bootstrap(samples, statistic, n_resamples=RESAMPLES, rng=np.random.default_rng(0), **how).confidence_interval
    return Interval(value, float(found.low), float(found.high))
