"""The order in which arms run: short blocks of steps that alternate, so that drift reaches all of them alike.

A cycle gives every arm two blocks: in some order and then in its reverse (ABBA). Whatever drifts evenly through a cycle
adds the same to all of them. In as many cycles as there are arms, every arm stands at every place equally often.
"""

import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

# Steps that open a block and are not counted. The first finds the GPU's queue empty and waits for the host to fill it: 1 to 3
# of GPT-2's 62 to 78 ms on an H200. In training that happens after a line of metrics or an evaluation, not at every fifth step.
LEAD_IN = 1
BLOCK_MS = 250.0  # of a block whose length the protocol chooses
LEAST_STEPS, MOST_STEPS = 5, 100  # of such a block

Cycle = Mapping[str, list[list[float]]]  # by name: the steps of its two blocks


def run_blocks(
    block: Callable[[str, int], list[float]],
    names: Sequence[str],
    cycles: int,
    seed: int,
    kept: Sequence[Cycle] = (),
    before_cycle: Callable[[int], None] = lambda cycle: None,
    after_cycle: Callable[[Cycle], None] = lambda found: None,
) -> dict[str, list[list[float]]]:
    """The step times that block(name, cycle) returned, by name, in the order in which the blocks ran.

    The first cycle that runs, cycle 0, is not counted: it brings clocks and caches to where they stay. It has the order of the
    last cycle, so that the counted cycles begin a round.

    Args:
        kept: the first cycles, from an earlier process. The last of them then runs in the place of cycle 0, uncounted too.
        after_cycle: called with each counted cycle that has run here.
    """
    found, orders = list(kept), list(block_orders(names, cycles, seed))
    with no_garbage_collection():
        for cycle in range(len(kept), cycles + 1):
            before_cycle(cycle)
            ran: dict[str, list[list[float]]] = {name: [] for name in names}
            for name in orders[cycle - 1]:
                ran[name].append(block(name, cycle))
            if cycle > len(kept):
                found.append(ran)
                after_cycle(ran)
    return {name: [times for cycle in found for times in cycle[name]] for name in names}


def block_orders(names: Sequence[str], cycles: int, seed: int) -> Iterator[Sequence[str]]:
    """For each cycle the names in the order of their blocks.

    A new order is drawn once in as many cycles as there are names. In between, the first name moves to the end.
    """
    shuffle = random.Random(seed).shuffle
    order = list(names)
    for cycle in range(cycles):
        if cycle % len(order):
            order = [*order[1:], order[0]]
        else:
            shuffle(order)
        yield [*order, *reversed(order)]


def memory_orders(arms: int, cycles: int, seed: int) -> list[tuple[int, ...]]:
    """For cycle 0 and each counted cycle the place in memory of every arm.

    In as many cycles as there are arms, each arm has each place once. Cycle 0 has the order of the last cycle.
    """
    names = [str(arm) for arm in range(arms)]
    counted = [tuple(int(arm) for arm in order[:arms]) for order in block_orders(names, cycles, seed + 1)]
    return [counted[-1], *counted]


def block_length(warm_up_ms: Sequence[Sequence[float]], block_ms: float = BLOCK_MS) -> int:
    """Steps of a block, from the warm-up steps of each arm: those of the slowest arm then last `block_ms`.

    Five steps of a model that waits for its host end after 25 ms, and show the noise of the host. The fastest warm-up step of
    an arm is one that did not compile.
    """
    slowest = max(min(steps) for steps in warm_up_ms)
    return min(max(math.ceil(block_ms / slowest), LEAST_STEPS), MOST_STEPS)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python collects its garbage once before, and not inside."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
