"""What the probes see of a tiny model, against values that are computed here in another way."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from study.probes import ROWS, SATURATED, probe
from tests.runs import composed

DYT = ["norm.kind=dyt", "norm.alpha=2.0", "model.embedding_scale=unit"]
GROUPED = ["norm.kind=rmsnorm", "model.heads=4", "model.kv_heads=2", "model.qk_norm=true", "model.positions=rotary"]


@torch.no_grad()
def stream_of(model, tokens) -> list[torch.Tensor]:
    """The residual stream at each site, by sublayers: x, x + attention, and so on."""
    sites, r = [], model.embed(tokens)
    for block in model.blocks:
        sites.append(r)
        r = r + block.attention(plain(block.attention_norm, r), None)
        sites.append(r)
        r = r + block.mlp(plain(block.mlp_norm, r))
    return [*sites, plain(model.final_norm, r)]


def plain(site, r: torch.Tensor) -> torch.Tensor:
    return torch.tanh(site.scalars[0] * r) * site.weight + (0 if site.bias is None else site.bias)


def test_size_and_saturation_of_the_stream_are_those_of_the_model_written_out(tiny, trained):
    engine = trained(composed([*tiny, *DYT]), 5)
    found = probe(engine)
    sites = stream_of(engine.model, engine.val[0][0][:ROWS])
    assert found["rms"] == pytest.approx([site.pow(2).mean().item() ** 0.5 for site in sites], abs=1e-4)
    assert found["most"] == pytest.approx([site.abs().max().item() for site in sites], abs=1e-4)
    norms = [norm for block in engine.model.blocks for norm in (block.attention_norm, block.mlp_norm)]
    saturated = [(np.abs(np.tanh(n.scalars.item() * r.numpy())) > SATURATED).mean() for n, r in zip(norms, sites, strict=False)]
    assert found["saturated"] == pytest.approx(saturated, abs=2e-3) and max(saturated) > 0.01
    assert engine.model.training


@pytest.mark.parametrize("more", [DYT, GROUPED], ids=["plain", "grouped"])
def test_the_largest_logit_is_that_of_the_queries_and_keys_that_attention_gets(tiny, trained, more, monkeypatch):
    engine, expected, attention = trained(composed([*tiny, *more]), 5), [], F.scaled_dot_product_attention

    def watched(q, k, v, **options):
        scores = torch.einsum("bhid,bhjd->bhij", q.double(), k.double()) / math.sqrt(q.shape[-1])
        expected.append(scores[..., torch.ones(scores.shape[-2:], dtype=torch.bool).tril()].abs().max().item())
        return attention(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    assert probe(engine)["logit"] == pytest.approx(expected, abs=1e-4) and len(expected) == 2
