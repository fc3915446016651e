"""Spread of repeated measurements, and differences and ratios of paired ones. NumPy only."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LEAST_SAMPLES = 6  # for a bootstrap's interval of a median: of 4 it misses the truth one time in 8, of 2 every other time


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


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float], resamples: int = 2000, seed: int = 0) -> Interval:
    """Median over rounds of numerator / denominator, with its bootstrap 95 % interval.

    Paired: sample i of both comes from the same round, so what slowed the whole round (clocks, neighbours) cancels.
    """
    return _bootstrap(np.asarray(numerator, np.float64) / np.asarray(denominator, np.float64), np.median, resamples, seed)


def paired_difference(first: Sequence[float], second: Sequence[float], resamples: int = 2000, seed: int = 0) -> Interval:
    """Median over rounds of first − second, with its bootstrap 95 % interval."""
    return _bootstrap(np.asarray(first, np.float64) - np.asarray(second, np.float64), np.median, resamples, seed)


def mean_interval(samples: Sequence[float] | np.ndarray) -> Interval:
    """The mean with Student's 95 % interval; of one sample, that sample.

    For seeds, of which there are few: a bootstrap of three values covers the truth three times in four.
    """
    values = np.asarray(samples, np.float64)
    mean, half = float(values.mean()), 0.0
    if len(values) > 1:
        half = _t_quantile(0.025, len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def t_tail(t: float, degrees: int) -> float:
    """P(T > t) of Student's t: the finite sums for whole degrees of freedom, Abramowitz & Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(abs(t) / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = cosine if odd else 1.0, 0.0
    for k in range(1 + odd, degrees, 2):  # each term is the last one times cos² · k / (k + 1)
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    tail = max(0.0, 1 - inside) / 2
    return tail if t > 0 else 1 - tail


@lru_cache
def _t_quantile(tail: float, degrees: int) -> float:
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, degrees) > tail else (low, middle)
    return low


def _bootstrap(samples: np.ndarray, statistic: Callable[..., np.ndarray], resamples: int, seed: int) -> Interval:
    """Efron 1979: the statistic of samples drawn anew from the samples, and its middle 95 %."""
    draws = np.random.default_rng(seed).integers(0, len(samples), (resamples, len(samples)))
    low, high = np.percentile(statistic(samples[draws], axis=1), (2.5, 97.5))
    return Interval(float(statistic(samples)), float(low), float(high))
