"""Spread of repeated measurements, and differences and ratios of paired ones. NumPy only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % interval."""

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


def _bootstrap(samples: np.ndarray, statistic: Callable[..., np.ndarray], resamples: int, seed: int) -> Interval:
    """Efron 1979: the statistic of samples drawn anew from the samples, and its middle 95 %."""
    draws = np.random.default_rng(seed).integers(0, len(samples), (resamples, len(samples)))
    low, high = np.percentile(statistic(samples[draws], axis=1), (2.5, 97.5))
    return Interval(float(statistic(samples)), float(low), float(high))
