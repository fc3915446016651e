"""How the arms of a cell are timed: on the same batches, from the same weights, in each other's places."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

import configs
from ablation import timing
from ablation.arms import Snapshot, build, move, places_of
from configs.machine import Machine
from configs.schema import NormImpl
from measure.comparison import AGAIN, ARMS, FUSED, TORCH
from tests.runs import precision
from training.clock import StepClock


@pytest.fixture
def arms():
    small = ["model.layers=1", "model.heads=1", "model.width=16", "model.context=8", "train.batch_size=2", "device=cpu"]
    cfg = configs.load([*small, "ablate.cycles=6", "ablate.block_steps=2", "ablate.warmup_steps=1"], on=Machine("cpu"))
    impls = {TORCH: NormImpl.torch, AGAIN: NormImpl.torch, FUSED: NormImpl.fused}
    return {name: build(name, cfg, impl, precision(torch.float32), vocab_size=64) for name, impl in impls.items()}


class Batches:
    """Random tokens."""

    def __getitem__(self, step):
        tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(step))
        return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture
def runs(monkeypatch):
    """A note of each run: arm, first step, number of steps, weights, and where they lie."""
    noted, real = [], timing.run

    def run(arm, batches, steps, *given, **named):
        weights = [parameter.detach().clone() for parameter in arm.state.model.parameters()]
        noted.append((arm.name, steps.start, len(steps), weights, addresses(arm)[0]))
        real(arm, batches, steps, *given, **named)

    monkeypatch.setattr(timing, "run", run)
    return noted


def addresses(arm):
    return [parameter.data_ptr() for parameter in arm.state.model.parameters()]


def test_arms_take_the_same_batches_in_each_cycle_from_the_same_weights(arms, runs):
    done = []
    found = timing.time_arms(arms, Batches(), lambda: done.append(1))
    blocks = [run for run in runs if run[2] == 1 + 2]
    assert [start for _, start, *_ in blocks] == [1 + 3 * cycle for cycle in range(7) for _ in range(6)]
    assert Counter(name for name, *_ in blocks) == dict.fromkeys(ARMS, 14)
    assert all(all(map(torch.equal, run[3], blocks[0][3])) for run in blocks)
    assert {name: [len(block) for block in arm.blocks_ms] for name, arm in found.items()} == {name: [2] * 12 for name in ARMS}
    order = [name for name, *_ in blocks][6:]  # without the first cycle
    assert {name: [order[at] for at in arm.positions] for name, arm in found.items()} == {name: [name] * 12 for name in ARMS}
    assert len(done) == timing.calls_of(cycles=6)
    for arm in found.values():
        assert min(arm.forward_ms, arm.backward_ms, arm.optimizer_ms) > 0 and arm.peak_gb is None and arm.launches is None


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


def test_between_cycles_places_change_and_with_cuda_graphs_they_stay(arms, runs):
    timing.time_arms(arms, Batches(), lambda: None)
    of_torch = [run[4] for run in runs if run[0] == TORCH][1:-2]  # without warm-up and the split windows
    assert of_torch[::2] == of_torch[1::2] and len(set(of_torch)) == 3
    assert set(Counter(of_torch[2:]).values()) == {4}, "of six cycles two in each place"
    runs.clear()
    for arm in arms.values():
        arm.cfg.train.compile, arm.cfg.train.compile_mode = True, "reduce-overhead"
    timing.time_arms(arms, Batches(), lambda: None)
    assert len({run[4] for run in runs if run[0] == TORCH}) == 1


def test_compiled_arms_that_trade_places_are_not_compiled_again(arms):
    torch._dynamo.reset()
    compiled = [replace(arm, forward=torch.compile(arm.state.model, backend="aot_eager")) for arm in arms.values()]
    for arm in compiled:
        timing.run(arm, Batches(), range(2))
    before, places = torch._dynamo.utils.counters["stats"]["unique_graphs"], places_of(compiled)
    for order in ((1, 2, 0), (2, 1, 0)):
        move(compiled, places, order)
        for arm in compiled:
            timing.run(arm, Batches(), range(2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before > 0


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
    for arm in timing.time_arms(arms, Batches(), lambda: None).values():
        assert [ms for block in arm.blocks_ms for ms in block] == pytest.approx([30.0] * 24)
        assert (arm.forward_ms, arm.backward_ms, arm.optimizer_ms) == pytest.approx((10.0,) * 3)


def test_batches_are_drawn_outside_the_clock(arms):
    clock = StepClock(torch.device("cpu"), warmup=0)

    class Slow(Batches):
        def __getitem__(self, step):
            assert not clock._inside
            return super().__getitem__(step)

    timing.run(arms[TORCH], Slow(), range(3), clock)
    assert len(clock.steps_ms) == 3
