"""Arms that are compared in pairs, the comparison of their step times, and the sentence that it allows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import fmean, median

from measure.statistics import Interval, paired_difference, paired_ratio, ratio_of_means
from measure.tables import interval_text

TORCH, AGAIN, FUSED = "torch", "torch again", "fused"
TWIN = " again"  # ends the name of an arm that is another one once more: the A/A control of that arm
STALL = 2.0  # times the median step
NO_KERNEL = "No kernel was measured: what is fused took the CPU reference path, so the figures say nothing about the kernels"


@dataclass(frozen=True)
class Comparison:
    """An arm with a base, another arm. A pair is a cycle: of each arm the mean of its two blocks."""

    difference_ms: Interval  # arm − base, below 0 where the arm is faster
    speedup: Interval  # base / arm, above 1 where the arm is faster: of median steps, the median over cycles
    mean_speedup: Interval  # the same of all steps together, in which steps that stall count


# By base, by arm: each pair once, in the order of the arms.
Pairs = dict[str, dict[str, Comparison]]


def compare_blocks(base_blocks: Sequence[Sequence[float]], arm_blocks: Sequence[Sequence[float]]) -> Comparison:
    """Compares the step times of an arm with those of a base, both by block."""
    base_ms, arm_ms = cycle_times(base_blocks), cycle_times(arm_blocks)
    means = (cycle_times(blocks, fmean) for blocks in (base_blocks, arm_blocks))
    return Comparison(paired_difference(arm_ms, base_ms), paired_ratio(base_ms, arm_ms), ratio_of_means(*means))


def compare_all(blocks_ms: Mapping[str, Sequence[Sequence[float]]]) -> Pairs:
    """Every pair of arms. An A/A control is one of the arm that it is once more, and of no other."""
    names, pairs = list(blocks_ms), Pairs()
    for at, base in enumerate(names):
        arms = [] if is_twin(base) else [arm for arm in names[at + 1 :] if not is_twin(arm) or arm == base + TWIN]
        if arms:
            pairs[base] = {arm: compare_blocks(blocks_ms[base], blocks_ms[arm]) for arm in arms}
    return pairs


def is_twin(arm: str) -> bool:
    return arm.endswith(TWIN)


def cycle_times(blocks_ms: Sequence[Sequence[float]], of: Callable[[Sequence[float]], float] = median) -> list[float]:
    """A step's time in each cycle: the mean over the cycle's two blocks of the block's median step, or of another statistic."""
    typical = [of(block) for block in blocks_ms]
    return [fmean(pair) for pair in zip(typical[::2], typical[1::2], strict=True)]


def stalls(blocks_ms: Sequence[Sequence[float]]) -> tuple[int, float]:
    """How many steps take more than STALL times the median one, and the share of all time that is theirs."""
    steps = [ms for block in blocks_ms for ms in block]
    stalled = [ms for ms in steps if ms > STALL * median(steps)]
    return len(stalled), sum(stalled) / sum(steps)


def is_different(comparison: Comparison, *controls: Comparison) -> bool:
    """Whether the arm may be called faster or slower than the base.

    Beside `differs`, the interval of all steps together must leave out 1 on the same side: a median does not see one step of
    twenty that stalls.
    """
    return _agree(comparison) and differs(comparison.speedup, reach(control.speedup for control in controls))


def differs(ratio: Interval, noise: float) -> bool:
    """Whether a ratio of times may be called other than 1: its interval leaves out 1, and it is further from 1 than A/A
    reaches. NaN differs from nothing."""
    return not ratio.holds(1.0) and abs(ratio.median - 1) > noise


def reach(controls: Iterable[Interval]) -> float:
    """The furthest from 1 that an A/A interval reaches; 0 without any."""
    return max((abs(end - 1) for of in controls for end in (of.low, of.high)), default=0.0)


def _agree(comparison: Comparison) -> bool:
    """Whether the intervals of the median and of the mean leave out 1 on the same side."""
    found, mean = comparison.speedup, comparison.mean_speedup
    return min(found.low, mean.low) > 1 or max(found.high, mean.high) < 1


def conclusion(subject: str, of: Mapping[str, Comparison], *controls: Comparison) -> str:
    """One sentence without its full stop: the subject's speed-up over the fastest opponent, then over each of the others.

    Args:
        of: the comparisons of the subject with its opponents, the fastest first.
        controls: A/A, of the arms that were timed twice.
    """
    (fastest, comparison), *others = of.items()
    found, mean = comparison.speedup, comparison.mean_speedup
    if isnan(found.median):
        return "no conclusion: the step times are not numbers"
    against = f"{fastest}, the fastest other arm" if others else fastest
    if is_different(comparison, *controls):
        slower = ", that is slower" if found.median < 1 else ""
        said = f"{subject} {_words(found)} as fast as {against}{slower}"
    else:
        why = "its interval contains 1" if found.holds(1) else "that of all steps does not agree"
        why = "A/A shows as much" if _agree(comparison) else why
        said = f"no difference found between {subject} and {against}: {_words(found)}, and {why}"
    if found.high < mean.low or mean.high < found.low:
        said += f"; of all steps together, some of which stall, {_words(mean)}"
    rest = [f"against {name} {_words(other.speedup)}" for name, other in others]
    # Two equal arms may stay apart in every cycle, by where their memory lies. No interval over cycles shows that.
    narrow = "" if all(one.speedup.holds(1) for one in controls) else ", which leaves out 1: intervals here may be too narrow"
    return "; ".join([said, *rest, f"A/A {' and '.join(interval_text(one.speedup) for one in controls)}{narrow}"])


def _words(speedup: Interval) -> str:
    return f"{speedup.median:.3f} × (95 % {speedup.low:.3f} to {speedup.high:.3f})"
