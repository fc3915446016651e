"""Arms: they differ in what runs at their norm sites alone, and are timed on the same batches in each other's places."""

from collections import Counter
from functools import partial
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import configs
from ablation import timing
from ablation.arms import Snapshot, build_arm, check_same, move, places_of
from ablation.config import Config
from configs.machine import Machine
from data import Batches
from measure.clock import StepClock
from measure.comparison import AGAIN, FUSED, TORCH, compare_all, is_different
from model.attention import QueryKeySite
from model.norm import NormSite
from tests.runs import precision
from training.inputs import Inputs
from training.step import TrainingStep

SMALL = ["model.layers=2", "model.heads=2", "model.width=32", "model.context=16", "train.batch_size=2", "device=cpu"]
SHORT = ["model.layers=1", "model.dropout=0", "ablate.cycles=6", "ablate.block_steps=2", "ablate.warmup_steps=1"]
ARMS = (TORCH, AGAIN, FUSED)
FP32, CPU = precision(torch.float32), torch.device("cpu")
TOKENIZER = SimpleNamespace(vocab_size=64)
BATCHES = Batches(np.random.default_rng(0).integers(64, size=2000), context=16, batch_size=2, seed=0)


def load(*overrides):
    return configs.load([*SMALL, *overrides], Machine("cpu"), Config)


def built(cfg, settled=FP32, names=(TORCH, FUSED)):
    return {name: build_arm(name, cfg, settled, TOKENIZER, BATCHES) for name in names}


@pytest.fixture
def arms():
    return built(load(*SHORT), names=ARMS)


def take(arm, first, steps=1):
    timing.run(arm, range(first, first + steps), StepClock(CPU))


def weights(arm):
    return [parameter.detach().clone() for parameter in arm.state.model.parameters()]


def addresses(arm):
    return [parameter.data_ptr() for parameter in arm.state.model.parameters()]


class Outside(TorchDispatchMode):
    """The operators that run outside of norm sites, with dtype and shape of their tensors."""

    def __init__(self):
        super().__init__()
        self.found, self.inside = [], 0

    def enter(self, *_):
        self.inside += 1

    def leave(self, *_):
        self.inside -= 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.inside:
            tensors = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
            self.found.append((str(func), [(t.dtype, tuple(t.shape)) for t in tensors]))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, []), (torch.bfloat16, ["model.block=parallel", "model.positions=rotary", "norm.kind=rmsnorm"])],
)
def test_the_graph_outside_the_norm_sites_is_the_same_in_all_arms(dtype, options):
    cfg, settled = load("model.dropout=0.1", "model.drop_path=0.1", *options), precision(dtype)
    graphs = []
    for arm in built(cfg, settled).values():
        model, outside = arm.state.model.eval(), Outside()
        for site in (module for module in model.modules() if isinstance(module, NormSite | QueryKeySite)):
            site.register_forward_pre_hook(outside.enter)
            site.register_forward_hook(outside.leave)
        with torch.no_grad(), settled.autocast(), outside:
            model(torch.zeros(1, 16, dtype=torch.int64))
        graphs.append(outside.found)
    assert graphs[0] == graphs[1]
    products = [given for name, given in graphs[0] if name in ("aten.addmm.default", "aten.mm.default")]
    assert len(products) == 4 * cfg.model.layers + 1, "attention has two, the MLP two; and the head"
    assert {given[0][0] for given in products} == {dtype}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda arm: torch.nn.init.zeros_(arm.state.model.final_norm.weight), "final_norm.weight"),
        (lambda arm: arm.state.optimizer.param_groups[0].update(weight_decay=0.5), "optimizer groups"),
        (lambda arm: arm.state.model.register_buffer("another", torch.ones(1)), "another"),
    ],
)
def test_other_weights_buffers_and_optimizer_groups_are_found(spoil, said):
    check_same(pair := list(built(load("model.dropout=0.1")).values()))
    spoil(pair[1])
    with pytest.raises(AssertionError, match=f"torch and fused differ in {said}"):
        check_same(pair)


