import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from benchmarks import providers
from benchmarks.cases import CASES, Setting, check_forward, make_inputs
from benchmarks.providers import PROVIDERS, contender

CPU = torch.device("cpu")


@pytest.fixture
def library(monkeypatch):
    """Puts a made-up module in place of a library."""

    def install(name, **contents):
        module = ModuleType(name)
        vars(module).update(contents)
        parts = name.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


def test_missing_libraries_are_named_with_the_reason(monkeypatch):
    def importing(name):
        raise (ImportError("no such module") if "apex" in name else RuntimeError("no CUDA device\nfound"))

    monkeypatch.setattr(providers, "import_module", importing)
    assert providers.missing(["ours", "torch", "apex", "quack-kernels"]) == {
        "apex": "ImportError: no such module",
        "quack-kernels": "RuntimeError: no CUDA device",
    }


@pytest.mark.parametrize("make", [providers.torch_compile, providers.ours_compiled])
@pytest.mark.parametrize("name", ["rms", "dropout_add_ln"])
def test_compiled_contenders_compute_the_case(name, make, monkeypatch):
    """Without Inductor, which needs a C++ compiler and half a minute: what is tested is the wiring."""
    case, setting = CASES[name], Setting(residual_dtype=torch.float32)
    monkeypatch.setattr(providers, "compiled", lambda f: torch.compile(f, backend="eager", fullgraph=True, dynamic=False))
    (i,) = make_inputs(case, setting, 16, 128, 1, CPU)
    torch._dynamo.reset()
    torch.manual_seed(0)
    check_forward(case, setting, i, make(case, setting)(i))


@pytest.mark.parametrize(
    "provider, stream, weights, offered",
    [
        ("liger-kernel", torch.bfloat16, torch.bfloat16, {"ln", "rms", "add_rms"}),
        ("liger-kernel", torch.float32, torch.bfloat16, {"ln", "rms"}),
        ("quack-kernels", torch.bfloat16, torch.bfloat16, {"rms", "add_rms"}),
        ("apex", torch.bfloat16, torch.bfloat16, {"ln", "rms"}),
        ("apex", torch.bfloat16, torch.float32, set()),
    ],
)
def test_libraries_are_asked_only_for_what_they_offer(monkeypatch, provider, stream, weights, offered):
    names = ("LigerLayerNormFunction", "LigerRMSNormFunction", "LigerFusedAddRMSNormFunction")
    anything = SimpleNamespace(**dict.fromkeys(names, SimpleNamespace(apply=None)))
    monkeypatch.setattr(providers, "import_module", lambda name: anything)
    setting = Setting(residual_dtype=stream, weight_dtype=weights)
    assert {name for name, case in CASES.items() if PROVIDERS[provider].make(case, setting) is not None} == offered


class InPlace(torch.autograd.Function):
    """RMSNorm whose backward stores dx over dy, as Liger's does."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx, dy):
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = F.rms_norm(x, weight.shape, weight, ctx.eps)
        dx, dw = torch.autograd.grad(y, (x, weight), dy)
        return dy.copy_(dx), dw, None


def test_backward_that_overwrites_dy_leaves_the_others_theirs():
    case, setting = CASES["rms"], Setting()
    sets = make_inputs(case, setting, 16, 128, 2, CPU)
    before = [i.dy.clone() for i in sets]
    entrant = contender(
        "x", lambda i: (InPlace.apply(i.x, i.weight, 1e-5),), case, setting, "backward", sets, overwrites_dy=True
    )

    calls = entrant.build()
    first = calls[1]()[0].clone()
    second = calls[1]()[0].clone()
    entrant.before()
    again = calls[1]()[0]

    assert all(torch.equal(i.dy, dy) for i, dy in zip(sets, before, strict=True))
    assert not torch.equal(first, second) and torch.equal(first, again)
