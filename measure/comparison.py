"""Arms that are compared in pairs, the comparison of their step times, and the sentence that it allows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import fmean, median

from measure.statistics import Interval, paired_difference, paired_ratio
from measure.tables import interval_text

TORCH, AGAIN, FUSED = "torch", "torch again", "fused"  # the second is the A/A control
NANOGPT = "nanogpt"  # an arm that is no value of norm.impl
NO_KERNEL = "No kernel was measured: fused norms took the CPU reference path, so the figures say nothing about the kernels"


@dataclass(frozen=True)
class Comparison:
    """An arm with a base, another arm. A pair is a cycle: of each arm the mean of its two blocks."""

    difference_ms: Interval  # arm − base, below 0 where the arm is faster
    speedup: Interval  # base / arm, above 1 where the arm is faster


# By base, by arm: each pair once, in the order of the arms.
Pairs = dict[str, dict[str, Comparison]]


def compare_blocks(base_blocks: Sequence[Sequence[float]], arm_blocks: Sequence[Sequence[float]]) -> Comparison:
    """Compares the step times of an arm with those of a base, both by block."""
    base_ms, arm_ms = cycle_times(base_blocks), cycle_times(arm_blocks)
    return Comparison(paired_difference(arm_ms, base_ms), paired_ratio(base_ms, arm_ms))


def compare_all(blocks_ms: Mapping[str, Sequence[Sequence[float]]]) -> Pairs:
    """Every pair of arms. The A/A control is an arm of `torch` alone."""
    names, pairs = list(blocks_ms), Pairs()
    for at, base in enumerate(names):
        arms = [arm for arm in names[at + 1 :] if base != AGAIN and (arm != AGAIN or base == TORCH)]
        if arms:
            pairs[base] = {arm: compare_blocks(blocks_ms[base], blocks_ms[arm]) for arm in arms}
    return pairs


def cycle_times(blocks_ms: Sequence[Sequence[float]]) -> list[float]:
    """A step's time in each cycle: the mean over the cycle's two blocks of the block's median step."""
    typical = [median(block) for block in blocks_ms]
    return [fmean(pair) for pair in zip(typical[::2], typical[1::2], strict=True)]


def is_different(comparison: Comparison, control: Comparison) -> bool:
    """Whether the arm may be called faster or slower than the base.

    Its interval must leave out 1, and its median must be further from 1 than both ends of the A/A control's interval. NaN
    differs from nothing.
    """
    found = comparison.speedup.low > 1 or comparison.speedup.high < 1
    distance = abs(comparison.speedup.median - 1)
    return found and distance > abs(control.speedup.low - 1) and distance > abs(control.speedup.high - 1)


def conclusion(subject: str, of: Mapping[str, Comparison], control: Comparison) -> str:
    """One sentence without its full stop: the subject's speed-up over the fastest opponent, then over each of the others.

    Args:
        of: the comparisons of the subject with its opponents, the fastest first.
    """
    (fastest, comparison), *others = of.items()
    found = comparison.speedup
    if isnan(found.median):
        return "no conclusion: the step times are not numbers"
    against = f"{fastest}, the fastest other arm" if others else fastest
    if is_different(comparison, control):
        slower = ", that is slower" if found.median < 1 else ""
        said = f"{subject} {_words(found)} as fast as {against}{slower}"
    else:
        why = "its interval contains 1" if found.holds(1) else "A/A shows as much"
        said = f"no difference found between {subject} and {against}: {_words(found)}, and {why}"
    rest = [f"against {name} {_words(other.speedup)}" for name, other in others]
    # Two equal arms may stay apart in every cycle, by where their memory lies. No interval over cycles shows that.
    narrow = "" if control.speedup.holds(1) else ", which leaves out 1: intervals here may be too narrow"
    return "; ".join([said, *rest, f"A/A {interval_text(control.speedup)}{narrow}"])


def _words(speedup: Interval) -> str:
    return f"{speedup.median:.3f} × (95 % {speedup.low:.3f} to {speedup.high:.3f})"
