"""What is compared with what, as plain data. Needs nothing of the programs, nor does what imports only this."""

from dataclasses import dataclass

from ablation.statistics import Interval

TORCH, AGAIN, FUSED = "torch", "torch again", "fused"  # the timed arms; the second is the A/A control


@dataclass(frozen=True)
class Comparison:
    """An arm with `torch`; a pair is a cycle, of each the mean of its two blocks."""

    difference_ms: Interval  # arm − torch, below 0 where the arm is faster
    speedup: Interval  # torch / arm, above 1 where the arm is faster


@dataclass(frozen=True)
class Quantity:
    """One thing that parity compares between the arms."""

    name: str  # loss, gradient norm, gradient of a layer, parameters
    fused: Interval  # the fused arm's distance from fp32, over what rounding leads one to expect; geometric mean over seeds
    reordered: Interval  # the same of PyTorch's norms with another order of summation: what a legitimate change looks like
    holds: bool
