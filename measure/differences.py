"""Whether the outcomes of several arms differ: losses of runs that trained, and how many runs did not.

Runs are few, and arms differ in spread, so a mean is compared by Welch's t-test (1947), whose variances are moderated: of
three losses that lie close together by chance no more is believed than the other arms allow. As in Smyth (2004), what is
typical is the geometric mean of the arms' variances, each freed of the bias of its logarithm. A variance below it counts as
typical, and has PRIOR degrees of freedom more for each arm beside the two that are compared. One above it counts as it is.
Where there are two arms alone, nothing is typical, and the degrees of freedom lie half way between Welch's and those of the
smaller sample. Runs that failed are no losses: their number is compared by Fisher's exact test, and never averaged into a
loss. All tests of a study together have the level LEVEL (Holm, 1979).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import special, stats

from measure.statistics import Interval

LEVEL = 0.04  # Welch's test of three runs errs a little more often than it is asked to: 0.05 is kept
PRIOR = 0.75  # degrees of freedom that another arm lends
LEAST_RUNS = 3  # that trained, of either arm: of two, a variance tells nothing


@dataclass(frozen=True)
class Sample:
    """The runs of an arm."""

    losses: Sequence[float]  # of those that trained
    failed: int = 0  # how many did not
    error: float = 0.0  # standard error of the mean beside that of the losses, such as that of a learning rate

    @property
    def runs(self) -> int:
        return len(self.losses) + self.failed


@dataclass(frozen=True)
class Difference:
    """An arm − a base. A p is that of all tests of the study together: below LEVEL the two differ."""

    loss: Interval | None  # its mean and its own 95 % interval; None where too few runs trained
    p_loss: float | None  # None without an interval
    p_failed: float | None  # None where all runs of both trained

    @property
    def lower(self) -> bool:
        return self.p_loss is not None and self.p_loss < LEVEL and self.loss is not None and self.loss.median < 0

    @property
    def higher(self) -> bool:
        return self.p_loss is not None and self.p_loss < LEVEL and self.loss is not None and self.loss.median > 0

    @property
    def fails(self) -> bool:
        """Whether the shares of runs that failed differ."""
        return self.p_failed is not None and self.p_failed < LEVEL

    @property
    def none(self) -> bool:
        """Whether "no difference was found" may be said: not where a run of either failed, nor where too few were made."""
        return self.p_failed is None and self.p_loss is not None and self.p_loss >= LEVEL


class Spread(NamedTuple):
    variance: float  # of a run
    degrees: float  # of freedom


def differences(samples: Mapping[str, Sample], pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Difference]:
    """By (arm, base).

    Args:
        samples: of all arms of the study, also of those that are in no pair: they tell what spread is typical.
    """
    spreads = moderated({name: of.losses for name, of in samples.items()})
    losses, p = dict[tuple[str, str], Interval](), dict[tuple[tuple[str, str], str], float]()
    for pair in pairs:
        of = [samples[name] for name in pair]
        if any(one.failed for one in of):
            p[pair, "failed"] = float(stats.fisher_exact([[one.failed, len(one.losses)] for one in of]).pvalue)
        if min(len(one.losses) for one in of) >= LEAST_RUNS:
            own = [spreads[name] for name in pair]
            losses[pair], p[pair, "loss"] = welch(of[0], of[1], own[0], own[1], alone=len(spreads) < 3)
    raised = dict(zip(p, holm(list(p.values())), strict=True))
    return {pair: Difference(losses.get(pair), raised.get((pair, "loss")), raised.get((pair, "failed"))) for pair in pairs}


def moderated(losses: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    """Of each arm with two losses or more, as the head of this file says."""
    own = {name: Spread(float(np.var(of, ddof=1)), len(of) - 1) for name, of in losses.items() if len(of) > 1}
    if len(own) < 3:
        return own
    with np.errstate(divide="ignore"):  # of equal losses
        logs = [np.log(of.variance) - special.digamma(of.degrees / 2) + math.log(of.degrees / 2) for of in own.values()]
    typical, lent = math.exp(float(np.mean(logs))), PRIOR * (len(own) - 2)
    return {name: of if of.variance > typical else Spread(typical, of.degrees + lent) for name, of in own.items()}


def welch(arm: Sample, base: Sample, *spreads: Spread, alone: bool) -> tuple[Interval, float]:
    """The mean of arm − base with its 95 % interval, and the p of no difference."""
    mean = float(np.mean(arm.losses) - np.mean(base.losses))
    parts = [of.variance / len(sample.losses) for of, sample in zip(spreads, (arm, base), strict=True)]
    square = sum(parts) + arm.error**2 + base.error**2
    if square == 0.0:
        return Interval(mean, mean, mean), float(mean == 0.0)
    degrees = square**2 / max(sum(part**2 / of.degrees for part, of in zip(parts, spreads, strict=True)), 1e-300)
    if alone:
        degrees = (degrees + min(of.degrees for of in spreads)) / 2
    half = float(special.stdtrit(degrees, 0.975)) * math.sqrt(square)
    return Interval(mean, mean - half, mean + half), float(2 * special.stdtr(degrees, -abs(mean) / math.sqrt(square)))


def holm(p: Sequence[float]) -> list[float]:
    """The p of each test where all are made: the i-th smallest of n, i from 0, times n − i, and no smaller than any before."""
    order = np.argsort(p, kind="stable")
    raised = np.empty(len(p))
    raised[order] = np.minimum(np.maximum.accumulate(np.asarray(p, float)[order] * np.arange(len(p), 0, -1)), 1.0)
    return raised.tolist()
