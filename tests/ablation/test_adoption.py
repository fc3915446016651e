"""check_parity and measure: of models that this project has never seen."""

import copy
import os
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ablation import rounding
from ablation.adopted_models import default_loss
from ablation.adoption import check_parity, measure
from ops import GPT2_BLOCK, fuse_prenorm_block, replace_norms
from ops.backend import runs_kernels

WIDTH = 32
QUICK = {"cycles": 6, "block_steps": 1, "warmup_steps": 0}


def branch(dropout):
    """Two products and a dropout, under the name that GPT-2's attention or MLP has for it."""
    layers = {"up": nn.Linear(WIDTH, 64), "act": nn.GELU(), "down": nn.Linear(64, WIDTH), dropout: nn.Dropout(0.1)}
    return nn.Sequential(OrderedDict(layers))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), branch("resid_dropout"), nn.LayerNorm(WIDTH)
        self.mlp = branch("dropout")

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(50, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.final, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50)

    def forward(self, tokens, targets=None):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final(x))
        return logits if targets is None else (logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


class Masked(nn.Module):
    """torch's attention, with a mask made in forward."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        mask, y = nn.Transformer.generate_square_subsequent_mask(x.shape[1]), self.norm(x)
        return x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]


class ByDtype(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * (-1 if x.dtype is torch.float64 else 1)


class HalfOnly(nn.LayerNorm):
    def forward(self, input):
        if input.dtype == torch.float64:
            raise RuntimeError("Expected mat_a to be Float32, BFloat16 or Float16 matrix, got Double")
        return super().forward(input)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def batch(seed=0):
    tokens = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def adopted(model):
    model = replaced(model)
    for block in model.blocks:
        fuse_prenorm_block(block, GPT2_BLOCK)
    return model


def replaced(model):
    model = copy.deepcopy(model)
    replace_norms(model, verbose=False)
    return model


def with_norms(model, change):
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            change(module)
    return model


# ---- planted mistakes --------------------------------------------------------------------------------------------------------


class Drift(torch.autograd.Function):
    """The identity, with a gradient that is off by a thousandth."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * 1.001


def wrong_eps(norm):
    norm.eps = 2e-5


def wrong_backward(norm):
    own = norm.forward
    norm.forward = lambda x: own(Drift.apply(x))


def low_precision_statistics(norm):
    def forward(x):
        mean, var = (s.bfloat16().float() for s in (x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)))
        return (x - mean) * torch.rsqrt(var + norm.eps) * norm.weight + norm.bias

    norm.forward = forward


def lost_weight_gradient(norm):
    norm.forward = lambda x: F.layer_norm(x, x.shape[-1:], norm.weight.detach(), norm.bias, norm.eps)


def cut_off(norm):
    own = norm.forward
    norm.forward = lambda x: own(x.detach())


@pytest.mark.parametrize("how", ["fp32", "bf16", "autocast", "five batches", "a parameter that no loss reaches"])
def test_fused_norms_and_blocks_are_at_parity(model, how):
    model = model.to(torch.bfloat16 if how == "bf16" else torch.float32)
    if "parameter" in how:
        model.unused = nn.Parameter(torch.ones(3))
    given = [batch(seed) for seed in range(5)] if "five" in how else batch()
    check = check_parity(model, adopted(model), given, autocast=torch.bfloat16 if how == "autocast" else None)
    assert check.holds and "Parity holds" in str(check) and ("5 batches" in check.verdict) == ("five" in how), check
    assert {"output", "loss", "gradient of blocks.1.mlp.up.weight", "row scale of final"} <= {row.name for row in check.rows}


@pytest.mark.parametrize("change", [wrong_eps, wrong_backward, low_precision_statistics])
def test_a_planted_mistake_fails_and_is_named(model, change):
    check = check_parity(model, with_norms(model, change), batch())
    assert not check.holds and "NO" in str(check)
    assert check.verdict.startswith("Parity fails in float32: ") and check.rows[0].failure in check.verdict


@pytest.mark.parametrize("change", [lost_weight_gradient, cut_off])
def test_a_gradient_that_is_missing_altogether_is_seen(model, change):
    check = check_parity(model, with_norms(model, change), batch())
    assert not check.holds and check.rows[0].name.startswith("gradient of"), check
    assert check.rows[0].error == pytest.approx(1.0)


def test_models_without_gradients_are_compared_by_what_they_put_out(model):
    model.requires_grad_(False)
    check = check_parity(model, adopted(model), batch())
    assert check.holds and not [row for row in check.rows if row.name.startswith("gradient")], check
    assert not check_parity(model, with_norms(model, wrong_eps), batch()).holds


def test_a_wrong_norm_is_seen_in_bf16_too(model):
    model = model.bfloat16()
    assert not check_parity(model, with_norms(model, lambda norm: setattr(norm, "eps", 0.01)), batch()).holds


@pytest.mark.parametrize("change", [wrong_backward, lost_weight_gradient])
def test_a_wrong_gradient_is_seen_of_a_model_without_a_loss_too(model, change):
    """The projection of the output that stands in for a loss is the same one in fp64."""
    tokens, _ = batch()
    check = check_parity(model, adopted(model), tokens)
    assert check.holds and max(row.error for row in check.rows) < 1e-4, check
    check = check_parity(model, with_norms(model, change), tokens)
    assert not check.holds and check.rows[0].name.startswith("gradient of"), check


def test_a_mask_that_forward_makes_does_not_spoil_the_reference():
    torch.manual_seed(0)
    before, x = Masked(), torch.randn(2, 12, WIDTH)
    check = check_parity(before, replaced(before), x)
    assert check.holds and next(row for row in check.rows if row.name == "output").error < 1e-5, check
    assert torch.get_default_dtype() is torch.float32
    assert not check_parity(before, with_norms(before, wrong_eps), x).holds


