"""Step times of the arms of one cell: short blocks that alternate, in one process, on the same weights and batches.

measure/schedule.py has the order of the blocks. Each block begins with the same weights and the same optimizer state, and all
arms of a cycle take the same batches. Two arms have PyTorch's norms: the difference between them is what the protocol measures
where there is none (A/A). Between cycles the arms exchange their places in memory: weights and optimizer state of each arm move
to the addresses of another's. So the effect of an address is spread over the arms. Buffers and activations lie where the
allocator puts them. With CUDA graphs, which contain the addresses, the arms stay.

A block contains training steps and CUDA events, and nothing that waits for the device. Warm-up, compilation, the copy of the
state and the reading of the events are outside. They leave the GPU without work, so the first step of a block is not counted:
it fills the queue, which is seldom empty in a training run.

All blocks of a cell have the same number of steps: ablate.block_steps, or what schedule.block_length says.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from statistics import median

from ablation.arms import Arm, Snapshot, move, places_of
from ablation.records import ArmTimes
from data import Batches
from measure.comparison import ARMS, TORCH
from measure.schedule import LEAD_IN, block_length, block_orders, memory_orders, positions_of, run_blocks
from measure.timing import allocated_gb
from training.clock import PartClock, StepClock
from training.step import makes_cuda_graphs, training_step

SPLIT_STEPS = 5  # steps of a window that times forward, backward and optimizer apart; each arm has two such windows


def time_arms(arms: Mapping[str, Arm], batches: Batches, done: Callable[[], object]) -> dict[str, ArmTimes]:
    """Times of the arms `torch`, `torch again` and `fused`, which have not taken a step.

    Args:
        done: called after each warm-up and each block, `calls_of(cycles)` times in all.
    """
    cfg, device = arms[TORCH].cfg, arms[TORCH].precision.device
    plan = cfg.ablate
    warm: list[list[float]] = []
    for arm in arms.values():
        clock = StepClock(device, warmup=0)
        run(arm, batches, range(plan.warmup_steps), clock)
        warm.append(list(clock.steps_ms))
        done()
    block_steps = plan.block_steps or block_length(warm)
    start = Snapshot(arms[TORCH])

    graphs = makes_cuda_graphs(cfg.train)
    peaks: dict[str, list[float]] = {name: [] for name in ARMS}

    def block(name: str, cycle: int) -> list[float]:
        start.restore(arms[name])
        clock = StepClock(device, warmup=LEAD_IN)
        before = allocated_gb(device)
        first = plan.warmup_steps + cycle * (LEAD_IN + block_steps)
        run(arms[name], batches, range(first, first + LEAD_IN + block_steps), clock)
        times = list(clock.steps_ms)
        if cycle > 0 and clock.peak_gb is not None and not graphs:  # the allocator does not count what a graph holds
            # Memory that was held before, above all by other arms, is not this arm's.
            peaks[name].append(clock.peak_gb - before + Snapshot.bytes_of(arms[name]) / 2**30)
        done()
        return times

    listed = [arms[name] for name in ARMS]
    places, orders = places_of(listed), memory_orders(1 + plan.cycles, cfg.seed, len(listed))

    def before_cycle(cycle: int) -> None:
        if not graphs:
            move(listed, places, orders[cycle])

    blocks = run_blocks(block, plan.cycles, cfg.seed, before_cycle=before_cycle)
    splits: dict[str, dict[str, list[float]]] = {name: {} for name in ARMS}
    for name in chain.from_iterable(block_orders(1, cfg.seed)):
        start.restore(arms[name])
        parts = PartClock(device)
        run(arms[name], batches, range(plan.warmup_steps, plan.warmup_steps + LEAD_IN + SPLIT_STEPS), parts=parts)
        done()
        for part, times in parts.read().items():
            splits[name].setdefault(part, []).extend(times[LEAD_IN:])
    found = {}
    for name in ARMS:
        split = {part: median(times) for part, times in splits[name].items()}
        found[name] = ArmTimes(
            blocks_ms=blocks[name],
            positions=positions_of(name, plan.cycles, cfg.seed),
            forward_ms=split["forward"],
            backward_ms=split["backward"],
            optimizer_ms=split["optimizer"],
            peak_gb=max(peaks[name], default=None),
            launches=None,  # a profiler would tell
        )
    return found


def calls_of(cycles: int) -> int:
    """How often time_arms calls `done`: for warm-up, two blocks in each cycle, and two windows that are split."""
    return len(ARMS) * (1 + 2 * (1 + cycles + 1))


def run(arm: Arm, batches: Batches, steps: range, clock: StepClock | None = None, parts: PartClock | None = None) -> None:
    """Takes training steps. A clock times them one by one. The batches are drawn before the first step."""
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
