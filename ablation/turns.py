"""Blocks of steps that take turns, and what their times say. The protocol is stated at the head of timing.py."""

import gc
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median

from ablation.compared import AGAIN, FUSED, TORCH, Comparison
from ablation.statistics import paired_difference, paired_ratio

LINEUP = (TORCH, AGAIN, FUSED)
# Steps that open a block and are not counted. The first finds the GPU's queue empty and waits for the host to fill it: 1 to 3
# of GPT-2's 62 to 78 ms on an H200. Training does so after a line of metrics or an evaluation, not at every fifth step.
LEAD_IN = 1


def in_turn(
    block: Callable[[str, int], list[float]],
    cycles: int,
    seed: int,
    names: Sequence[str] = LINEUP,
    before_cycle: Callable[[int], None] = lambda cycle: None,
) -> dict[str, list[list[float]]]:
    """The blocks of each of `names`, in the order in which they ran: step times as block(name, cycle) returned them.

    Cycle 0 is not counted and has the order of the last one, so that what is counted begins a round of the arms.
    """
    blocks: dict[str, list[list[float]]] = {name: [] for name in names}
    counted = list(schedule(cycles, seed, names))
    with collection_paused():
        for cycle, order in enumerate([*counted[-1:], *counted]):
            before_cycle(cycle)
            for name in order:
                times = block(name, cycle)
                if cycle > 0:
                    blocks[name].append(times)
    return blocks


def turns_of(name: str, cycles: int, seed: int, names: Sequence[str] = LINEUP) -> list[int]:
    """Of each counted block of in_turn's `name`: how many counted blocks, of all arms, had run before it."""
    return [turn for turn, ran in enumerate(itertools.chain(*schedule(cycles, seed, names))) if ran == name]


def schedule(cycles: int, seed: int, names: Sequence[str] = LINEUP) -> Iterator[Sequence[str]]:
    """For each cycle the arms in the order of their blocks: some order, and then its reverse.

    Drawn anew once in as many cycles as there are arms, and in between the first goes last: ABBA cancels a drift that is even,
    and what else the ends or the middle of a cycle are worth goes to every arm equally often.
    """
    shuffle = random.Random(seed).shuffle
    order = list(names)
    for cycle in range(cycles):
        if cycle % len(order):
            order = [*order[1:], order[0]]
        else:
            shuffle(order)
        yield [*order, *reversed(order)]


def placements(cycles: int, seed: int, arms: int) -> list[tuple[int, ...]]:
    """For each cycle the place of every arm: all orders that there are, in turn, so that no arm has the better places."""
    orders = list(itertools.permutations(range(arms)))
    random.Random(seed).shuffle(orders)
    return [orders[cycle % len(orders)] for cycle in range(cycles)]


def compare_blocks(torch_blocks: Sequence[Sequence[float]], arm_blocks: Sequence[Sequence[float]]) -> Comparison:
    """An arm with `torch`, of step times by block; a pair is a cycle."""
    torch_ms, arm_ms = per_cycle(torch_blocks), per_cycle(arm_blocks)
    return Comparison(paired_difference(arm_ms, torch_ms), paired_ratio(torch_ms, arm_ms))


def per_cycle(blocks_ms: Sequence[Sequence[float]]) -> list[float]:
    """A step's time in each cycle: the mean of its two blocks, of each the median step."""
    typical = [median(block) for block in blocks_ms]
    return [fmean(pair) for pair in zip(typical[::2], typical[1::2], strict=True)]


@contextmanager
def collection_paused() -> Iterator[None]:
    """Python collects its garbage before, and not while this lasts."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
