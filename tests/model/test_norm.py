"""The switch changes the operator and nothing else."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from configs.schema import NormConfig, NormKind
from model import attention, sites
from model.norm import NormSite
from tests.ops.cases import covering

for_both = pytest.mark.parametrize("impl", ["fused", "torch"])


def site(impl="torch", kind="layernorm", width=16, masks="shared", eps=1e-5, **options) -> NormSite:
    return NormSite(width, NormConfig(impl=impl, kind=kind, eps=eps, dropout_masks=masks), **options)


MODELS = [
    *((kind, {"block": block}) for kind in NormKind for block in ("sequential", "parallel")),
    *(("rmsnorm", {"norm_placement": placement}) for placement in ("post", "inside", "sandwich")),
    ("layernorm", {"qk_norm": False, "positions": "rotary"}), ("rmsnorm", {"positions": "rotary", "kv_heads": 2}),
]  # fmt: skip
RATES = [{}, {"dropout": 0.2, "drop_path": 0.5}]


@pytest.mark.parametrize(
    "case", covering(model=MODELS, rates=RATES, residual_dtype=["fp32", "compute"], autocast=[False, True]), ids=str
)
def test_implementations_with_shared_masks_agree(build, batch, case, device, monkeypatch):
    """A checkpoint of one loads in the other."""
    for module in ("norm", "attention"):
        monkeypatch.setattr(f"model.{module}.compiled_alone", lambda function: function)
    (kind, shape), autocast = case["model"], case["autocast"]
    qk_kind = kind if kind in ("layernorm", "rmsnorm") else "rmsnorm"  # queries and keys have no pointwise norms
    options = {"residual_dtype": case["residual_dtype"], "norm_kind": kind, "qk_norm": True, "qk_norm_kind": qk_kind}
    options |= case["rates"] | shape
    impls = ("fused", "torch", "compiled")
    models = [build(**options, norm_impl=impl, norm_dropout_masks="shared").to(device) for impl in impls]
    for parameter in models[0].parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.03)  # so that no bias is 0, and no weight 1
    seeds, found = torch.arange(models[0].dropout_sites, device=device), []
    for model in models:
        model.load_state_dict(models[0].state_dict())
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            torch.manual_seed(2)  # attention dropout is PyTorch's under all implementations
            loss = model(*(part.to(device) for part in batch), seeds)
        found.append((loss.item(), torch.autograd.grad(loss, list(model.parameters()))))
    # the same formula in two orders of summation: a few ulp of a loss near 5, in bf16 one of 2, and of gradients below 0.1
    (loss, gradients), *others = found
    for other, its_gradients in others:
        assert loss == pytest.approx(other, abs=2**-6 if autocast else 1e-5)
        if not autocast:
            torch.testing.assert_close(gradients, its_gradients, atol=2e-6, rtol=1e-4)


@for_both
def test_impl_picks_the_operator_at_every_site(build, batch, monkeypatch, impl):
    calls = {}
    for module, name in ((sites, "norm_fn"), (attention, "rotary_qkv_fn")):
        calls[name] = Mock(wraps=getattr(module, name))
        monkeypatch.setattr(module, name, calls[name])
    build(norm_impl=impl, qk_norm=True)(*batch)
    assert [call.call_count for call in calls.values()] == ([5, 2] if impl == "fused" else [0, 0])


@for_both
@pytest.mark.parametrize(("kind", "theirs"), [("layernorm", nn.LayerNorm(16, eps=1e-3)), ("rmsnorm", nn.RMSNorm(16, eps=1e-3))])
def test_parameters_are_those_of_torch_nn(impl, kind, theirs):
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    ours = site(impl, kind, eps=1e-3, prenorm=False)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 3, 16) * 0.05  # so small that eps counts
    torch.testing.assert_close(ours(x), theirs(x))
    assert (site(impl, kind, parallel=True).bias1 is not None) == (kind == "layernorm")
    assert site(impl, kind, bias=False).bias is None


def test_drop_path_drops_whole_samples_independently_for_x_and_x1_by_the_seed():
    module = site(parallel=True, drop_path=(0.5, 0.25))
    residual = torch.zeros(4000, 3, 16)
    x, x1 = torch.full_like(residual, 1.0), torch.full_like(residual, 100.0)
    *_, stream = module(x, residual, x1=x1, seed=torch.tensor(0))
    kept1, kept = (stream > 50).float(), (stream % (100 / 0.75) > 0.5).float()
    torch.testing.assert_close(stream, (kept * 2 + kept1 * 100 / 0.75)[:, :1, :1].expand_as(stream))
    found = [rate.mean().item() for rate in (kept, kept1, kept * kept1)]
    assert found == [pytest.approx(rate, abs=0.04) for rate in (0.5, 0.75, 0.375)]  # 4000 draws: standard errors below 0.008
    assert not torch.equal(module(x, residual, x1=x1, seed=torch.tensor(1))[2], stream)
    torch.testing.assert_close(module.eval()(x, residual, x1=x1)[2], x + x1)


@pytest.mark.parametrize(("residual_dtype", "stream_dtype"), [("fp32", torch.float32), ("compute", torch.bfloat16)])
@pytest.mark.parametrize("kind", NormKind)
@for_both
def test_dtypes_under_autocast(build, batch, impl, kind, residual_dtype, stream_dtype):
    model, outputs, streams = build(norm_impl=impl, norm_kind=kind, residual_dtype=residual_dtype), set(), set()
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, outputs: streams.add(outputs[2].dtype))
        block.attention_norm.register_forward_hook(lambda module, inputs, result: outputs.add(result[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(*batch)
    assert outputs == {torch.bfloat16} and streams == {stream_dtype}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_compiled_site_trains_and_evaluates_as_torchs_does(monkeypatch):
    """Its graphs; what inductor makes of a model: tests/training/test_learning.py."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    ours, theirs = (site(impl, width=32, dropout=0.2) for impl in ("compiled", "torch"))
    x, residual = torch.randn(2, 6, 32, requires_grad=True), torch.randn(2, 6, 32)
    found, expected = (norm(x, residual, seed=torch.tensor(3)) for norm in (ours, theirs))
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(y.square().sum() + r.sum(), (x, norm.weight, norm.bias))
                 for norm, (y, r) in ((ours, found), (theirs, expected))]  # fmt: skip
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x, residual), theirs.eval()(x, residual))
