"""Who runs when, and what a comparison of the step times may claim."""

import re
from collections import Counter

import numpy as np
import pytest

from ablation.config import AblateConfig
from measure import schedule
from measure.comparison import (
    AGAIN,
    FUSED,
    TORCH,
    TWIN,
    Comparison,
    compare_all,
    compare_blocks,
    conclusion,
    is_different,
    stalls,
)
from measure.statistics import Interval

ARMS = (TORCH, AGAIN, FUSED)


@pytest.mark.parametrize("names", [ARMS, ("a", "b"), ("a", "b", "c", "d", "e")])
def test_every_cycle_is_an_order_and_its_reverse_and_every_arm_has_every_place_equally_often(names):
    orders = [list(order) for order in schedule.block_orders(names, 3 * len(names), seed=1)]
    assert all(order == order[::-1] and sorted(order[: len(names)]) == sorted(names) for order in orders)
    for place in range(2 * len(names)):
        assert Counter(order[place] for order in orders) == dict.fromkeys(names, 3)
    assert orders != [list(order) for order in schedule.block_orders(names, 3 * len(names), seed=2)]
    first, *places = schedule.memory_orders(len(names), 3 * len(names), seed=1)
    assert first == places[-1] and all(sorted(order) == list(range(len(names))) for order in places)
    for arm in range(len(names)):
        assert Counter(order[arm] for order in places) == dict.fromkeys(range(len(names)), 3)


def test_the_first_cycle_is_not_counted_and_has_the_order_of_the_last():
    cycles, ran = AblateConfig().cycles, []
    blocks = schedule.run_blocks(lambda name, cycle: ran.append((cycle, name)) or [1.0], ARMS, cycles, seed=3)
    orders = [[name for at, name in ran if at == cycle] for cycle in range(cycles + 1)]
    expected = list(map(list, schedule.block_orders(ARMS, cycles, 3)))
    assert orders == [expected[-1], *expected]
    assert {name: len(of) for name, of in blocks.items()} == dict.fromkeys(ARMS, 2 * cycles)


@pytest.mark.parametrize(
    ("warm_ms", "steps"),
    [
        ([[900, 5.0, 5.5], [6.0, 5.0, 4.9], [30_000, 4.0, 4.0]], 50),  # compilation is no step time
        ([[9, 4.9], [6, 4.9], [9, 8.1]], 31),  # of the slowest arm: 250 / 8.1, rounded up
        ([[60, 61]] * 3, 5),
        ([[1.5]] * 3, 100),
    ],
)
def test_a_block_lasts_a_quarter_of_a_second_between_5_and_100_steps(warm_ms, steps):
    assert schedule.block_length(warm_ms) == steps


def test_drift_through_a_cycle_cancels_and_one_slow_step_moves_nothing():
    order = list(next(iter(schedule.block_orders(ARMS, 1, seed=3))))  # each block is 1 ms slower than the one before it
    blocks = {name: [[10.0 + at] * 3 for at, who in enumerate(order) if who == name] for name in ARMS}
    assert all(compare_blocks(blocks[TORCH], blocks[name]).difference_ms.median == 0 for name in (AGAIN, FUSED))
    found = compare_blocks([[10, 10, 10], [10, 10, 10]], [[8, 8, 500], [8, 8, 8]])
    assert found.speedup.median == 1.25 and found.difference_ms.median == -2


def test_a_real_difference_is_found_and_equal_arms_are_seldom_called_different():
    """Steps of 10 ms that vary by 5 %: of 50 ablations at the default number of cycles, few claim a difference."""
    draw, claims = np.random.default_rng(0), 0
    for _ in range(50):
        torch, again, fused = draw.normal(10, 0.5, (3, 2 * AblateConfig().cycles, 5)).tolist()
        claims += is_different(compare_blocks(torch, fused), compare_blocks(torch, again))
    assert claims <= 3
    torch, again, fused = (draw.normal(ms, 0.1, (20, 5)).tolist() for ms in (10, 10, 9))
    found = compare_blocks(torch, fused)
    assert is_different(found, compare_blocks(torch, again)) and found.speedup.median == pytest.approx(10 / 9, abs=0.01)