def test_arms_take_the_same_batches_in_each_cycle_from_the_same_weights_and_exchange_places_between(arms, monkeypatch):
    runs, kept, real = [], [], timing.run  # of each run: arm, first step, number of steps, weights, and where they lie

    def run(arm, steps, clock):
        runs.append((arm.name, steps.start, len(steps), weights(arm), next(arm.state.model.parameters()).data_ptr()))
        return real(arm, steps, clock)

    monkeypatch.setattr(timing, "run", run)
    found, failed = timing.time_arms(arms, keep=kept.append)
    blocks = [run for run in runs if run[2] == 1 + 2]
    assert [start for _, start, *_ in blocks] == [1 + 3 * cycle for cycle in range(7) for _ in range(6)]
    assert Counter(name for name, *_ in blocks) == dict.fromkeys(ARMS, 14)
    assert all(all(map(torch.equal, run[3], blocks[0][3])) for run in blocks)
    for name, arm in found.items():
        assert arm.blocks_ms == [block for cycle in kept for block in cycle[name]]
        assert arm.peak_gb is None and arm.launches is None
    assert len(kept) == 6 and not failed
    of_torch = [place for name, _, _, _, place in blocks if name == TORCH]
    assert of_torch[::2] == of_torch[1::2] and set(Counter(of_torch[2:]).values()) == {4}, "of six cycles two in each place"
    arms[TORCH].update.graph = True  # which has addresses: places stay
    runs.clear()
    timing.time_arms(arms)
    assert len({run[4] for run in runs if run[0] == TORCH}) == 1


def test_arms_that_exchanged_places_compute_the_same_bits_from_a_snapshot_and_none_is_compiled_again(arms):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    listed = list(arms.values())
    for arm in listed:
        arm.update.forward = torch.compile(arm.state.model, backend="eager")
        take(arm, 0, steps=2)  # with an optimizer's state
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    before, places, start = [addresses(arm) for arm in listed], places_of(listed), Snapshot(listed[0])
    take(listed[0], 2)
    after = weights(listed[0])
    for order in ((1, 2, 0), (0, 1, 2)):
        move(listed, places, order)
        for arm in listed:
            start.restore(arm)
            take(arm, 2)
            assert all(map(torch.equal, weights(arm), after))
        assert [addresses(arm) for arm in listed] == [before[place] for place in order]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0


@pytest.fixture
def clocked(monkeypatch):
    """A function: makes a step of an arm take as many seconds of a clock of our own as the function that it is given says."""

    def replace_steps(seconds_of):
        def step(self, number):
            gpu.clock += seconds_of(self.state)

        monkeypatch.setattr(TrainingStep, "__call__", step)
        monkeypatch.setattr(timing, "StepClock", partial(StepClock, now=lambda: gpu.clock))
        return gpu

    gpu = SimpleNamespace(clock=0.0)
    return replace_steps


def test_the_step_that_fills_an_empty_queue_is_not_counted_nor_is_drawing_a_batch(arms, clocked, monkeypatch):
    """After each restored state a step takes three seconds, later ones 30 ms; drawing a batch takes a minute."""
    empty = []

    fill = Inputs._fill

    def slow(self, steps):
        gpu.clock += 60.0
        fill(self, steps)

    monkeypatch.setattr(Inputs, "_fill", slow)
    gpu = clocked(lambda _: 3.0 if empty and empty.pop() else 0.03)
    monkeypatch.setattr(timing.Snapshot, "restore", lambda *_: empty.append(True))
    for arm in timing.time_arms(arms)[0].values():
        assert [ms for block in arm.blocks_ms for ms in block] == pytest.approx([30.0] * 24)


@pytest.mark.parametrize(("planted", "found"), [(0.0, False), (0.03, True)])
def test_a_slow_down_of_3_percent_that_is_planted_in_one_arm_is_found_and_none_is_found_where_there_is_none(
    planted, found, clocked
):
    """Steps take 50 ms that scatter by 2 %, drift, and depend on the place in memory."""
    arms = built(load(*SHORT, "ablate.cycles=12", "ablate.block_steps=5"), names=(TORCH, AGAIN, "compiled", FUSED))
    draw, steps, places = np.random.default_rng(0), count(1), {}

    def seconds(state):
        place = next(state.model.parameters()).data_ptr()
        slow = 1 + planted * (state.model.final_norm.impl == FUSED) + 0.002 * places.setdefault(place, len(places))
        return 0.05 * slow * (1 + 1e-5 * next(steps)) * (1 + draw.gamma(2, 0.01))

    clocked(seconds)
    times, _ = timing.time_arms(arms)
    pairs = compare_all({name: of.blocks_ms for name, of in times.items()})
    control = pairs[TORCH][AGAIN]
    for base in (TORCH, "compiled"):
        assert is_different(pairs[base][FUSED], control) == found
        assert pairs[base][FUSED].speedup.median == pytest.approx(1 / (1 + planted), abs=0.004)
    assert not is_different(pairs[TORCH]["compiled"], control)


def test_an_arm_that_may_fail_is_left_out_with_its_reason_and_another_one_ends_the_ablation(arms):
    def fails(*_, **__):
        raise RuntimeError("no kernel for this width")

    arms[FUSED].update.forward = fails
    times, failed = timing.time_arms(arms, may_fail={FUSED})
    assert list(times) == [TORCH, AGAIN] and failed == {FUSED: "RuntimeError: no kernel for this width"}
    with pytest.raises(RuntimeError, match="no kernel"):
        timing.time_arms(arms)
