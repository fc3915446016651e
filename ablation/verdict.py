"""What a comparison allows one to say, in words."""

from ablation.compared import Comparison
from ablation.statistics import Interval

NO_KERNEL = "No kernel was measured: fused norms took the CPU reference path, so the figures say nothing about the kernels"


def differs(fused: Comparison, control: Comparison) -> bool:
    """Whether fused may be called faster or slower than torch at all.

    Its interval must leave out 1, and it must be further from 1 than the A/A control may be, whose truth is 1. Figures that are
    NaN differ from nothing.
    """
    found = fused.speedup.low > 1 or fused.speedup.high < 1
    distance = abs(fused.speedup.median - 1)
    return found and distance > abs(control.speedup.low - 1) and distance > abs(control.speedup.high - 1)


def verdict_of(fused: Comparison, control: Comparison) -> str:
    """One sentence, without the full stop: faster, slower, or no difference found and why."""
    if fused.speedup.median != fused.speedup.median:
        return "no verdict: the step times are no numbers"
    speedup, unchanged = times(fused.speedup), f"A/A {plain(control.speedup)}"
    if control.speedup.low > 1 or control.speedup.high < 1:
        # Equal arms that stay apart (by where their memory lies, say) are so in every cycle, which no interval of cycles shows.
        unchanged += ", which leaves out 1: intervals here may be too narrow"
    if not differs(fused, control):
        why = "its interval contains 1" if fused.speedup.holds(1) else "A/A shows as much"
        return f"no difference found: fused norms {speedup} as fast as PyTorch's, and {why}; {unchanged}"
    slower = ", that is slower" if fused.speedup.median < 1 else ""
    return f"fused norms {speedup} as fast as PyTorch's{slower}; {unchanged}"


def times(interval: Interval) -> str:
    """1.203 × (95 % 1.195 to 1.211)"""
    return f"{interval.median:.3f} × (95 % {interval.low:.3f} to {interval.high:.3f})"


def plain(interval: Interval, digits: int = 3) -> str:
    """1.000 (0.999 to 1.001); no −0.000."""
    median, low, high = (f"{round(value, digits) + 0.0:.{digits}f}" for value in (interval.median, interval.low, interval.high))
    return f"{median} ({low} to {high})".replace("-", "−")