def test_a_reference_that_computes_something_else_is_refused_and_does_not_make_everything_right():
    with pytest.raises(ValueError, match="output of model_a is 2 away from that of its copy in fp64"):
        check_parity(model := ByDtype(nn.LayerNorm(WIDTH)), replaced(model), torch.randn(4, WIDTH))

    def another_in_fp64(y):
        return y.square().mean() if y.dtype is torch.float64 else y.sin().mean()

    with pytest.raises(ValueError, match=r"the gradients of model_a, all together, are \S+ away from those of its copy"):
        check_parity(model := Masked(), replaced(model), torch.randn(2, 12, WIDTH), loss=another_in_fp64)


def test_a_model_that_can_not_run_in_fp64_is_told_of_the_reference_and_checked_in_bf16():
    before = nn.Sequential(nn.LayerNorm(WIDTH), nn.Sequential(HalfOnly((2, WIDTH))))
    after, x = replaced(before), torch.randn(4, 2, WIDTH)
    with pytest.raises(RuntimeError, match="mat_a") as error:
        check_parity(before, after, x)
    assert "its reference, a copy of model_a in float64" in error.value.__notes__[0]
    assert check_parity(before.bfloat16(), after.bfloat16(), x.bfloat16()).holds


def test_the_users_own_model_data_and_configs_do_not_clash_with_ours(tmp_path):
    """nanoGPT's model is in model.py, and Python looks beside the script first."""
    for name in ("model", "data", "configs"):
        (tmp_path / f"{name}.py").write_text("theirs = True\n")
    script = "import model, data, configs; from ablation.adoption import check_parity; print(model.theirs)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_models_stay_as_they_were(model):
    other = adopted(model)
    model.train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    model.head.weight.grad = torch.ones_like(model.head.weight)
    check_parity(model, other, batch())
    measure(model, other, batch(), **QUICK)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.final.weight.grad is None and not model.final._forward_hooks


def one_more_output(model):
    own = model.forward
    model.forward = lambda *args: (*own(*args), torch.zeros(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.final.weight.data.add_(1), r"final\.weight differs between the models"),
        (lambda model: model.add_module("extra", nn.Linear(2, 2)), r"only one of them has extra\.bias, extra\.weight"),
        (lambda model: model.final.weight.requires_grad_(False), r"final\.weight requires a gradient in one model only"),
        (one_more_output, "model_a returns 1 float tensors, model_b 2"),
    ],
)
def test_models_that_can_not_be_compared_are_refused(model, change, message):
    other = adopted(model)
    change(other)
    with pytest.raises(ValueError, match=message):
        check_parity(model, other, batch())


@pytest.mark.parametrize(
    ("compare", "given", "message"),
    [
        *(
            (compare, *case)
            for compare in (check_parity, measure)
            for case in (
                ({"autocast": torch.int8}, "autocast must be torch.bfloat16, torch.float16 or None, got torch.int8"),
                ({"loss": "loss"}, "loss must be a function of the model's output, got 'loss'"),
                ({"loss": lambda _: torch.zeros(2, 3)}, "loss must give a tensor of one number, got a tensor of shape (2, 3)"),
                ({"loss": lambda _: 1.0}, "loss must give a tensor of one number, got float"),
            )
        ),
        (check_parity, {"batch": []}, "batch is an empty list"),
        (measure, {"cycles": 5}, "cycles must be a whole number of 6 or more, got 5"),
        (measure, {"block_steps": 0}, "block_steps must be a whole number of 1 or more, got 0"),
        (measure, {"loss": lambda _: torch.zeros(())}, "the loss needs no gradient, and backward is timed too"),
    ],
)
def test_an_argument_that_can_not_be_used_is_named(model, compare, given, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(f"{compare.__name__}: {message}")):
        compare(model, adopted(model), **{"batch": batch()} | given)


def test_measure_times_both_models_in_turn_against_a_control(model):
    calls, other = [], adopted(model)
    model.register_forward_hook(lambda *call: calls.append("a"))
    other.register_forward_hook(lambda *call: calls.append("b"))
    timing = measure(model, other, batch(), cycles=6, block_steps=2, warmup_steps=1)
    assert calls.count("a") == 2 * calls.count("b") == 2 * (1 + 2 * (1 + 2) * (1 + 6))
    assert timing.a_ms > 0 and timing.b_ms > 0
    assert timing.verdict in str(timing) and "A/A" in timing.verdict
    assert ("No kernel was measured" in timing.verdict) == (not runs_kernels(torch.device("cpu")))


def test_the_loss_is_the_models_own_or_a_fixed_projection_of_the_output():
    one, y = torch.ones(2, 3), torch.randn(3, 5)
    for output in ((one, torch.tensor(4.0)), {"logits": one, "loss": torch.tensor(4.0)}, torch.tensor(4.0)):
        assert default_loss()(output).item() == 4
    assert default_loss()(y).dim() == 0 and torch.equal(default_loss()(y), default_loss()((y, None)))
    with pytest.raises(ValueError, match="no float tensor in the model's output, a list"):
        default_loss()([torch.ones(2).long()])


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_the_device_is_the_models_or_its_batchs_and_not_the_default(default):
    rounding._shuffled.cache_clear()
    norm, x = nn.LayerNorm(WIDTH), torch.randn(4, WIDTH, requires_grad=True)
    for before in (nn.Sequential(norm, nn.Linear(WIDTH, WIDTH)), nn.Sequential(nn.LayerNorm(WIDTH, elementwise_affine=False))):
        after = replaced(before)
        with torch.device(default):
            assert check_parity(before, after, x).verdict.startswith("Parity holds in float32: ")
            assert measure(before, after, x, **QUICK).a_ms > 0
