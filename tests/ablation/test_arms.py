"""Arms differ in what runs at their norm sites, and in nothing else."""

import pytest
import torch

import configs
from ablation.arms import Snapshot, build, check_same, operators_elsewhere
from configs.machine import Machine
from configs.schema import NormImpl
from tests.runs import precision
from training.step import training_step

SMALL = ["model.layers=2", "model.heads=2", "model.width=32", "model.context=16", "train.batch_size=2", "device=cpu"]
FP32 = precision(torch.float32)


def load(*overrides):
    return configs.load([*SMALL, *overrides], on=Machine("cpu"))


def arms(cfg, settled=FP32):
    return [build(impl.value, cfg, impl, settled, vocab_size=64) for impl in (NormImpl.torch, NormImpl.fused)]


@pytest.fixture
def pair():
    return arms(load("model.dropout=0.1"))


def step(arm, number):
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(number))
    return training_step(arm.forward, arm.state, (tokens[:, :-1], tokens[:, 1:]), number, arm.cfg, arm.precision)


def weights(arm):
    return [parameter.detach().clone() for parameter in arm.state.model.parameters()]


@pytest.mark.parametrize("options", [[], ["model.positions=rotary", "model.tie_embeddings=false", "norm.kind=rmsnorm"]])
def test_an_arm_like_another_is_the_arm_that_its_seed_would_have_made(options):
    cfg = load(*options)
    first, drawn = (arms(cfg)[0] for _ in range(2))
    copied = build("fused", cfg, NormImpl.fused, FP32, vocab_size=64, like=first)
    check_same([drawn, copied])
    assert all(map(torch.isfinite, step(copied, 0))) and not any(p.is_meta for p in copied.state.model.parameters())
    assert all(map(torch.equal, weights(first), weights(drawn)))  # its values were copied, not shared


@pytest.mark.parametrize("options", [[], ["model.block=parallel", "model.positions=rotary", "norm.kind=rmsnorm"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_graph_outside_the_norm_sites_is_that_of_the_model(options, dtype):
    cfg, settled = load("model.dropout=0.1", "model.drop_path=0.1", *options), precision(dtype)
    torch_, fused = (arm.state.model for arm in arms(cfg, settled))
    found = operators_elsewhere(fused, settled, cfg.model.context)
    assert found == operators_elsewhere(torch_, settled, cfg.model.context)
    products = [given for name, given in found if name in ("aten.addmm.default", "aten.mm.default")]
    assert len(products) == 4 * cfg.model.layers + 1, "attention has two, the MLP two; and the head"
    assert {given[0][0] for given in products} == {dtype}
    assert not any("layer_norm" in name or "rms" in name for name, _ in found)
    assert fused.training and not any(p.is_meta for p in fused.parameters())
    assert not fused.final_norm._forward_hooks and not fused.final_norm._forward_pre_hooks


def one_more_operator(arm):
    mlp = arm.state.model.blocks[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * 1.0


SPOILS = {
    "final_norm.weight differs": lambda arm: torch.nn.init.zeros_(arm.state.model.final_norm.weight),
    "optimizer groups": lambda arm: arm.state.optimizer.param_groups[0].update(weight_decay=0.5),
    "different parameters": lambda arm: arm.state.model.register_parameter("extra", torch.nn.Parameter(torch.ones(1))),
    "different modules": lambda arm: arm.state.model.add_module("extra", torch.nn.Identity()),
    "different modules: eps": lambda arm: setattr(arm.state.model.final_norm, "eps", 1e-3),
    "different modules: dropout": lambda arm: setattr(arm.state.model.blocks[0].attention, "dropout", 0.9),
    "different modules: mode": lambda arm: arm.state.model.eval(),
    "different buffers": lambda arm: arm.state.model.register_buffer("extra", torch.ones(1)),
    "different configs": lambda arm: setattr(arm.cfg.optim, "lr", 0.5),
    "different graphs": one_more_operator,
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_any_other_difference_is_found(pair, spoil):
    check_same(pair)
    SPOILS[spoil](pair[1])
    with pytest.raises(AssertionError, match=spoil.partition(":")[0]):
        check_same(pair)


def test_a_snapshot_puts_weights_and_optimizer_state_back_into_either_arm(pair):
    torch_arm = pair[0]
    for arm in pair:
        step(arm, 0)
    start, expected = Snapshot(torch_arm), weights(torch_arm)
    step(torch_arm, 1)
    after = weights(torch_arm)
    for arm in pair:
        step(arm, 2)
        addresses = [parameter.data_ptr() for parameter in arm.state.model.parameters()]
        start.restore(arm)
        assert all(map(torch.equal, weights(arm), expected))
        assert [parameter.data_ptr() for parameter in arm.state.model.parameters()] == addresses
    step(torch_arm, 1)  # with the same moments, so the same bits
    assert all(map(torch.equal, weights(torch_arm), after))
