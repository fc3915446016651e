import pytest
import torch
import torch.nn.functional as F

from configs.schema import ModelConfig, NormConfig
from model import attention as site
from model.attention import Attention, rotary_table, rotate


def attention(impl="fused", kind="layernorm", **options) -> Attention:
    torch.manual_seed(0)
    return Attention(ModelConfig(**{"heads": 4, "width": 32} | options), NormConfig(impl=impl, kind=kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # two ways of sharing heads
def test_grouped_query_equals_multi_head_with_repeated_keys_and_values(dtype):
    grouped, full = attention(kv_heads=2).to(dtype), attention().to(dtype)
    with torch.no_grad():
        for name in ("weight", "bias"):
            q, k, v = getattr(grouped.qkv, name).split((32, 16, 16))
            k, v = (h.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1) for h in (k, v))
            getattr(full.qkv, name).copy_(torch.cat((q, k, v)))
    full.out.load_state_dict(grouped.out.state_dict())
    x = torch.randn(2, 7, 32).to(dtype)
    torch.testing.assert_close(grouped(x), full(x))
    assert (grouped.qkv.weight.shape, full.qkv.weight.shape) == ((32 + 2 * 16, 32), (96, 32))


@pytest.mark.parametrize(("kind", "qk_norm"), [("layernorm", True), ("rmsnorm", True), ("layernorm", False)])
def test_qk_norm_makes_scores_independent_of_the_scale_of_queries_and_keys(kind, qk_norm):
    module = Attention(ModelConfig(heads=4, width=32, bias=False, qk_norm=qk_norm), NormConfig(kind=kind, eps=1e-12))
    x = torch.randn(2, 7, 32)
    before = module(x)
    with torch.no_grad():
        module.qkv.weight[:64] *= 10
    assert torch.allclose(module(x), before, atol=1e-5) == qk_norm
    if qk_norm:
        assert module.query_norm.kind.name == kind and module.query_norm.weight.shape == module.key_norm.weight.shape == (8,)


def test_rotary_turns_halves_by_the_published_angle():
    x = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(1, 6, 1, 4)  # pairs (0, 2) and (1, 3)
    angles = 5 * torch.tensor([1.0, 100**-0.5])
    turned = rotate(x, rotary_table(context=6, head_width=4, base=100.0))[0, 5, 0]
    torch.testing.assert_close(turned, torch.cat((angles.cos(), angles.sin())))


@pytest.mark.parametrize(
    ("options", "p"),
    [({"dropout": 0.3}, 0.3), ({"dropout": 0.3, "attention_dropout": 0.0}, 0.0), ({"attention_dropout": 0.4}, 0.4)],
)
def test_attention_dropout_follows_its_option_and_training_mode(monkeypatch, options, p):
    seen = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, dropout_p, **_: seen.append(dropout_p) or v)
    module = attention(**options)
    module(torch.randn(1, 3, 32))
    module.eval()(torch.randn(1, 3, 32))
    assert seen == [p, 0.0]


def test_the_unfused_site_is_compiled_once_for_all_layers():
    compilations = []
    compiled = torch.compile(
        site.unfused_query_key_site, fullgraph=True, backend=lambda graph, _: compilations.append(1) or graph.forward
    )
    rotary = rotary_table(7, 8, 100.0)
    for layer in [attention("torch", qk_norm=True) for _ in range(10)]:  # more than Dynamo's limit of recompilations
        given = (torch.randn(1, 7, 96), rotary, 4, 4, layer.query_norm, layer.key_norm)
        torch.testing.assert_close(compiled(*given), site.unfused_query_key_site(*given))
    assert len(compilations) == 1
