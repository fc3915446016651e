"""The timing protocol: who runs when, on what, and what is made of it."""

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import configs
from ablation import timing, turns
from ablation.arms import Snapshot, build, move, places_of
from ablation.compared import AGAIN, FUSED, TORCH
from ablation.records import ArmTimes
from ablation.verdict import differs
from configs.machine import Machine
from configs.schema import AblateConfig, NormImpl
from training.precision import Precision

CPU = Machine("cpu")


def times(*blocks):
    return ArmTimes([list(block) for block in blocks], list(range(len(blocks))), 1.0, 1.0, 1.0, None, None)


def test_every_cycle_is_an_order_of_all_arms_and_its_reverse():
    orders = list(turns.schedule(cycles=20, seed=1))
    assert len(orders) == 20
    for order in orders:
        assert sorted(order[:3]) == sorted((TORCH, AGAIN, FUSED))
        assert list(order[3:]) == list(reversed(order[:3]))
    assert len({tuple(order) for order in orders}) > 3, "always the same order"
    assert orders == list(turns.schedule(20, 1)) != list(turns.schedule(20, 2))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("names", [turns.LINEUP, ("a", "b"), ("a", "b", "c", "d", "e")])
def test_every_arm_stands_at_every_place_of_a_cycle_equally_often(seed, names):
    orders = list(turns.schedule(3 * len(names), seed, names))
    for place in range(2 * len(names)):
        assert Counter(order[place] for order in orders) == dict.fromkeys(names, 3)


@pytest.mark.parametrize("seed", range(8))
def test_every_arm_stands_at_every_place_equally_often_in_the_cycles_that_are_counted(seed):
    ran = []
    turns.in_turn(lambda name, cycle: ran.append((cycle, name)) or [1.0], cycles=AblateConfig().cycles, seed=seed)
    orders = [[name for at, name in ran if at == cycle] for cycle in range(1, 1 + AblateConfig().cycles)]
    for place in range(2 * len(turns.LINEUP)):
        assert Counter(order[place] for order in orders) == dict.fromkeys(turns.LINEUP, len(orders) // 3)


def test_drift_through_a_cycle_cancels():
    """Each block is 1 ms slower than the one before it; the arms are equally fast."""
    order = next(iter(turns.schedule(1, seed=3)))
    at = {name: [float(i) for i, who in enumerate(order) if who == name] for name in order}
    found = {name: times(*([10 + when] * 3 for when in at[name])) for name in order}
    assert timing.compare(found, FUSED).difference_ms.median == 0 == timing.compare(found, AGAIN).difference_ms.median


def test_one_slow_step_of_a_block_moves_nothing():
    found = {TORCH: times([10, 10, 10], [10, 10, 10]), FUSED: times([8, 8, 500], [8, 8, 8])}
    comparison = timing.compare(found, FUSED)
    assert comparison.speedup.median == 1.25 and comparison.difference_ms.median == -2


@pytest.fixture
def arms():
    small = ["model.layers=1", "model.heads=1", "model.width=16", "model.context=8", "train.batch_size=2", "device=cpu"]
    cfg = configs.load([*small, "ablate.cycles=6", "ablate.block_steps=2", "ablate.warmup_steps=1"], on=CPU)
    precision = Precision.settle(cfg.train.precision, CPU)
    impls = {TORCH: NormImpl.torch, AGAIN: NormImpl.torch, FUSED: NormImpl.fused}
    return {name: build(name, cfg, impl, precision, vocab_size=64) for name, impl in impls.items()}


class Batches:
    """Random tokens, and a note of who asked for which step."""

    def __init__(self):
        self.asked = []

    def __getitem__(self, step):
        self.asked.append(step)
        tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(step))
        return tokens[:, :-1], tokens[:, 1:]


def test_arms_take_the_same_batches_in_each_cycle_from_the_same_weights(arms, monkeypatch):
    begun, taken, real = [], [], timing.run

    def run(arm, batches, steps, *arguments, **named):
        if len(steps) == turns.LEAD_IN + 2:
            begun.append([parameter.detach().clone() for parameter in arm.state.model.parameters()])
            taken.append((steps.start, arm.name))
        real(arm, batches, steps, *arguments, **named)

    monkeypatch.setattr(timing, "run", run)
    told = []
    found = timing.time_arms(arms, Batches(), told.append)
    assert [start for start, _ in taken] == [1 + 3 * cycle for cycle in range(7) for _ in range(6)]
    assert sorted(name for _, name in taken) == [FUSED] * 14 + [TORCH] * 14 + [AGAIN] * 14
    assert all(all(map(torch.equal, weights, begun[0])) for weights in begun)
    assert {name: [len(block) for block in arm.blocks_ms] for name, arm in found.items()} == {
        name: [2] * 12
        for name in (TORCH, AGAIN, FUSED)  # without those of the first cycle
    }
    order = [name for _, name in taken][6:]  # without the first cycle
    assert {name: [order[turn] for turn in arm.turns] for name, arm in found.items()} == {name: [name] * 12 for name in found}
    assert Counter(told) == timing.work_of(cycles=6)
    for arm in found.values():
        assert min(arm.forward_ms, arm.backward_ms, arm.optimizer_ms) > 0
        assert arm.peak_gb is None and arm.launches is None


def addresses(arm):
    return [parameter.data_ptr() for parameter in arm.state.model.parameters()]


def test_arms_move_to_each_others_places_and_stay_there_while_they_train(arms):
    for arm in arms.values():
        timing.run(arm, Batches(), range(2))  # with an optimizer's state
    listed = list(arms.values())
    before, places = [addresses(arm) for arm in listed], places_of(listed)
    start = Snapshot(listed[0])
    move(listed, places, (1, 2, 0))
    assert [addresses(arm) for arm in listed] == [before[1], before[2], before[0]]
    start.restore(listed[0])
    timing.run(listed[0], Batches(), range(3))
    assert addresses(listed[0]) == before[1], "a step moves them back"
    move(listed, places, (0, 1, 2))
    assert [addresses(arm) for arm in listed] == before


