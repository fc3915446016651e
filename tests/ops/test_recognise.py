"""Which modules replace_norms takes for norms: by what they compute, whatever they are called."""

import re

import pytest
import torch
from torch import nn

import ops
from ops import BlockLayout, LayerNorm, RMSNorm, fuse_prenorm_block, replace_norms
from ops.adopt.norms import AdoptedNorm
from ops.adopt.recognise import looks_like_a_norm

from . import lookalikes
from .cases import BF16, FP16, FP32
from .lookalikes import randomised

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


def test_looking_for_norms_runs_no_hook_draws_no_number_and_leaves_no_trace():
    net = nn.Sequential(nn.ModuleDict({"a": nn.LayerNorm(N), "b": lookalikes.Llama(N)}))
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


def test_a_norm_of_ours_is_fused_already():
    (site,) = replace_norms(ops.RMSNorm(N), verbose=False)
    assert str(site) == "model: RMSNorm(24) → left alone (it is fused already)"


@pytest.mark.parametrize("name", ["norm", "norm1", "input_layernorm", "final_norms", "ln_f", "lnf", "ln1", "attn_ln", "q_norm"])
def test_a_module_with_weights_may_be_called_a_norm_by_its_name(name):
    assert looks_like_a_norm(nn.Linear(2, 2), f"layers.0.{name}")


@pytest.mark.parametrize("name", ["norm_proj", "normal_head", "normalizer", "lnear", "kiln", "fc"])
def test_other_names_are_no_norms(name):
    assert not looks_like_a_norm(nn.Linear(2, 2), f"layers.0.{name}")
