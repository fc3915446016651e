"""The reordered block computes what the textbook one does, also where backward computes it again (train.recompute)."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from configs.schema import ModelConfig, NormKind
from model import GPT
from model.mlp import MLP, mlp_width
from model.norm import NormSite
from tests.ops.cases import covering


def textbook_logits(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """x = x + sublayer(norm(x)), or as norm.placement says, on the model's parameters; any norm, GELU, learned positions,
    biases, tied head."""
    p, T = dict(model.named_parameters()), tokens.shape[1]
    placement, offset = model.norm.placement, 1.0 * (model.norm.weight == "zero_centered")
    alpha = (2 * model.cfg.layers) ** 0.25 if model.cfg.residual_scale else 1.0

    def norm(x, name, suffix="", branch=""):
        weight, bias = p.get(f"{name}.{branch}weight{suffix}"), p.get(f"{name}.{branch}bias{suffix}")
        scalars = p.get(f"{name}.{branch}scalars")
        if model.norm.kind == "dyt":
            x = torch.tanh(scalars * x)
        elif model.norm.kind == "derf":
            x = torch.erf(scalars[0] * x + scalars[1])
        else:
            x = x - x.mean(-1, keepdim=True) if model.norm.kind == "layernorm" else x
            x = x / (x.square().mean(-1, keepdim=True) + model.norm.eps).sqrt()
        x = x if weight is None else x * (weight + offset)
        return x if bias is None else x + bias

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

    def after(x, f, before, behind):
        if placement == "pre":
            return x + f(norm(x, before))
        if placement == "post":
            return norm(alpha * x + f(x), behind)
        return x + norm(f(norm(x, before) if placement == "sandwich" else x), behind, branch="branch_")

    x = p["embedding.weight"][tokens] * (model.cfg.width**0.5 if model.cfg.embedding_scale else 1.0)
    x = x + p["positions.weight"][:T]
    for layer in range(model.cfg.layers):
        block = f"blocks.{layer}"
        following = f"blocks.{layer + 1}.attention_norm" if layer + 1 < model.cfg.layers else "final_norm"
        if model.cfg.block == "parallel":
            y, y1 = norm(x, f"{block}.norm"), norm(x, f"{block}.norm", "1")
            x = x + attention(y, f"{block}.attention") + mlp(y1, f"{block}.mlp")
        else:
            attend, transform = partial(attention, name=f"{block}.attention"), partial(mlp, name=f"{block}.mlp")
            x = after(x, attend, f"{block}.attention_norm", f"{block}.mlp_norm")
            x = after(x, transform, f"{block}.mlp_norm", following)
    return (x if placement == "post" else norm(x, "final_norm")) @ p["embedding.weight"].T


FORMS = [
    {}, {"block": "parallel"}, {"norm_placement": "post"},
    {"norm_placement": "post", "residual_scale": "deepnorm", "norm_weight": "zero_centered"}, {"norm_placement": "inside"},
    {"norm_placement": "inside", "norm_weight": "none"}, {"norm_placement": "sandwich"},
    {"norm_placement": "sandwich", "embedding_scale": "sqrt_width", "norm_weight": "zero_centered"},
]  # fmt: skip


@pytest.mark.parametrize("case", covering(form=FORMS, norm_kind=list(NormKind), norm_impl=["fused", "torch"]), ids=str)
def test_logits_equal_the_textbook_order(build, batch, case):
    form, norm = case["form"], {key: value for key, value in case.items() if key != "form"}
    model = build(layers=3, norm_eps=0.1, **norm, **form)
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
def test_drop_path_rises_linearly_over_the_sublayers(build, block, rates):
    sites = [module for module in build(layers=2, block=block, drop_path=0.3).modules() if isinstance(module, NormSite)]
    assert [site.drop_path for site in sites] == [(pytest.approx(x), pytest.approx(x1)) for x, x1 in rates]


@pytest.mark.parametrize("impl", ["fused", "torch"])
def test_each_site_uses_its_own_seed(build, batch, impl):
    model = build(dropout=0.5, attention_dropout=0.0, norm_impl=impl, norm_dropout_masks="shared")
    seeds = torch.zeros(model.dropout_sites, dtype=torch.int64)
    changed = [seeds, *torch.eye(model.dropout_sites, dtype=torch.int64)]
    losses = [model(*batch, seeds=one).item() for one in (*changed, seeds)]
    assert losses[0] == losses[-1] and len(set(losses)) == model.dropout_sites + 1
    assert model.eval()(*batch, seeds=seeds).item() == model(*batch).item()


@pytest.mark.parametrize(("block", "impl", "masks"), [("sequential", "fused", "shared"), ("parallel", "torch", "native")])
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


def test_deepnorm_starts_as_its_paper_says(build):
    model = build(layers=4, width=256, norm_placement="post", residual_scale="deepnorm")
    assert model.final_norm.residual_scale == pytest.approx(8**0.25)
    attention = model.blocks[1].attention
    deviations = [part.std().item() for part in (*attention.qkv.weight.chunk(3), attention.out.weight)]
    gain = 32**-0.25
    assert deviations == [pytest.approx(g / 256**0.5, rel=0.03) for g in (1, 1, gain, gain)]  # Xavier: √(2 / (256 + 256))
