"""Arms that are compared, the comparison of their step times, and the sentence that it allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from measure.statistics import Interval, paired_difference, paired_ratio
from measure.tables import interval_text

TORCH, AGAIN, FUSED = ARMS = ("torch", "torch again", "fused")  # the second is the A/A control
NO_KERNEL = "No kernel was measured: fused norms took the CPU reference path, so the figures say nothing about the kernels"


@dataclass(frozen=True)
class Comparison:
    """An arm with `torch`. A pair is a cycle: of each arm the mean of its two blocks."""

    difference_ms: Interval  # arm − torch, below 0 where the arm is faster
    speedup: Interval  # torch / arm, above 1 where the arm is faster


def compare_blocks(torch_blocks: Sequence[Sequence[float]], arm_blocks: Sequence[Sequence[float]]) -> Comparison:
    """Compares the step times of an arm with those of `torch`, both by block."""
    torch_ms, arm_ms = cycle_times(torch_blocks), cycle_times(arm_blocks)
    return Comparison(paired_difference(arm_ms, torch_ms), paired_ratio(torch_ms, arm_ms))


def cycle_times(blocks_ms: Sequence[Sequence[float]]) -> list[float]:
    """A step's time in each cycle: the mean over the cycle's two blocks of the block's median step."""
    typical = [median(block) for block in blocks_ms]
    return [fmean(pair) for pair in zip(typical[::2], typical[1::2], strict=True)]


def is_different(fused: Comparison, control: Comparison) -> bool:
    """Whether fused may be called faster or slower than torch.

    Its interval must leave out 1, and its median must be further from 1 than both ends of the A/A control's interval. NaN
    differs from nothing.
    """
    found = fused.speedup.low > 1 or fused.speedup.high < 1
    distance = abs(fused.speedup.median - 1)
    return found and distance > abs(control.speedup.low - 1) and distance > abs(control.speedup.high - 1)


def conclusion(fused: Comparison, control: Comparison) -> str:
    """One sentence without its full stop: faster, slower, or no difference found and why."""
    if fused.speedup.median != fused.speedup.median:
        return "no conclusion: the step times are not numbers"
    of = fused.speedup
    speedup = f"{of.median:.3f} × (95 % {of.low:.3f} to {of.high:.3f})"
    aa = f"A/A {interval_text(control.speedup)}"
    if not control.speedup.holds(1):
        # Two equal arms may stay apart in every cycle, by where their memory lies. No interval over cycles shows that.
        aa += ", which leaves out 1: intervals here may be too narrow"
    if not is_different(fused, control):
        why = "its interval contains 1" if of.holds(1) else "A/A shows as much"
        return f"no difference found: fused norms {speedup} as fast as PyTorch's, and {why}; {aa}"
    return f"fused norms {speedup} as fast as PyTorch's{', that is slower' if of.median < 1 else ''}; {aa}"
