"""Whether the outcomes of several arms differ: losses of the runs that trained, and how many runs did not.

Loss: the Behrens–Fisher test (Fisher 1935), the one for two normal samples of unknown and unequal variances whose error is at
most what was asked for, whatever the variances and however few the runs (Robinson 1976). Welch's approximation, which has more
power, errs in up to a tenth of studies of three runs whose arms differ in spread: benchmarks/study_errors.py.

Failure: Fisher's exact test of the two numbers of runs that failed. Without a failed run there is nothing to test (Tarone
1990).

Holm (1979) makes the level that of all tests of a study together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from scipy import optimize, special, stats

from measure.statistics import Interval

LEVEL = 0.05  # of all tests of a study together
NODES, WEIGHTS = (of / 2 for of in np.polynomial.legendre.leggauss(200))  # over the ranks of the other mean's error


@dataclass(frozen=True)
class Sample:
    """The runs of an arm."""

    losses: Sequence[float]  # of those that trained
    failed: int = 0  # how many did not
    cost: float = 0.0  # the most that the arm could gain by a better learning rate, in nats

    @property
    def runs(self) -> int:
        return len(self.losses) + self.failed

    @cached_property
    def error(self) -> float:
        """The standard error of the mean; infinite of fewer than two runs."""
        return float(np.std(self.losses, ddof=1)) / math.sqrt(len(self.losses)) if len(self.losses) > 1 else math.inf


@dataclass(frozen=True)
class Difference:
    """An arm − a base. A p is that of all tests of the study together; it is None where there was no such test."""

    loss: Interval | None  # the mean difference with its own 95 % interval; None where fewer than two runs of either trained
    p_loss: float | None = None
    p_failed: float | None = None  # None where all runs of both trained

    @property
    def verdict(self) -> str:
        """ "lower" or "higher" where the losses differ, or nothing."""
        if self.loss is None or self.p_loss is None or self.p_loss > LEVEL:
            return ""
        return "lower" if self.loss.median < 0 else "higher"

    @property
    def fails(self) -> bool:
        """Whether the shares of runs that failed differ."""
        return self.p_failed is not None and self.p_failed <= LEVEL

    @property
    def none(self) -> bool:
        """Whether "no difference was found" may be said: only where a test was made and no run of either failed."""
        return self.p_loss is not None and self.p_failed is None and not self.verdict


def differences(samples: Mapping[str, Sample], pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Difference]:
    """By (arm, base), each judged among all that are asked for."""
    found = {pair: difference(samples[pair[0]], samples[pair[1]]) for pair in pairs}
    raw = {
        (pair, field): p
        for pair, of in found.items()
        for field in ("p_loss", "p_failed")
        if (p := getattr(of, field)) is not None
    }
    for (pair, field), p in zip(raw, holm(list(raw.values())), strict=True):
        found[pair] = replace(found[pair], p_loss=p) if field == "p_loss" else replace(found[pair], p_failed=p)
    return found


def difference(arm: Sample, base: Sample) -> Difference:
    """Of two samples alone.

    Either could have had a lower loss at a better rate, by its cost at most. So the interval reaches further by the arm's cost
    at its low end and by the base's at its high end, and the test is of the nearest such difference to 0.
    """
    p_failed = None
    if arm.failed or base.failed:
        p_failed = float(stats.fisher_exact([[one.failed, len(one.losses)] for one in (arm, base)]).pvalue)
    if min(len(arm.losses), len(base.losses)) < 2:
        return Difference(None, None, p_failed)
    mean = float(np.mean(arm.losses) - np.mean(base.losses))
    half = half_width(arm, base)
    interval = Interval(mean, mean - half - arm.cost, mean + half + base.cost)
    return Difference(interval, tail(max(abs(mean) - (base.cost if mean < 0 else arm.cost), 0.0), arm, base), p_failed)


def tail(distance: float, *samples: Sample) -> float:
    """P(|s₁T₁ + s₂T₂| ≥ distance) with the standard errors s of two means and independent T of Student's distributions."""
    wide, narrow = sorted(samples, key=lambda one: -one.error)
    if wide.error == 0.0:
        return float(distance == 0.0)
    other = narrow.error * _of_ranks(len(narrow.losses) - 1)
    return (
        float(2 * (WEIGHTS * special.stdtr(len(wide.losses) - 1, (other - distance) / wide.error)).sum()) if distance else 1.0
    )


@cache
def _of_ranks(degrees: int) -> np.ndarray:
    """Student's T at the ranks of NODES."""
    return special.stdtrit(degrees, 0.5 + NODES)


def half_width(arm: Sample, base: Sample) -> float:
    """Of the 95 % interval of the difference of two means."""
    most = sum(one.error * special.stdtrit(len(one.losses) - 1, 0.975) for one in (arm, base))
    return float(optimize.brentq(lambda x: tail(x, arm, base) - 0.05, 0.0, 1.01 * most)) if most else 0.0


def holm(p: Sequence[float]) -> list[float]:
    """The p of each test where all are made: the i-th smallest of n, i from 0, times n − i, and no smaller than any before."""
    order = np.argsort(p, kind="stable")
    raised = np.empty(len(p))
    raised[order] = np.minimum(np.maximum.accumulate(np.asarray(p, float)[order] * np.arange(len(p), 0, -1)), 1.0)
    return [float(one) for one in raised]
