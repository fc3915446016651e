"""Step times of the arms of one cell: short blocks in turn, in one process, on the same weights and batches.

A cycle gives every arm two blocks, in a random order and then in its reverse (ABBA): what drifts evenly through a cycle adds
the same to all of them. Over three cycles every arm has stood first, second and third. Each block begins with the same weights
and the same optimizer state, and takes the batches that the other arms take in that cycle. A first cycle brings clocks and
caches to where they stay, and is not counted. There are two arms with PyTorch's norms: what they seem to differ by is what the
protocol makes of no difference. Between cycles the arms trade places: weights and optimizer state of each move to where
another's lay, through all orders of places, so that what a place is worth is spread over the arms. (Buffers and activations lie
where the allocator puts them.) CUDA graphs, which have the addresses in them, keep theirs.

Inside a block there are training steps and CUDA events, and nothing that waits for the device. Warm-up, compilation, copying
the state back and reading the events are outside. They leave the GPU without work, so a block opens with a step that is not
counted: it fills the queue, which in a training run seldom runs dry.

All blocks of a cell have the same number of steps: ablate.block_steps, or as many of the slowest arm's as make a quarter of a
second. Five steps of a model that waits for its host are over in 25 ms, and what they show is the host's noise.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from statistics import median

import torch

from ablation.arms import Arm, Snapshot, move, places_of
from ablation.compared import TORCH, Comparison
from ablation.records import ArmTimes
from ablation.turns import LEAD_IN, LINEUP, compare_blocks, in_turn, placements, schedule, turns_of
from configs.schema import CUDA_GRAPHS
from data import Batches
from training.clock import PartClock, StepClock
from training.step import training_step

BLOCK_MS = 250.0  # of a block whose length is left to the protocol
LEAST_STEPS, MOST_STEPS = 5, 100  # of such a block
SPLIT_STEPS = 5  # of a window that tells forward, backward and optimizer apart; each arm has two, in some order and its reverse
WARM_UP, BLOCKS = "warm-up", "blocks"  # kinds of work; a window that is split counts as a block


def time_arms(arms: Mapping[str, Arm], batches: Batches, progress: Callable[[str], None]) -> dict[str, ArmTimes]:
    """Times of the arms `torch`, `torch again` and `fused`, which have not taken a step.

    Args:
        progress: told the kind of each unit of work that is done, in all those of `work_of`.
    """
    cfg, device = arms[TORCH].cfg, arms[TORCH].precision.device
    plan = cfg.ablate
    warm: list[list[float]] = []
    for arm in arms.values():
        clock = StepClock(device, warmup=0)
        run(arm, batches, range(plan.warmup_steps), clock)
        warm.append(list(clock.steps_ms))
        progress(WARM_UP)
    block_steps = plan.block_steps or settled_steps(warm)
    start = Snapshot(arms[TORCH])

    graphs = cfg.train.compile and cfg.train.compile_mode in CUDA_GRAPHS
    peaks: dict[str, list[float]] = {name: [] for name in LINEUP}

    def block(name: str, cycle: int) -> list[float]:
        start.restore(arms[name])
        clock = StepClock(device, warmup=LEAD_IN)
        before = allocated(device)
        first = plan.warmup_steps + cycle * (LEAD_IN + block_steps)
        run(arms[name], batches, range(first, first + LEAD_IN + block_steps), clock)
        times = list(clock.steps_ms)
        if cycle > 0 and clock.peak_gb is not None and not graphs:  # the allocator does not count what a graph holds
            # Whatever else is held, other arms above all, is not this one's.
            peaks[name].append(clock.peak_gb - before + Snapshot.bytes_of(arms[name]) / 2**30)
        progress(BLOCKS)
        return times

    listed = [arms[name] for name in LINEUP]
    places, orders = places_of(listed), placements(1 + plan.cycles, cfg.seed, len(listed))

    def before_cycle(cycle: int) -> None:
        if not graphs:
            move(listed, places, orders[cycle])

    blocks = in_turn(block, plan.cycles, cfg.seed, before_cycle=before_cycle)
    splits: dict[str, dict[str, list[float]]] = {name: {} for name in LINEUP}
    for name in chain.from_iterable(schedule(1, cfg.seed)):
        start.restore(arms[name])
        parts = PartClock(device)
        run(arms[name], batches, range(plan.warmup_steps, plan.warmup_steps + LEAD_IN + SPLIT_STEPS), parts=parts)
        progress(BLOCKS)
        for part, times in parts.read().items():
            splits[name].setdefault(part, []).extend(times[LEAD_IN:])
    found = {}
    for name in LINEUP:
        split = {part: median(times) for part, times in splits[name].items()}
        found[name] = ArmTimes(
            blocks_ms=blocks[name],
            turns=turns_of(name, plan.cycles, cfg.seed),
            forward_ms=split["forward"],
            backward_ms=split["backward"],
            optimizer_ms=split["optimizer"],
            peak_gb=max(peaks[name], default=None),
            launches=None,  # a profiler would tell
        )
    return found


def settled_steps(warm_ms: Sequence[Sequence[float]]) -> int:
    """Steps of a block, from the times of each arm's warm-up steps. An arm's quickest is the one that did not compile."""
    slowest = max(min(steps) for steps in warm_ms)
    return min(max(math.ceil(BLOCK_MS / slowest), LEAST_STEPS), MOST_STEPS)


def work_of(cycles: int) -> dict[str, int]:
    """Units of work of time_arms by kind."""
    return {WARM_UP: len(LINEUP), BLOCKS: len(LINEUP) * 2 * (1 + cycles + 1)}


def compare(times: Mapping[str, ArmTimes], name: str) -> Comparison:
    """An arm with `torch`, a pair for each cycle."""
    return compare_blocks(times[TORCH].blocks_ms, times[name].blocks_ms)


def run(arm: Arm, batches: Batches, steps: range, clock: StepClock | None = None, parts: PartClock | None = None) -> None:
    """Steps of training; with a clock, timed one by one. The batches are drawn before."""
    drawn = [batches[step] for step in steps]
    for step, batch in zip(steps, drawn, strict=True):
        arguments = (arm.forward, arm.state, batch, step, arm.cfg, arm.precision)
        if clock is not None:
            with clock.step():
                training_step(*arguments)
        elif parts is not None:
            with parts.step():
                training_step(*arguments, mark=parts.mark)
        else:
            training_step(*arguments)


def allocated(device: torch.device) -> float:
    """GiB of tensors on a GPU."""
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