def comparison(low, median, high, mean=None):
    found = Interval(median, low, high)
    return Comparison(Interval(0.0, 0.0, 0.0), found, mean or found)


CONTROL, NAN = comparison(0.998, 1.000, 1.002), comparison(*[float("nan")] * 3)


@pytest.mark.parametrize(
    ("fused", "control", "said"),
    [
        (comparison(1.19, 1.20, 1.21), CONTROL, r"^fused 1.200 × \(95 % 1.190 to 1.210\) as fast as torch; A/A"),
        (comparison(0.94, 0.95, 0.96), CONTROL, "^fused 0.950 × .* as fast as torch, that is slower; A/A"),
        (comparison(0.99, 1.05, 1.11), CONTROL, "no difference found between fused and torch: 1.050 × .*, and its interval"),
        (comparison(1.0005, 1.0015, 1.003), CONTROL, "no difference found .*, and A/A shows as much"),
        (comparison(1.01, 1.02, 1.03), comparison(0.97, 0.98, 0.99), "no difference found .* leaves out 1: intervals here"),
        (comparison(1.14, 1.15, 1.16), comparison(1.002, 1.003, 1.005), "^fused 1.150 .* leaves out 1: intervals here"),
        (
            comparison(1.01, 1.02, 1.03, Interval(0.78, 0.77, 0.80)),
            CONTROL,
            "no difference found .*, and that of all steps does not agree; of all steps together, some of which stall, 0.780 ×",
        ),
        (NAN, CONTROL, "no conclusion"),
        (comparison(1.19, 1.20, 1.21), NAN, "no difference found"),
    ],
)
def test_a_speedup_is_claimed_only_beyond_chance_and_beyond_the_control(fused, control, said):
    assert re.search(said, conclusion(FUSED, {TORCH: fused}, control))
    assert is_different(fused, control) == said.startswith("^fused")


def test_a_stall_in_every_twentieth_step_is_found_and_told():
    draw = np.random.default_rng(0)
    torch, again, fused = (draw.normal(10, 0.1, (24, 20)) for _ in range(3))
    fused[:, 7] += 200.0
    found = compare_blocks(torch.tolist(), fused.tolist())
    assert found.speedup.median == pytest.approx(1.0, abs=0.01) and found.mean_speedup.high < 0.6
    assert "some of which stall, 0.50" in conclusion(FUSED, {TORCH: found}, compare_blocks(torch.tolist(), again.tolist()))
    assert stalls(fused.tolist()) == (24, pytest.approx(210 / 400, abs=0.01)) and stalls(torch.tolist()) == (0, 0.0)


def test_every_pair_is_compared_once_and_a_control_with_its_own_arm_alone():
    gains = ((TORCH, 1), (AGAIN, 1), ("compiled", 2), (FUSED, 4), (FUSED + TWIN, 4))
    pairs = compare_all({name: [[10.0 / gain]] * 4 for name, gain in gains})
    of = {base: list(arms) for base, arms in pairs.items()}
    assert of == {TORCH: [AGAIN, "compiled", FUSED], "compiled": [FUSED], FUSED: [FUSED + TWIN]}
    assert [pairs[TORCH][FUSED].speedup.median, pairs["compiled"][FUSED].speedup.median] == [4, 2]
    said = conclusion(FUSED, {"compiled": comparison(1.03, 1.04, 1.05), TORCH: comparison(1.19, 1.20, 1.21)}, CONTROL)
    fastest = "fused 1.040 × (95 % 1.030 to 1.050) as fast as compiled, the fastest other arm; against torch 1.200 ×"
    assert said.startswith(fastest), "the fastest opponent first, then the others"
