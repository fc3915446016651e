"""Arms differ in what runs at their norm sites, and in nothing else."""

import pytest
import torch

import configs
from ablation.arms import Snapshot, build, check_same
from ablation.graph import operators_elsewhere
from configs.machine import Machine
from configs.schema import NormImpl
from training.precision import Precision
from training.step import training_step

CPU = Machine("cpu")
SMALL = ["model.layers=2", "model.heads=2", "model.width=32", "model.context=16", "train.batch_size=2", "device=cpu"]


@pytest.fixture
def cfg():
    return configs.load([*SMALL, "model.dropout=0.1"], on=CPU)


@pytest.fixture
def pair(cfg):
    precision = Precision.settle(cfg.train.precision, CPU)
    return [build(impl.value, cfg, impl, precision, vocab_size=64) for impl in (NormImpl.torch, NormImpl.fused)]


def step(arm, number):
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(number))
    return training_step(arm.forward, arm.state, (tokens[:, :-1], tokens[:, 1:]), number, arm.cfg, arm.precision)


def weights(arm):
    return [parameter.detach().clone() for parameter in arm.state.model.parameters()]


def test_two_implementations_begin_with_the_same_everything(pair):
    check_same(pair)
    assert [arm.state.model.final_norm.impl for arm in pair] == [NormImpl.torch, NormImpl.fused]


@pytest.mark.parametrize("wanted", [True, False])
def test_an_arm_runs_as_the_config_says_where_it_leaves_a_choice(wanted):
    given = [f"{key}={str(wanted).lower()}" for key in ("train.recompute", "train.compile_loss")]
    cfg = configs.load([*SMALL, *given], on=CPU)
    model = build("torch", cfg, NormImpl.torch, Precision.settle(cfg.train.precision, CPU), vocab_size=64).state.model
    assert (model.recompute, model.compile_loss) == (wanted, wanted)


@pytest.mark.parametrize("options", [[], ["model.positions=rotary", "model.tie_embeddings=false", "norm.kind=rmsnorm"]])
def test_an_arm_like_another_is_the_arm_that_its_seed_would_have_made(options):
    cfg = configs.load([*SMALL, *options], on=CPU)
    precision = Precision.settle(cfg.train.precision, CPU)
    first, drawn = (build("torch", cfg, NormImpl.torch, precision, vocab_size=64) for _ in range(2))
    copied = build("fused", cfg, NormImpl.fused, precision, vocab_size=64, like=first)
    check_same([drawn, copied])
    assert all(map(torch.isfinite, step(copied, 0))) and not any(p.is_meta for p in copied.state.model.parameters())
    assert all(map(torch.equal, weights(first), weights(drawn)))  # its values were copied, not shared


def wrap(module):
    """The same in sum, by one operator more."""
    forward = module.forward
    module.forward = lambda x: forward(x) * 1.0


@pytest.mark.parametrize("options", [[], ["model.block=parallel", "model.positions=rotary", "norm.kind=rmsnorm"]])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_graph_outside_the_norm_sites_is_that_of_the_model(options, precision):
    cfg = configs.load([*SMALL, "model.dropout=0.1", "model.drop_path=0.1", f"train.precision={precision}", *options], on=CPU)
    settled = Precision.settle(cfg.train.precision, CPU)
    torch_, fused = (build(impl.value, cfg, impl, settled, vocab_size=64) for impl in (NormImpl.torch, NormImpl.fused))
    found = operators_elsewhere(fused.state.model, settled, cfg.model.context)
    assert found == operators_elsewhere(torch_.state.model, settled, cfg.model.context)
    products = [given for name, given in found if name in ("aten.addmm.default", "aten.mm.default")]
    assert len(products) == 4 * cfg.model.layers + 1, "attention has two, the MLP two; and the head"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {given[0][0] for given in products} == {dtype}
    assert not any("layer_norm" in name or "rms" in name for name, _ in found)
    assert fused.state.model.training and not any(p.is_meta for p in fused.state.model.parameters())
    assert not fused.state.model.final_norm._forward_hooks and not fused.state.model.final_norm._forward_pre_hooks


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda arm: torch.nn.init.zeros_(arm.state.model.final_norm.weight), "final_norm.weight differs"),
        (lambda arm: arm.state.optimizer.param_groups[0].update(weight_decay=0.5), "optimizer groups"),
        (lambda arm: arm.state.model.register_parameter("extra", torch.nn.Parameter(torch.ones(1))), "different parameters"),
        (lambda arm: arm.state.model.add_module("extra", torch.nn.Identity()), "different modules"),
        (lambda arm: setattr(arm.state.model.final_norm, "eps", 1e-3), "different modules"),
        (lambda arm: setattr(arm.state.model.blocks[0].attention, "dropout", 0.9), "different modules"),
        (lambda arm: arm.state.model.eval(), "different modules"),
        (lambda arm: arm.state.model.register_buffer("extra", torch.ones(1)), "different buffers"),
        (lambda arm: setattr(arm.cfg.optim, "lr", 0.5), "different configs"),
        (lambda arm: wrap(arm.state.model.blocks[1].mlp), "different graphs"),
    ],
    ids=[
        "value",
        "group",
        "parameter",
        "module",
        "eps",
        "attention dropout",
        "evaluation",
        "buffer",
        "learning rate",
        "forward",
    ],
)
def test_any_other_difference_is_found(pair, spoil, message):
    spoil(pair[1])
    with pytest.raises(AssertionError, match=message):
        check_same(pair)


def test_a_snapshot_puts_weights_and_optimizer_state_back_into_either_arm(pair):
    torch_arm = pair[0]
    for arm in pair:
        step(arm, 0)
    start = Snapshot(torch_arm)
    expected = weights(torch_arm)
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
