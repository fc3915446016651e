"""The switch changes the operator and nothing else."""

import pytest
import torch
from torch import nn

from configs.schema import NormConfig, NormKind
from model import attention
from model import norm as switch
from model.norm import NormSite

IMPLS = ("fused", "torch")
KINDS = tuple(NormKind)
for_both = pytest.mark.parametrize("impl", IMPLS)


def site(impl="torch", kind="layernorm", width=16, masks="shared", eps=1e-5, **options) -> NormSite:
    return NormSite(width, NormConfig(impl=impl, kind=kind, eps=eps, dropout_masks=masks), **options)


def qk_kind(kind):
    """Queries and keys have no pointwise norms."""
    return kind if kind in ("layernorm", "rmsnorm") else "rmsnorm"


def loss_and_gradients(model, batch, **kwargs) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(2)  # attention dropout is PyTorch's under both implementations
    loss = model(*batch, **kwargs)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("residual_dtype", ["fp32", "compute"])
@pytest.mark.parametrize("rates", [{}, {"dropout": 0.2, "drop_path": 0.5}])
@pytest.mark.parametrize("block", ["sequential", "parallel"])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_and_torch_with_shared_masks_agree(build, batch, kind, block, rates, residual_dtype, autocast):
    options = {"block": block, "residual_dtype": residual_dtype, "norm_kind": kind, "qk_norm_kind": qk_kind(kind)} | rates
    models = [build(**options, norm_impl=impl, qk_norm=True, norm_dropout_masks="shared") for impl in IMPLS]
    models[1].load_state_dict(models[0].state_dict())  # a checkpoint of one loads in the other
    seeds = torch.arange(models[0].dropout_sites)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (loss, gradients), (expected, expected_gradients) = (loss_and_gradients(m, batch, seeds=seeds) for m in models)
    # the same formula in two orders of summation: a few ulp of a loss near 5, in bf16 one of 2, and of gradients below 0.1
    assert loss == pytest.approx(expected, abs=2**-7 if autocast else 1e-5)
    assert gradients.keys() == expected_gradients.keys()
    if not autocast:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(("impl", "fused_calls"), [("fused", 5), ("torch", 0)])
def test_impl_picks_the_operator_at_every_site(build, batch, monkeypatch, impl, fused_calls):
    calls, original = [], switch.norm_fn
    monkeypatch.setattr(switch, "norm_fn", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    build(norm_impl=impl)(*batch)
    assert len(calls) == fused_calls


@pytest.mark.parametrize(("masks", "distinct"), [("native", 1), ("shared", 2)])
def test_shared_masks_follow_the_models_seeds_and_native_masks_of_torch_do_not(build, batch, masks, distinct):
    model = build(dropout=0.3, norm_impl="torch", norm_dropout_masks=masks)
    assert len({loss_and_gradients(model, batch, seeds=torch.arange(5) + first)[0] for first in (0, 100)}) == distinct


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


@pytest.mark.parametrize("masks", ["native", "shared"])
def test_torchs_dropout_keeps_the_mean_and_stops_in_evaluation(masks):
    norm, x = site("torch", width=4096, masks=masks, dropout=0.25), torch.ones(1, 8, 4096)
    _, stream = norm(x, seed=torch.tensor(0))
    assert stream.mean().item() == pytest.approx(1, abs=0.02)  # 32768 draws: the standard error is 0.003
    assert torch.equal(norm.eval()(x, seed=torch.tensor(0))[1], x) and stream.unique().tolist() == pytest.approx([0, 1 / 0.75])


def test_drop_path_drops_whole_samples_independently_for_x_and_x1_by_the_seed():
    norm = site(parallel=True, drop_path=(0.5, 0.25))
    residual = torch.zeros(4000, 3, 16)
    x, x1 = torch.full_like(residual, 1.0), torch.full_like(residual, 100.0)
    *_, stream = norm(x, residual, x1=x1, seed=torch.tensor(0))
    per_sample = stream.flatten(1)
    assert (per_sample == per_sample[:, :1]).all()
    kept1, kept = (per_sample[:, 0] > 50).float(), (per_sample[:, 0] % (100 / 0.75) > 0.5).float()
    # 4000 draws: standard errors 0.008 and 0.007
    assert kept.mean().item() == pytest.approx(0.5, abs=0.04)
    assert kept1.mean().item() == pytest.approx(0.75, abs=0.035)
    assert (kept * kept1).mean().item() == pytest.approx(0.375, abs=0.04)
    torch.testing.assert_close(per_sample[:, 0], kept * 2 + kept1 * 100 / 0.75)
    assert not torch.equal(norm(x, residual, x1=x1, seed=torch.tensor(1))[2], stream)
    *_, stream = norm.eval()(x, residual, x1=x1)
    torch.testing.assert_close(stream, x + x1)


@pytest.mark.parametrize(("residual_dtype", "stream_dtype"), [("fp32", torch.float32), ("compute", torch.bfloat16)])
@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("masks", ["native", "shared"])
def test_compiled_is_torchs_site_and_nothing_else_of_the_model_is_compiled(build, batch, monkeypatch, masks):
    compiled = []

    def compile(function, **how):
        assert how == {"fullgraph": True}
        return lambda *given: compiled.append(function) or function(*given)

    monkeypatch.setattr(torch, "compile", compile)
    switch.compiled_alone.cache_clear()
    models = [build(dropout=0.3, norm_impl=impl, norm_dropout_masks=masks, qk_norm=True) for impl in ("compiled", "torch")]
    found, expected = (loss_and_gradients(m, batch, seeds=torch.arange(5)) for m in models)
    switch.compiled_alone.cache_clear()
    assert found[0] == expected[0] and all(torch.equal(g, expected[1][name]) for name, g in found[1].items())
    layer = [switch.torch_site, attention.query_key_site, switch.torch_site]
    assert compiled == [*layer, *layer, switch.torch_site]


def test_a_compiled_site_trains_and_evaluates_as_torchs_does():
    """With the real compiler, which takes half a minute: forward and backward, training and evaluation, a second shape."""
    ours, theirs = (site(impl, width=32, dropout=0.2) for impl in ("compiled", "torch"))
    for rows in (6, 4):
        x, residual = torch.randn(2, rows, 32, requires_grad=True), torch.randn(2, rows, 32)
        found, expected = (norm(x, residual, seed=torch.tensor(3)) for norm in (ours, theirs))
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(y.square().sum() + r.sum(), (x, norm.weight, norm.bias))
                     for norm, (y, r) in ((ours, found), (theirs, expected))]  # fmt: skip
        torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x, residual), theirs.eval()(x, residual))
