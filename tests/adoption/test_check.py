"""check_parity and measure: of models that this project has never seen, and of none that would make their sentences wrong."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ops
from adoption.check import check_parity, measure
from adoption.models import default_loss, norms_of, reordered_copy
from examples.nanogpt_block import GPT
from ops import adopt
from ops.kernels import runs_kernels

WIDTH = 32
X = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(0))
QUICK = {"cycles": 6, "block_steps": 1, "warmup_steps": 0}
FP32, BF16 = torch.float32, torch.bfloat16


class Model(GPT):
    """That of an example; without targets its output has no loss."""

    def forward(self, tokens, targets=None):
        logits, loss = super().forward(tokens, tokens if targets is None else targets)
        return logits if targets is None else (logits, loss)


class Net(nn.Module):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.final = norm(WIDTH)

    def forward(self, x):
        return self.final(x + self.layers(x))


class ByDtype(Net):
    def forward(self, x):
        return super().forward(x) * (-1 if x.dtype is torch.float64 else 1)


class Fp32Alone(Net):
    def forward(self, x):
        assert x.dtype is FP32, "fp32 alone"
        return super().forward(x)


class Reentrant(Net):
    def forward(self, x):
        return self.final(x + checkpoint(self.layers, x, use_reentrant=True))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model(50, 16, WIDTH, heads=4, layers=2)


def batch(seed=0):
    tokens = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def adopted(model):
    adopt(model := copy.deepcopy(model), verbose=False)
    return model


def with_norms(model, change):
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            change(module)
    return model


def wrong_eps(norm):
    norm.eps = 2e-5 if norm.weight.dtype is FP32 else 0.1


def lost_weight_gradient(norm):
    norm.forward = lambda x: F.layer_norm(x, x.shape[-1:], norm.weight.detach(), norm.bias, norm.eps)


@pytest.mark.parametrize("how", ["bf16", "autocast", "five batches", "a parameter that no loss reaches", "no loss"])
def test_adopted_models_are_at_parity(model, how):
    model = model.to(BF16 if how == "bf16" else FP32)
    if "parameter" in how:
        model.unused, model.empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.empty(0))
    given = [batch(seed) for seed in range(5)] if "five" in how else batch()[0] if how == "no loss" else batch()
    check = check_parity(model, adopted(model), given, autocast=BF16 if how == "autocast" else None)
    assert check.holds and "Parity holds" in str(check) and ("5 batches" in check.verdict) == ("five" in how), check
    names = {row.name for row in check.rows}
    assert {"output", "gradient of blocks.1.mlp.up.weight", "row scale of ln_f"} <= names
    assert ("loss" in names) == (how != "no loss")
    # The projection of the output that stands in for a loss is the same one in fp64.
    assert how in ("bf16", "autocast") or max(row.error for row in check.rows) < 1e-4, check


@pytest.mark.parametrize(
    ("change", "dtype", "with_loss"),
    [(wrong_eps, FP32, True), (wrong_eps, BF16, True), (lost_weight_gradient, FP32, False)],
)
def test_a_planted_mistake_fails_and_is_named(model, change, dtype, with_loss):
    model = model.to(dtype)
    check = check_parity(model, with_norms(model, change), batch() if with_loss else batch()[0])
    worst = check.rows[0]
    assert not check.holds and "NO" in str(check)
    assert check.verdict.startswith("Parity fails in ") and worst.failure in check.verdict
    if change is lost_weight_gradient:
        assert worst.name.startswith("gradient of") and worst.error == pytest.approx(1.0), check


def test_a_reference_that_computes_something_else_is_refused_and_does_not_make_everything_right():
    with pytest.raises(ValueError, match="the outputs of model_a are 2 away from those of its copy in fp64"):
        check_parity(model := ByDtype(), adopted(model), X)
    with pytest.raises(ValueError, match=r"the gradients of model_a are \S+ away from those of its copy"):
        check_parity(model := Net(), adopted(model), X, loss=lambda y: (y.sin() if y.dtype is FP32 else y.square()).mean())


@pytest.mark.parametrize("kind", [Fp32Alone, Reentrant])
def test_models_that_refuse_fp64_or_gradients_of_parts_are_compared_all_the_same(kind):
    torch.manual_seed(0)
    model, x = kind(), X.clone().requires_grad_()
    check = check_parity(model, adopted(model), x)
    assert check.holds and "gradient of layers.0.weight" in {row.name for row in check.rows} and x.grad is None, check
    in_fp32 = "The reference is in fp32 too: in fp64, a copy of model_a raised AssertionError: fp32 alone"
    assert (in_fp32 in check.verdict) == (kind is Fp32Alone)
    for change in (wrong_eps, lost_weight_gradient):
        assert not check_parity(model, with_norms(model, change), x).holds, change


def test_the_copy_whose_norms_sum_in_another_order_differs_by_rounding_alone():
    model = Net(nn.RMSNorm)
    found, expected = reordered_copy(model, norms_of(model))(X), model(X)
    torch.testing.assert_close(found, expected)
    assert not torch.equal(found, expected)


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
    assert model.ln_f.weight.grad is None and not model.ln_f._forward_hooks


def test_measure_times_both_models_in_turn_against_a_control(model):
    calls, other = [], adopted(model)
    for one in (model, other):
        one.register_forward_hook(lambda called, *_: calls.append(called))
    timing = measure(model, other, batch(), cycles=6, block_steps=2, warmup_steps=1)
    assert calls.count(model) == 2 * calls.count(other) == 2 * (1 + 2 * (1 + 2) * (1 + 6))
    assert timing.a_ms > 0 and timing.b_ms > 0 and timing.verdict in str(timing) and "A/A" in timing.verdict
    assert ("No kernel was measured" in timing.verdict) == (not runs_kernels(torch.device("cpu")))


def test_the_loss_is_the_models_own_or_a_fixed_projection_of_the_output():
    one, y = torch.ones(2, 3), torch.randn(3, 5)
    for output in ((one, torch.tensor(4.0)), {"logits": one, "loss": torch.tensor(4.0)}, torch.tensor(4.0)):
        assert default_loss(output).item() == 4
    assert default_loss(y).dim() == 0 and torch.equal(default_loss(y), default_loss((y, None)))
    with pytest.raises(ValueError, match="no float tensor in the model's output, a list"):
        default_loss([torch.ones(2).long()])


class Lenient(Model):
    """As models of transformers, which take what they do not know."""

    def forward(self, tokens, targets=None, **others):
        return super().forward(tokens, targets)


def test_a_loss_that_is_left_out_and_a_misspelt_key_are_said():
    torch.manual_seed(0)
    model = Lenient(50, 16, WIDTH, heads=4, layers=1)
    tokens, targets = batch()
    for given, unknown, projected in (
        ({"tokens": tokens, "targets": targets}, False, False),
        ({"tokens": tokens, "target": targets}, True, True),
        (tokens, False, True),
    ):
        verdict = check_parity(model, adopted(model), given).verdict
        assert ("The forward of Lenient names no target, which batch has." in verdict) == unknown
        assert ("It takes targets, and returned no loss" in verdict) == projected


# ---- which pairs are refused -------------------------------------------------------------------------------------------------


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    (model := copy.deepcopy(model)).compile(backend="eager")
    return model


def changed(change):
    def pair(model):
        change(other := adopted(model))
        return model, other

    return pair


PAIRS = {
    "one model": (lambda model: (model, model), r"one and the same model, .* \(before = copy\.deepcopy\(model\)\)"),
    "compiled and not": (lambda model: (model, compiled(model)), "one and the same model"),
    "exchanged": (lambda model: (adopted(model), model), r"2 of its norms are fused: layers\.1, final\. Copy .* exchange"),
    "our modules": (lambda model: (Net(ops.RMSNorm), model), "2 of its norms are fused"),
    "compiled": (lambda model: (model, compiled(adopted(model))), "model_b is compiled, .* pass what torch.compile was given"),
    "compiled in place": (lambda model: (compiled_in_place(model), adopted(model)), "model_a is compiled"),
    "values": (changed(lambda model: model.final.weight.data.add_(1)), r"final\.weight differs between the models"),
    "parameters": (
        changed(lambda model: model.add_module("extra", nn.Linear(2, 2))),
        r"only one has extra\.bias, extra\.weight",
    ),
    "frozen": (changed(lambda model: model.final.weight.requires_grad_(False)), "requires a gradient in one model only"),
    "outputs": (
        changed(lambda model: model.register_forward_hook(lambda *call: (call[-1], X[0]))),
        r"shapes \[\(2, 12, 32\)\], model_b \[\(2, 12, 32\), \(12, 32\)\]",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_models_that_can_not_be_compared_are_refused(name):
    pair, message = PAIRS[name]
    a, b = pair(Net())
    with pytest.raises(ValueError, match=message):
        check_parity(a, b, X)


def test_a_batch_that_comes_twice_is_refused():
    model = Net()
    with pytest.raises(ValueError, match="has a batch twice"):
        check_parity(model, adopted(model), [X] * 4)


def test_a_model_in_which_nothing_is_replaced_is_told_by_its_bits():
    model = Net()
    asked = "model_b gives the same bits as model_a: is anything replaced in it?"
    assert asked in check_parity(model, copy.deepcopy(model), X).verdict
    assert asked not in check_parity(model, adopted(model), X).verdict


@pytest.mark.parametrize("wrap", [compiled, compiled_in_place])
def test_compiled_models_are_timed(wrap):
    model = Net()
    assert measure(wrap(model), wrap(adopted(model)), X, **QUICK).a_ms > 0
    with pytest.raises(ValueError, match="one and the same model"):
        measure(model, compiled(model), X)
