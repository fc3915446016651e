"""replace_norms: whose norms are taken, and that nothing but their forward changes."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import ops
from ops import BlockLayout, LayerNorm, Pending, RMSNorm, fuse_prenorm_block, replace_norms, restore_norms
from ops.adopt import AdoptedNorm
from ops.recognise import looks_like_a_norm

from . import lookalikes
from .cases import BF16, FP16, FP32

N = 24
KERNELS = "cuda" if torch.cuda.is_available() else "cpu"  # in the interpreter

TAKEN = {
    "LayerNorm": (lambda: nn.LayerNorm(N), "LayerNorm, eps 1e-05"),
    "LayerNorm without bias": (lambda: nn.LayerNorm(N, eps=1e-12, bias=False), "LayerNorm, eps 1e-12"),
    "LayerNorm without weight": (lambda: nn.LayerNorm(N, elementwise_affine=False), "LayerNorm, eps 1e-05"),
    "RMSNorm": (lambda: nn.RMSNorm(N, eps=1e-3), "RMSNorm, eps 0.001"),
    "RMSNorm, eps of the dtype": (lambda: nn.RMSNorm(N), "RMSNorm, eps the dtype's"),
    "Llama": (lambda: lookalikes.Llama(N, 1e-5), "RMSNorm, eps 1e-05"),
    "Gemma": (lambda: lookalikes.Gemma(N), "RMSNorm with weight 1 + w, eps 1e-06"),
    "T5": (lambda: lookalikes.T5(N), "RMSNorm, eps 1e-06"),
    "nanoGPT": (lambda: lookalikes.NanoGPT(N), "LayerNorm, eps 1e-05"),
    "nanoGPT without bias": (lambda: lookalikes.NanoGPT(N, bias=False), "LayerNorm, eps 1e-05"),
    "odd names": (lambda: lookalikes.OddlyNamed(N), "LayerNorm, eps 3e-05"),
    "a subclass": (lambda: lookalikes.InFp32(N), "LayerNorm, eps 1e-05"),
    "without weight": (lookalikes.WeightlessNorm, "RMSNorm, eps 1e-06"),
}

LEFT_ALONE = {
    "several dimensions": (lambda: nn.LayerNorm((2, N)), "over the last 2 dimensions"),
    "RMSNorm of several dimensions": (lambda: nn.RMSNorm((2, N)), "over the last 2 dimensions"),
    "BatchNorm": (lambda: nn.BatchNorm1d(N), "it norms channels"),
    "GroupNorm of one group": (lambda: nn.GroupNorm(1, N), "it norms channels"),
    "part of the row": (lambda: lookalikes.RMSNormOfPart(N), "neither LayerNorm nor RMSNorm"),
    "unbiased variance": (lambda: lookalikes.UnbiasedLayerNorm(4096), "neither LayerNorm nor RMSNorm"),
    "eps outside the root": (lambda: lookalikes.EpsOutsideRMSNorm(N), "neither LayerNorm nor RMSNorm"),
    "no eps": (lambda: lookalikes.UnitNorm(N), "rows of zeros"),
    "scaled": (lambda: lookalikes.ScaledLayerNorm(N), "neither LayerNorm nor RMSNorm"),
    "gated": (lambda: lookalikes.GatedRMSNorm(N), "its forward takes x, gate"),
    "random in training": (lambda: lookalikes.NoisyLayerNorm(N), "in training"),
    "channels": (lambda: lookalikes.LayerNorm2d(N), "raised|of more dimensions"),
    "|w|": (lambda: lookalikes.AbsoluteWeightRMSNorm(N), "neither LayerNorm nor RMSNorm"),
    "detached statistic": (lambda: lookalikes.DetachedRMSNorm(768), "its gradient is another"),
    "detached statistic, in place": (lambda: lookalikes.InPlaceDetached(768), "its gradient is another"),
    "detached weight": (lambda: lookalikes.DetachedWeightLayerNorm(N), "its gradient is another"),
    "clamped": (lambda: lookalikes.ClampedLayerNorm(768), "neither LayerNorm nor RMSNorm"),
    "eps by dtype": (lambda: lookalikes.EpsByDtypeLayerNorm(N), "something else of torch.bfloat16"),
    "buffers": (lambda: lookalikes.BuffersRMSNorm(N), "buffers"),
    "weights that are no parameters": (
        lambda: lookalikes.with_plain_tensors(nn.LayerNorm(N)),
        "weight and bias are tensors",
    ),
    "on meta": (lambda: nn.LayerNorm(N, device="meta"), "on meta"),
    "float64": (lambda: nn.LayerNorm(N, dtype=torch.float64, device=KERNELS), "float64, which the kernels"),
    "parametrized": (lambda: nn.utils.parametrize.register_parametrization(nn.LayerNorm(N), "weight", nn.ReLU()), "submodules"),
}


def randomised(module):
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module


@pytest.mark.parametrize("name", TAKEN)
def test_a_norm_is_recognised_by_what_it_computes_and_goes_on_computing_it(name, device):
    build, formula = TAKEN[name]
    norm = randomised(build()).to(device)
    x = torch.randn(5, N, device=device) * torch.tensor([1.0, 1e-3, 30.0, 1e-5, 0.0], device=device)[:, None]
    x.requires_grad_()
    expected = norm(x)
    wanted = torch.autograd.grad(expected.sin().sum(), [x, *norm.parameters()])
    (site,) = replace_norms(nn.ModuleDict({"norm": norm}), verbose=False)
    assert site.fused and site.why == formula
    assert isinstance(norm, RMSNorm if "RMS" in formula else LayerNorm)
    found = norm(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(found.sin().sum(), [x, *norm.parameters()]), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_only_looks_like_a_norm_is_left_alone_with_the_reason(name, capsys):
    build, why = LEFT_ALONE[name]
    module = build()
    cls, state = type(module), dict(vars(module))
    sites = replace_norms(nn.ModuleDict({"norm": module}))
    assert [site.fused for site in sites] == [False]
    assert type(module) is cls and vars(module).keys() == state.keys()
    assert re.search(why, sites[0].why), sites[0].why
    assert capsys.readouterr().out == f"{sites[0]}\n"


@pytest.mark.parametrize("module", [nn.PReLU(N), nn.Linear(N, 1), nn.Embedding(3, N), nn.Identity(), lookalikes.Weightless()])
def test_what_nobody_would_call_a_norm_is_passed_over_in_silence(module):
    assert replace_norms(nn.Sequential(module), verbose=False) == []


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "Llama", "Gemma", "T5", "nanoGPT", "a subclass"])
@pytest.mark.parametrize(("x", "weight"), [(BF16, BF16), (FP16, FP16), (BF16, FP32), (FP32, BF16)])
def test_the_output_keeps_the_dtype_that_the_module_gave_it(name, x, weight, device):
    norm = TAKEN[name][0]().to(device, weight)
    rows = torch.randn(3, N, device=device, dtype=x)
    try:
        expected = norm(rows)
    except RuntimeError:
        pytest.skip("the module takes no such mix")
    replace_norms(norm, verbose=False)
    assert norm(rows).dtype == expected.dtype
    torch.testing.assert_close(norm(rows), expected, rtol=2e-2, atol=2e-2)


def model():
    shared = lookalikes.Llama(N)
    blocks = nn.ModuleDict({"a": nn.LayerNorm(N), "b": shared, "c": nn.Linear(N, N), "d": shared, "e": nn.LayerNorm((1, N))})
    return nn.Sequential(blocks)


class Gain(lookalikes.EpsOutsideRMSNorm):
    """A class whose name says nothing."""


@pytest.mark.parametrize("name", ["norm1", "input_layernorm", "ln_f", "final_ln", "q_rms"])
def test_what_the_model_calls_a_norm_is_told_of_whatever_its_class(name):
    (site,) = replace_norms(nn.ModuleDict({name: Gain(N)}), verbose=False)
    assert str(site).startswith(f"{name}: Gain(24) → left alone (it is neither")


@pytest.mark.parametrize("name", ["gain", "learnt", "transforms"])
def test_what_nobody_calls_a_norm_is_told_of_if_it_is_taken(name):
    assert replace_norms(nn.ModuleDict({name: Gain(N), "norm": nn.Identity()}), verbose=False) == []
    (site,) = replace_norms(nn.ModuleDict({name: lookalikes.OddlyNamed(N)}), verbose=False)
    assert site.fused


def test_lines_say_what_was_replaced_and_what_was_not(capsys):
    sites = replace_norms(model())
    assert capsys.readouterr().out.splitlines() == [str(site) for site in sites] == [
        "0.a: LayerNorm(24) → fused (LayerNorm, eps 1e-05)",
        "0.b: Llama(24) → fused (RMSNorm, eps 1e-06)",
        "0.e: LayerNorm(1, 24) → left alone (it normalises over the last 2 dimensions, (1, 24); the kernels over one)",
    ]  # fmt: skip


def test_a_shared_norm_stays_shared_and_everybody_keeps_the_module_they_hold():
    net = model()
    held = dict(net.named_modules(remove_duplicate=False))
    replace_norms(net, verbose=False)
    assert all(module is held[name] for name, module in net.named_modules(remove_duplicate=False))
    assert held["0.b"] is held["0.d"] and isinstance(held["0.d"], RMSNorm)


def test_parameters_state_dict_mode_and_hooks_stay_and_restoring_gives_back_the_class():
    net = model().eval()
    net[0].a.train()
    before = [(name, type(module), dict(vars(module))) for name, module in net.named_modules()]
    parameters, calls = dict(net.named_parameters()), []
    net[0].a.register_forward_hook(lambda *call: calls.append("hook"))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)

    replace_norms(net, verbose=False)
    assert {name: id(p) for name, p in net.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert list(net.state_dict()) == list(model().state_dict())
    assert net[0].a.training and not net[0].b.training
    net[0].a(torch.randn(2, N)).square().sum().backward()
    assert calls == ["hook"]
    optimizer.step()
    assert not torch.equal(net[0].a.bias, torch.zeros(N))

    assert restore_norms(net, verbose=False) == ["0.a: LayerNorm as it was", "0.b: Llama as it was"]
    after = [(name, type(module), dict(vars(module))) for name, module in net.named_modules()]
    assert [(name, cls, attributes.keys()) for name, cls, attributes in after] == [
        (name, cls, attributes.keys()) for name, cls, attributes in before
    ]


def test_replacing_twice_is_replacing_once():
    net = model()
    replace_norms(net, verbose=False)
    classes = [type(module) for module in net.modules()]
    assert not any(site.fused for site in replace_norms(net, verbose=False))
    assert [type(module) for module in net.modules()] == classes
    restore_norms(net, verbose=False)
    assert type(net[0].a) is nn.LayerNorm


def test_looking_for_norms_runs_no_hook_draws_no_number_and_leaves_no_trace():
    net = model()
    net[0].a.register_forward_hook(lambda *call: pytest.fail("a hook ran"))
    net[0].b.weight.grad = torch.ones(N)
    state = torch.get_rng_state()
    replace_norms(net, verbose=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(net[0].b.weight, torch.ones(N)) and torch.equal(net[0].b.weight.grad, torch.ones(N))


@pytest.fixture(params=[BF16, torch.float64, "meta"], ids=str)
def defaults(request):
    """What torch makes without being told a dtype or a device is of another one than usual."""
    if isinstance(request.param, str):
        with torch.device(request.param):
            yield
        return
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", TAKEN)
def test_recognition_follows_no_default_of_torch(name, defaults):
    build, formula = TAKEN[name]
    norm = build().to_empty(device="cpu").float()
    (site,) = replace_norms(nn.ModuleDict({"norm": norm}), verbose=False)
    assert site.fused and site.why == formula


def test_a_forward_that_is_compiled_is_not_compiled_for_what_it_is_tried_on():
    compiled = []

    class Norm(lookalikes.Llama):
        forward = torch.compile(lookalikes.Llama.forward, backend=lambda graph, _: compiled.append(graph) or graph.forward)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.attn, self.norm2, self.mlp = Norm(N), nn.Linear(N, N), Norm(N), nn.Linear(N, N)

        @torch.compile(backend=lambda graph, _: compiled.append(graph) or graph.forward)
        def forward(self, x):
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    block = Block()
    fuse_prenorm_block(block, BlockLayout("norm1", "attn", "norm2", "mlp"))
    assert isinstance(block.norm1, AdoptedNorm) and not compiled


def test_isinstance_goes_on_finding_what_it_found_and_decay_groups_find_lookalikes_too():
    norm = lookalikes.Llama(N)
    replace_norms(norm, verbose=False)
    assert isinstance(norm, lookalikes.Llama) and isinstance(norm, nn.RMSNorm)


@pytest.mark.parametrize("norm", [lookalikes.InPlace, lookalikes.WithoutGradient])
def test_a_norm_that_has_no_gradient_to_compare_is_taken(norm, device):
    (site,) = replace_norms(norm(N).to(device), verbose=False)
    assert site.fused


@pytest.mark.parametrize("width", [2, 3, 5, 20_000])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, lookalikes.Gemma])
def test_norms_of_any_width_are_recognised(norm, width):
    (site,) = replace_norms(norm(width), verbose=False)
    assert site.fused


def test_norms_are_recognised_in_inference_mode_too(device):
    norm, net = nn.LayerNorm(N).to(device), nn.Sequential(lookalikes.DetachedRMSNorm(N).to(device))
    with torch.inference_mode():
        (site,), (left,) = replace_norms(norm, verbose=False), replace_norms(net, verbose=False)
    assert site.fused and not left.fused


def test_only_chooses():
    net = model()
    sites = replace_norms(net, only=lambda name, module: name.endswith("a"), verbose=False)
    assert [site.name for site in sites if site.fused] == ["0.a"]
    assert type(net[0].b) is lookalikes.Llama


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_replaced_norm_can_be_copied_and_pickled(copied, device):
    norm = randomised(lookalikes.Gemma(N)).to(device)
    replace_norms(norm, verbose=False)
    other = copied(norm)
    x = torch.randn(3, N, device=device)
    assert torch.equal(other(x), norm(x)) and other.weight is not norm.weight
    restore_norms(other, verbose=False)
    assert type(other) is lookalikes.Gemma


def test_a_replaced_norm_takes_the_stream_and_the_name_of_its_input(device):
    norm = lookalikes.Llama(N).to(device)
    replace_norms(norm, verbose=False)
    x, residual = torch.randn(2, 3, N, device=device)
    y, r = norm(hidden_states=x, residual=residual, prenorm=True)
    torch.testing.assert_close(r, x + residual)
    torch.testing.assert_close(y, lookalikes.Llama(N).to(device)(r))
    with pytest.raises(TypeError, match="got \\['input'\\]"):
        norm(input=x)


def test_eps_can_be_set_as_before(device):
    x = torch.randn(3, N, device=device)
    found = []
    for norm in (nn.LayerNorm(N).to(device), nn.LayerNorm(N).to(device)):
        if found:
            replace_norms(norm, verbose=False)
        norm.eps = 1.0
        found.append(norm(x))
    torch.testing.assert_close(*found)


def test_a_pending_is_not_taken_apart_in_silence(device):
    norm, x = nn.LayerNorm(N).to(device), torch.randn(3, N, device=device)
    replace_norms(norm, verbose=False)
    pending = Pending(x, x, 0.0)
    with pytest.raises(TypeError, match=r"\[0\] of a Pending.*hidden \+ residual"):
        pending[0]
    with pytest.raises(TypeError, match="got tuple; reentrant activation checkpointing"):
        norm(tuple(pending))
    with pytest.raises(TypeError, match="and residual was given"):
        norm(pending, residual=x)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: nn.LayerNorm(N)(x),
        lambda x: x + x,
        lambda x: torch.ones(N) + x,
        lambda x: 2 * x,
        lambda x: x.mean(1),
        lambda x: torch.cat([x, x]),
        lambda x: x.shape,
    ],
    ids=["a norm that is not replaced", "+", "a tensor +", "*", "mean", "cat", "shape"],
)
def test_a_pending_in_the_place_of_a_tensor_says_what_it_is_and_what_to_do(use):
    with pytest.raises((TypeError, AttributeError), match=r"of a Pending.*fuse every block of the stack"):
        use(Pending(torch.ones(3, N), torch.ones(3, N), 0.0))


def test_restoring_what_another_tool_has_changed_since_is_refused():
    norm = nn.LayerNorm(N)
    replace_norms(norm, verbose=False)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.ReLU())
    with pytest.raises(ValueError, match="was made a ParametrizedFusedLayerNorm by another tool"):
        restore_norms(norm, verbose=False)
    nn.utils.parametrize.remove_parametrizations(norm, "weight")
    restore_norms(norm, verbose=False)
    assert type(norm) is nn.LayerNorm


def test_restoring_what_somebody_wrapped_since_is_refused(device):
    norm, x = nn.LayerNorm(N).to(device), torch.randn(2, N, device=device)
    replace_norms(norm, verbose=False)
    norm.forward = lambda x, own=norm.forward: own(x)
    with pytest.raises(ValueError, match="wrapped on the instance after it was replaced"):
        restore_norms(norm)
    y = norm(x)
    del norm.forward
    restore_norms(norm, verbose=False)
    torch.testing.assert_close(norm(x), y)


def test_replacing_and_restoring_under_a_compiled_model_take_effect(device):
    torch._dynamo.reset()
    norm = nn.LayerNorm(N).to(device)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, N, device=device)
    expected = compiled(x)
    replace_norms(norm, verbose=False)
    norm.dropout_p = 0.9  # shows which of them runs
    assert (compiled(x) - expected).abs().max() > 0.1
    norm.dropout_p, norm.eps = 0.0, 1.0
    torch.testing.assert_close(compiled(x), nn.LayerNorm(N, eps=1.0).to(device)(x))
    restore_norms(norm, verbose=False)
    assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_encoder_layer_runs_ours_where_it_trains_and_its_own_kernel_where_it_does_not(norm_first, device, monkeypatch):
    layer = nn.TransformerEncoderLayer(N, 4, 2 * N, dropout=0.0, batch_first=True, norm_first=norm_first).to(device).eval()
    x = torch.randn(2, 5, N, device=device)
    expected = layer(x)
    replace_norms(layer, verbose=False)
    calls = []
    run = AdoptedNorm.forward
    monkeypatch.setattr(AdoptedNorm, "forward", lambda *args: (calls.append("ours"), run(*args))[1])
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    assert calls == ["ours", "ours"]
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    assert calls == ["ours", "ours"]  # it read the weights and ran a kernel of its own


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_by_a_replaced_norm(layout, device):
    norm = nn.LayerNorm(N).to(device)
    replace_norms(norm, verbose=False)
    rows = [torch.randn(n, N, device=device) for n in (3, 5)]
    with pytest.raises(ValueError, match="x is a nested tensor, expected a dense one"):
        norm(torch.nested.nested_tensor(rows, layout=layout))


def test_norms_with_one_weight_in_common_keep_it_in_common(device):
    net = nn.Sequential(nn.LayerNorm(N), nn.LayerNorm(N)).to(device)
    net[1].weight = net[0].weight
    x = torch.randn(3, N, device=device)
    (expected,) = torch.autograd.grad(net(x).sin().sum(), net[0].weight)
    assert all(site.fused for site in replace_norms(net, verbose=False)) and net[1].weight is net[0].weight
    torch.testing.assert_close(torch.autograd.grad(net(x).sin().sum(), net[0].weight)[0], expected, rtol=1e-4, atol=1e-5)


def test_only_modules_are_taken():
    with pytest.raises(TypeError, match=r"replace_norms: model must be a torch\.nn\.Module, got list"):
        replace_norms([nn.LayerNorm(N)])
    with pytest.raises(TypeError, match="replace_norms: only must be a function of a norm's name and module, got 'ln_f'"):
        replace_norms(nn.LayerNorm(N), only="ln_f")
    with pytest.raises(TypeError, match=r"restore_norms: model must be a torch\.nn\.Module, got list"):
        restore_norms([nn.LayerNorm(N)])


def test_a_norm_of_ours_is_fused_already():
    (site,) = replace_norms(ops.RMSNorm(N), verbose=False)
    assert str(site) == "model: RMSNorm(24) → left alone (it is fused already)"


@pytest.mark.parametrize("name", ["norm", "norm1", "input_layernorm", "final_norms", "ln_f", "lnf", "ln1", "attn_ln", "q_norm"])
def test_a_module_with_weights_may_be_called_a_norm_by_its_name(name):
    assert looks_like_a_norm(nn.Linear(2, 2), f"layers.0.{name}")


@pytest.mark.parametrize("name", ["norm_proj", "normal_head", "normalizer", "lnear", "kiln", "fc"])
def test_other_names_are_no_norms(name):
    assert not looks_like_a_norm(nn.Linear(2, 2), f"layers.0.{name}")
