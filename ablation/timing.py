"""Step times of arms: short blocks that alternate, in one process, on the same weights and batches.

docs/ablation.md has the protocol, and measure/schedule.py the order of the blocks. A block contains training steps and CUDA
events, and nothing that waits for the device. Warm-up, compilation, the copy of the state and the reading of the events are
outside. They leave the GPU without work, so the first step of a block is not counted.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from ablation.arms import Arm, Snapshot, move, places_of
from ablation.records import ArmTimes
from measure.clock import StepClock
from measure.comparison import TORCH
from measure.schedule import LEAD_IN, Cycle, block_length, memory_orders, run_blocks
from measure.timing import allocated_gb, describe, free_memory
from training.step import STEPS_TO_GRAPH


def time_arms(
    arms: Mapping[str, Arm],
    may_fail: Collection[str] = (),
    kept: Callable[[Collection[str]], Sequence[Cycle]] = lambda arms: (),
    keep: Callable[[Cycle], None] = lambda blocks_ms: None,
) -> tuple[dict[str, ArmTimes], dict[str, str]]:
    """Times arms that have not taken a step, `torch` among them.

    Args:
        may_fail: arms that are left out if their warm-up fails.
        kept: of the arms that are timed, the first cycles, from an earlier process.
        keep: called with each counted cycle after it.

    Returns:
        The times, and why arms are left out.
    """
    cfg, device = arms[TORCH].cfg, arms[TORCH].precision.device
    captured = arms[TORCH].update.graph
    plan, arms = cfg.ablate, dict(arms)
    warm_up = max(plan.warmup_steps, STEPS_TO_GRAPH * captured)
    failed: dict[str, str] = {}
    warm: dict[str, list[float]] = {}
    first: dict[str, float] = {}  # losses
    for name in list(arms):
        clock = StepClock(device, warmup=0)
        try:
            run(arms[name], range(1), clock)
            first[name] = arms[name].step.loss.item()
            warm[name] = run(arms[name], range(1, warm_up), clock)
        except Exception as error:  # a library's failure is a result
            if name not in may_fail:
                raise
            failed[name] = describe(error)
            del arms[name]
            free_memory(device)
    names, before = list(arms), kept(arms)
    # All blocks of a cell have the same number of steps.
    block_steps = len(before[0][TORCH][0]) if before else plan.block_steps or block_length(list(warm.values()))
    ours = [arm for arm in arms.values() if not arm.other]
    start = Snapshot(arms[TORCH])
    starts = {name: start if not arm.other else Snapshot(arm) for name, arm in arms.items()}
    places, orders = places_of(ours), memory_orders(len(ours), plan.cycles, cfg.seed)
    peaks: dict[str, float] = {}  # GiB

    def before_cycle(cycle: int) -> None:
        if not captured:  # which contain addresses
            move(ours, places, orders[cycle])

    def block(name: str, cycle: int) -> list[float]:
        starts[name].restore(arms[name])
        clock = StepClock(device, warmup=LEAD_IN)
        held = allocated_gb(device)
        begin = warm_up + cycle * (LEAD_IN + block_steps)
        times = run(arms[name], range(begin, begin + LEAD_IN + block_steps), clock)
        if clock.peak_gb is not None and not captured:  # the allocator does not count what a graph holds
            # Memory that was held before, above all by other arms, is not this arm's.
            own = clock.peak_gb - held + starts[name].nbytes / 2**30
            peaks[name] = max(peaks.get(name, 0.0), own)
        return times

    blocks = run_blocks(block, names, plan.cycles, cfg.seed, before, before_cycle, keep)
    return {name: ArmTimes(blocks[name], peaks.get(name), launches=None, first_loss=first[name]) for name in names}, failed


def run(arm: Arm, steps: range, clock: StepClock) -> list[float]:
    """The times of the clock after these steps. What the first one reads is made before."""
    arm.inputs.load(steps.start)
    return clock.times(arm.step, steps)