def test_any_two_arms_are_in_any_two_places_equally_often():
    orders = turns.placements(12, seed=1, arms=3)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        pairs = Counter((order[first], order[second]) for order in orders)
        assert len(pairs) == 6 and set(pairs.values()) == {2}
    assert orders != turns.placements(12, seed=2, arms=3)


def test_between_cycles_places_change_and_with_cuda_graphs_they_stay(arms, monkeypatch):
    found, real = [], timing.run

    def run(arm, *arguments, **named):
        found.append((arm.name, addresses(arm)[0]))
        real(arm, *arguments, **named)

    monkeypatch.setattr(timing, "run", run)
    timing.time_arms(arms, Batches(), lambda kind: None)
    of_torch = [address for name, address in found if name == TORCH][1:-2]  # without warm-up and the split windows
    assert of_torch[::2] == of_torch[1::2] and len(set(of_torch)) == 3
    assert set(Counter(of_torch[2:]).values()) == {4}, "of six cycles two in each place"

    found.clear()
    for arm in arms.values():
        arm.cfg.train.compile, arm.cfg.train.compile_mode = True, "reduce-overhead"
    timing.time_arms(arms, Batches(), lambda kind: None)
    assert len({address for name, address in found if name == TORCH}) == 1


def test_compiled_arms_that_trade_places_are_not_compiled_again(arms):
    torch._dynamo.reset()
    compiled = [replace(arm, forward=torch.compile(arm.state.model, backend="aot_eager")) for arm in arms.values()]
    for arm in compiled:
        timing.run(arm, Batches(), range(2))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert before > 0
    places = places_of(compiled)
    for order in ((1, 2, 0), (2, 1, 0)):
        move(compiled, places, order)
        for arm in compiled:
            timing.run(arm, Batches(), range(2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_the_step_that_fills_an_empty_queue_is_not_counted(arms, monkeypatch):
    """After each restored state a step takes a second, those behind it 10 ms."""
    clock, empty = [0.0], [False]

    class Restored(timing.Snapshot):
        def restore(self, arm):
            empty[0] = True

    def training_step(*arguments, mark=lambda part: None):
        for part in ("forward", "backward", "optimizer"):
            clock[0] += 1.0 if empty[0] else 0.01
            mark(part)
        empty[0] = False

    monkeypatch.setattr(timing, "Snapshot", Restored)
    monkeypatch.setattr(timing, "training_step", training_step)
    for name in ("StepClock", "PartClock"):
        monkeypatch.setattr(timing, name, partial(getattr(timing, name), now=lambda: clock[0]))
    for arm in timing.time_arms(arms, Batches(), lambda kind: None).values():
        assert [ms for block in arm.blocks_ms for ms in block] == pytest.approx([30.0] * 24)
        assert (arm.forward_ms, arm.backward_ms, arm.optimizer_ms) == pytest.approx((10.0,) * 3)


@pytest.mark.parametrize(
    ("warm_ms", "steps"),
    [
        ([[900, 5.0, 5.5], [6.0, 5.0, 4.9], [30_000, 4.0, 4.0]], 50),  # compilation is no step time
        ([[9, 4.9], [6, 4.9], [9, 8.1]], 31),  # of the slowest arm: 250 / 8.1, rounded up
        ([[60, 61]] * 3, 5),
        ([[500]] * 3, 5),
        ([[1.5]] * 3, 100),
    ],
)
def test_a_block_lasts_a_quarter_of_a_second_between_5_and_100_steps(warm_ms, steps):
    assert timing.settled_steps(warm_ms) == steps


def test_blocks_of_all_arms_have_the_number_of_steps_that_warm_up_settles(arms, monkeypatch):
    for arm in arms.values():
        arm.cfg.ablate.block_steps = None
    seen = []
    monkeypatch.setattr(timing, "settled_steps", lambda warm: seen.append(warm) or 3)
    found = timing.time_arms(arms, Batches(), lambda kind: None)
    assert [len(steps) for steps in seen[0]] == [1, 1, 1] and min(min(seen[0])) > 0
    assert {len(block) for arm in found.values() for block in arm.blocks_ms} == {3}


def test_equal_arms_are_seldom_called_different():
    """Steps of 10 ms that vary by 5 %: of 200 ablations at the default number of cycles, few claim a difference."""
    draw, claims = np.random.default_rng(0), 0
    for _ in range(200):
        found = {name: times(*draw.normal(10, 0.5, (20, 5))) for name in (TORCH, AGAIN, FUSED)}
        claims += differs(timing.compare(found, FUSED), timing.compare(found, AGAIN))
    assert claims <= 10


def test_a_real_difference_is_found():
    draw = np.random.default_rng(1)
    found = {name: times(*draw.normal(ms, 0.1, (20, 5))) for name, ms in ((TORCH, 10), (AGAIN, 10), (FUSED, 9))}
    fused, control = timing.compare(found, FUSED), timing.compare(found, AGAIN)
    assert differs(fused, control) and fused.speedup.median == pytest.approx(10 / 9, abs=0.01)


def test_batches_are_drawn_outside_the_clock(arms):
    class Slow(Batches):
        def __getitem__(self, step):
            assert not self.clock._inside
            return super().__getitem__(step)

    from training.clock import StepClock

    batches = Slow()
    batches.clock = StepClock(torch.device("cpu"), warmup=0)
    timing.run(arms[TORCH], batches, range(3), batches.clock)
    assert len(batches.clock.steps_ms) == 3
