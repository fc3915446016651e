"""The reordered block computes what the textbook one does, also where backward computes it again (train.recompute)."""

import pytest
import torch
import torch.nn.functional as F

from configs.schema import ModelConfig
from model import GPT
from model.mlp import MLP, mlp_width
from model.norm import PreNorm


def textbook_logits(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """x = x + sublayer(norm(x)), on the model's parameters; either norm, GELU, learned positions, biases, tied head."""
    p, T = dict(model.named_parameters()), tokens.shape[1]

    def norm(x, name, suffix=""):
        weight, bias = p[f"{name}.weight{suffix}"], p.get(f"{name}.bias{suffix}")
        if model.norm.kind == "rmsnorm":
            return F.rms_norm(x, x.shape[-1:], weight, model.norm.eps)
        return F.layer_norm(x, x.shape[-1:], weight, bias, model.norm.eps)

    def linear(x, name):
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    def attention(x, name):
        qkv = linear(x, f"{name}.qkv").chunk(3, dim=-1)
        q, k, v = (h.view(*h.shape[:2], model.cfg.heads, -1).transpose(1, 2) for h in qkv)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        return linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), f"{name}.out")

    def mlp(x, name):
        return linear(F.gelu(linear(x, f"{name}.up"), approximate="tanh"), f"{name}.down")

    x = p["embedding.weight"][tokens] + p["positions.weight"][:T]
    for layer in range(model.cfg.layers):
        block = f"blocks.{layer}"
        if model.cfg.block == "parallel":
            y, y1 = norm(x, f"{block}.norm"), norm(x, f"{block}.norm", "1")
            x = x + attention(y, f"{block}.attention") + mlp(y1, f"{block}.mlp")
        else:
            x = x + attention(norm(x, f"{block}.attention_norm"), f"{block}.attention")
            x = x + mlp(norm(x, f"{block}.mlp_norm"), f"{block}.mlp")
    return norm(x, "final_norm") @ p["embedding.weight"].T


@pytest.mark.parametrize("impl", ["fused", "torch"])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("block", ["sequential", "parallel"])
def test_logits_equal_the_textbook_order(build, batch, block, kind, impl):
    model = build(layers=3, block=block, norm_kind=kind, norm_impl=impl, norm_eps=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # so that no bias is 0, and no weight 1
    torch.testing.assert_close(model(batch[0]), textbook_logits(model, batch[0]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("block", "rates"),
    [
        ("sequential", [(0.0, 0.0), (0.0, 0.0), (0.1, 0.0), (0.2, 0.0), (0.3, 0.0)]),  # embeddings, attention 0, MLP 0, …
        ("parallel", [(0.0, 0.0), (0.0, 0.1), (0.2, 0.3)]),
    ],
)
def test_dropout_is_at_every_site_and_drop_path_rises_linearly_over_the_sublayers(build, block, rates):
    model = build(layers=2, block=block, drop_path=0.3, dropout=0.5)
    sites = [module for module in model.modules() if isinstance(module, PreNorm)]
    assert [site.drop_path for site in sites] == [(pytest.approx(x), pytest.approx(x1)) for x, x1 in rates]
    assert [site.dropout for site in sites] == [0.5] * model.dropout_sites


@pytest.mark.parametrize("impl", ["fused", "torch"])
def test_each_site_uses_its_own_seed(build, batch, impl):
    model = build(dropout=0.5, attention_dropout=0.0, norm_impl=impl, norm_dropout_masks="shared")
    seeds = torch.zeros(model.dropout_sites, dtype=torch.int64)
    changed = [seeds, *torch.eye(model.dropout_sites, dtype=torch.int64)]
    losses = [model(*batch, seeds=one).item() for one in (*changed, seeds)]
    assert losses[0] == losses[-1] and len(set(losses)) == model.dropout_sites + 1
    assert model.eval()(*batch, seeds=seeds).item() == model(*batch).item()


@pytest.mark.parametrize(("block", "impl"), [("sequential", "fused"), ("parallel", "torch")])
@pytest.mark.parametrize("masks", ["native", "shared"])
def test_recomputed_blocks_run_twice_and_gradients_have_the_same_bits(build, batch, block, impl, masks):
    model = build(dropout=0.3, drop_path=0.2, block=block, norm_impl=impl, norm_dropout_masks=masks)
    runs, found = [], []
    model.blocks[0].attention.register_forward_pre_hook(lambda *_: runs.append(model.recompute))
    for model.recompute in (False, True):
        model.zero_grad()
        torch.manual_seed(1)
        loss = model(*batch, seeds=torch.arange(model.dropout_sites))
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert runs == [False, True, True]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_width_of_an_mlp_is_four_times_the_models_or_of_swiglu_two_thirds_of_that_in_64s_or_as_given():
    given = [{}, {"activation": "swiglu"}, {"activation": "swiglu", "width": 100}, {"activation": "swiglu", "mlp_width": 40}]
    configs = [ModelConfig(**{"width": 96} | options) for options in given]
    assert [mlp_width(cfg) for cfg in configs] == [MLP(cfg).down.in_features for cfg in configs] == [384, 256, 320, 40]
