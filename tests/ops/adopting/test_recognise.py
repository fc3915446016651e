"""Which modules replace_norms takes for norms: by what they compute, whatever they are called."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops import LayerNorm, RMSNorm, replace_norms

from . import lookalikes
from .lookalikes import Gemma, Llama, NanoGPT, OddlyNamed, like, randomised, rms

N = 24
BF16, FP32 = torch.bfloat16, torch.float32
KERNELS = "cuda" if torch.cuda.is_available() else "cpu"  # in the interpreter
TAKEN = {
    "LayerNorm": (lambda: nn.LayerNorm(N), "LayerNorm, eps 1e-05"),
    "LayerNorm without weight": (lambda: nn.LayerNorm(N, elementwise_affine=False), "LayerNorm, eps 1e-05"),
    "RMSNorm, eps of the dtype": (lambda: nn.RMSNorm(N), "RMSNorm, eps the dtype's"),
    "Llama": (lambda: Llama(N, 1e-5), "RMSNorm, eps 1e-05"),
    "Gemma": (lambda: Gemma(N), "RMSNorm with weight 1 + w, eps 1e-06"),
    "T5": (lambda: lookalikes.T5(N), "RMSNorm, eps 1e-06"),
    "nanoGPT without bias": (lambda: NanoGPT(N, bias=False), "LayerNorm, eps 1e-05"),
    "odd names": (lambda: OddlyNamed(N), "LayerNorm, eps 3e-05"),
    "a bias that is a buffer": (lambda: with_buffer(NanoGPT(N, bias=False)), "LayerNorm, eps 1e-05"),
    "a subclass": (lambda: like(nn.LayerNorm(N), in_fp32), "LayerNorm, eps 1e-05"),
    "without weight": (lambda: like(nn.Module(), lambda self, x: x / rms(x)), "RMSNorm, eps 1e-06"),
}


def with_buffer(norm):
    del norm.bias
    norm.register_buffer("bias", torch.zeros(N))
    return norm


def layer_norm(self, x, weight=None):
    return F.layer_norm(x, x.shape[-1:], self.weight if weight is None else weight, self.bias, 1e-5)


def in_fp32(self, x):
    return nn.LayerNorm.forward(self, x.float()).type_as(x)


def with_noise(self, x):
    return layer_norm(self, x) + 0.1 * self.training * torch.randn_like(x)


def eps_by_dtype(self, x):
    return F.layer_norm(x, (N,), self.weight, self.bias, 1e-5 if x.dtype == FP32 else 1e-3)


def std(x):
    return (x.var(-1, keepdim=True) + 1e-5).sqrt()


NEITHER = "neither LayerNorm nor RMSNorm"
DETACHED = "its gradient is another"


def channels_first(self, x):
    return layer_norm(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def another_copys():
    return like(nn.LayerNorm(N), nn.LayerNorm.forward, "AdoptedNorm")


def without_shape(norm):
    norm.weight = nn.UninitializedParameter()
    return norm


def of_heads(self, x):
    heads = x.unflatten(-1, (-1, self.weight.numel()))
    return (heads / rms(heads) * self.weight).flatten(-2)


LEFT_ALONE = {
    "several dimensions": (lambda: nn.LayerNorm((2, N)), "its weights have shapes"),
    "part of the row": (lambda: like(Llama(N), lambda self, x: self.weight * x / rms(x[..., : N // 4])), NEITHER),
    "unbiased variance": (lambda: like(Llama(4096), lambda self, x: self.weight * (x - x.mean(-1, True)) / std(x)), NEITHER),
    "eps outside the root": (lambda: like(Llama(N), lambda self, x: self.weight * x / (rms(x, 0.0) + 1e-6)), NEITHER),
    "no eps": (lambda: like(Llama(N), lambda self, x: F.normalize(x, dim=-1) * N**0.5 * self.weight), "rows of zeros"),
    "clamped": (lambda: like(nn.LayerNorm(768), lambda self, x: layer_norm(self, x).clamp(-10, 10)), NEITHER),
    "gated": (lambda: like(Llama(N), lambda self, x, gate=None: self.weight * x / rms(x)), "its forward takes x, gate"),
    "random in training": (lambda: like(nn.LayerNorm(N), with_noise), "in training"),
    "detached statistic": (lambda: like(Llama(768), lambda self, x: self.weight * x / rms(x.detach())), DETACHED),
    "eps by dtype": (lambda: like(NanoGPT(N), eps_by_dtype), "something else of torch.bfloat16"),
    "one gain for all features": (
        lambda: like(Llama(1), Llama.forward, "GainNorm"),
        "it also takes rows of 2, as a norm of parts",
    ),
    "a norm of each head": (lambda: like(Llama(N), of_heads), f"it also takes rows of {2 * N}"),
    "lazy": (lambda: without_shape(Llama(N)), "its weights have no shape yet; run the model once"),
    "channels first": (lambda: like(nn.LayerNorm(N), channels_first), f"it takes channels first, .batch, {N}, height, width"),
    "another copy's": (another_copys, "it is fused already, by another copy of this package"),
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
def test_what_only_looks_like_a_norm_is_left_alone_with_the_reason(name, capsys, kernel):
    build, why = LEFT_ALONE[name]
    module = build()
    cls, state = type(module), dict(vars(module))
    (site,) = replace_norms(nn.ModuleDict({"norm": module}))
    assert not site.fused and re.search(why, site.why), site.why
    assert type(module) is cls and vars(module).keys() == state.keys()
    assert capsys.readouterr().out == f"{site}\n"


def test_what_nobody_would_call_a_norm_is_passed_over_in_silence():
    others = [nn.BatchNorm1d(N), nn.GroupNorm(1, N), nn.LazyBatchNorm1d(), nn.LazyLinear(N), nn.PReLU(N), nn.Embedding(3, N)]
    assert replace_norms(nn.Sequential(*others, like(nn.Module(), lambda self, x: x / rms(x), "Other")), verbose=False) == []


@pytest.mark.parametrize("name", ["LayerNorm", "Llama", "Gemma", "T5", "a subclass"])
@pytest.mark.parametrize(("x", "weight"), [(BF16, BF16), (BF16, FP32), (FP32, BF16)])
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


NORMS = ("norm", "norms_2", "lnf", "ln_f", "ln1", "final_ln", "q_norm", "input_layernorm", "q_rms")
OTHERS = ("norm_proj", "normalizer", "learnt", "kiln", "fc", "transforms")


def test_a_near_miss_is_told_of_where_the_model_calls_it_a_norm_and_a_norm_everywhere():
    near_miss = like(Llama(N), lambda self, x: 2 * self.weight * x / rms(x), "Gain")  # a name that says nothing
    sites = replace_norms(nn.ModuleDict(dict.fromkeys(OTHERS, near_miss)), verbose=False)
    sites += [site for name in NORMS for site in replace_norms(nn.ModuleDict({name: near_miss}), verbose=False)]
    assert [str(site).split(" (it is neither")[0] for site in sites] == [f"{name}: Gain(24) → left alone" for name in NORMS]
    (site,) = replace_norms(nn.ModuleDict({"fc": OddlyNamed(N)}), verbose=False)
    assert site.fused


def test_looking_for_norms_runs_no_hook_draws_no_number_and_leaves_no_trace():
    net = nn.Sequential(nn.ModuleDict({"a": nn.LayerNorm(N), "b": Llama(N)}))
    net[0].a.register_forward_hook(lambda *call: pytest.fail("a hook ran"))
    net[0].b.weight.grad = torch.ones(N)
    state = torch.get_rng_state()
    replace_norms(net, verbose=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(net[0].b.weight, torch.ones(N)) and torch.equal(net[0].b.weight.grad, torch.ones(N))


def test_a_norm_that_has_no_gradient_to_compare_is_taken(device):
    for_inference = torch.no_grad()(lambda self, x: self.weight * x / rms(x))
    (site,) = replace_norms(like(Llama(N), for_inference).to(device), verbose=False)
    assert site.fused


def test_norms_of_any_width_are_recognised():
    norms = [norm(width) for norm in (nn.LayerNorm, nn.RMSNorm, Gemma) for width in (2, 3, 20_000)]
    assert all(site.fused for site in replace_norms(nn.Sequential(*norms), verbose=False))


def test_what_a_norm_gives_lies_in_memory_as_before_and_tools_find_its_class_by_name(device):
    norm, x = Llama(N).to(device), torch.randn(2, N, 3, device=device).transpose(1, 2)
    expected = norm(x)
    replace_norms(norm, verbose=False)
    assert type(norm) is not Llama and type(norm).__name__ == "Llama"
    assert norm(x).stride() == expected.stride()
    torch.testing.assert_close(norm(x), expected)


class CountedNorm(Llama):
    def forward(self, x):
        self.calls.append(1)
        return super().forward(x)


class LastNorm(Llama):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


@pytest.mark.parametrize("kind", [CountedNorm, LastNorm])
def test_a_norm_that_keeps_something_is_left_alone_and_not_touched(kind):
    norm = kind(N)
    norm.calls = []
    (site,) = replace_norms(norm, verbose=False)
    assert site.why == "its forward keeps something as an attribute"
    assert type(norm) is kind and norm.calls == [] and not hasattr(norm, "last")
