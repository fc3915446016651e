"""What an ablation finds, as plain data: timing, parity and attribution fill it, the report reads it, JSON keeps it."""

from dataclasses import dataclass, field
from typing import Any

from ablation.compared import Comparison, Quantity
from ablation.judgement import Distances
from ablation.statistics import Interval
from training.attribution import Kernel, Share


@dataclass(frozen=True)
class ArmTimes:
    """Step times of one arm of a cell."""

    blocks_ms: list[list[float]]  # a list for each block, in the order in which the blocks ran
    turns: list[int] | None  # of each block: how many counted ones, of all arms, had run before it; older records do not tell
    forward_ms: float  # medians of a window of its own, since marks inside a step cost time
    backward_ms: float
    optimizer_ms: float
    peak_gb: float | None  # GiB; None but on CUDA, and with CUDA graphs, whose memory the allocator does not tell
    launches: int | None  # kernels a step; None but on CUDA


@dataclass(frozen=True)
class Attribution:
    """Where the GPU time of a step goes, and what that leaves for any norm kernel to gain."""

    torch: list[Share]
    fused: list[Share]
    norm_bytes: int  # the fewest that the norm sites of a step must move
    copy_gb_per_s: float  # measured in the same process
    bound: float  # Amdahl: the speed-up of a step whose norm sites run at copy bandwidth
    realised: float  # of the time between torch's norms and that bound, the part that fused saves; 1 is all
    kernels: dict[str, list[Kernel]] = field(default_factory=dict)  # by arm: what the shares are sums of, longest first


@dataclass(frozen=True)
class Cell:
    """One configuration, eager or compiled."""

    overrides: dict[str, str]  # the swept keys and their values
    mode: str  # eager or compiled
    tokens_per_step: int
    arms: dict[str, ArmTimes]  # by name: torch, torch again, fused
    fused: Comparison
    control: Comparison  # torch again: what no difference looks like
    verdict: str
    attribution: Attribution | None = None  # None but on CUDA
    # By arm, while it takes steps, each reading of clocks and power with units, by nvidia-smi's names; nothing where that is
    # missing.
    gpu: dict[str, list[dict[str, str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Parity:
    overrides: dict[str, str]
    precision: str  # of the run
    seeds: list[int]
    steps: int
    losses: dict[str, list[list[float]]]  # by arm: for each seed, for each step; nats per token
    quantities: list[Quantity]
    val_loss: dict[str, list[float]]  # by arm: for each seed
    val_difference: Interval  # fused − torch, pairs are seeds: the mean, with Student's interval
    val_spread: float  # standard deviation of torch's over seeds
    holds: bool
    verdict: str
    # What follows is empty in records that are older than it.
    gradient_norms: dict[str, list[list[float]]] = field(default_factory=dict)  # as losses, before clipping
    # As losses, without the reference's: of each layer's gradient rms(x − a) / rms(a), where a is the reference's.
    gradient_errors: dict[str, list[list[dict[str, float]]]] = field(default_factory=dict)
    distances: dict[str, list[Distances]] = field(default_factory=dict)  # by quantity: for each seed; the tests are of these


@dataclass(frozen=True)
class Ablation:
    cells: list[Cell]
    parity: list[Parity]
    environment: dict[str, Any]
    command: str
    config: str  # YAML
    kernels: bool  # whether fused ran kernels; else the PyTorch reference
    notes: list[str] = field(default_factory=list)  # what a reader must know beside the figures
    unfinished: str = ""  # how much there is of what was asked for, if not all
