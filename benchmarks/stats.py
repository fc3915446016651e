"""Spread of repeated measurements, and ratios of paired ones. NumPy only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Ratio:
    median: float
    low: float  # of the 95 % interval
    high: float


def spread(samples: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile, in the unit of the samples."""
    p10, median, p90 = np.percentile(np.asarray(samples, dtype=np.float64), (10, 50, 90))
    return Spread(float(median), float(p10), float(p90))


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float], resamples: int = 2000, seed: int = 0) -> Ratio:
    """Median over rounds of numerator / denominator, with its bootstrap 95 % interval.

    Paired: sample i of both comes from the same round, so what slowed the whole round (clocks, neighbours) cancels.
    """
    ratios = np.asarray(numerator, dtype=np.float64) / np.asarray(denominator, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(ratios), (resamples, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), (2.5, 97.5))
    return Ratio(float(np.median(ratios)), float(low), float(high))
