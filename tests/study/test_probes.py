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


def test_size_and_saturation_of_the_stream_are_those_of_the_model_written_out(tiny, trained):
    engine = trained(composed([*tiny, *DYT]), 5)
    model, sites = engine.model, []

    def dyt(norm, r: torch.Tensor) -> torch.Tensor:
        return torch.tanh(norm.scalars[0] * r) * norm.weight + (0 if norm.bias is None else norm.bias)

    r = model.embed(engine.evaluation.first()[:ROWS])
    norms = [norm for block in model.blocks for norm in (block.attention_norm, block.mlp_norm)]
    sublayers = [part for block in model.blocks for part in (lambda x, of=block.attention: of(x, None), block.mlp)]
    for norm, sublayer in zip(norms, sublayers, strict=True):
        sites.append(r.detach())
        r = r + sublayer(dyt(norm, r))
    outputs, found = [*sites, dyt(model.final_norm, r).detach()], probe(engine)
    assert found["rms"] == pytest.approx([one.pow(2).mean().item() ** 0.5 for one in outputs], abs=1e-4)
    assert found["most"] == pytest.approx([one.abs().max().item() for one in outputs], abs=1e-4)
    saturated = [(np.abs(np.tanh(n.scalars.item() * r.numpy())) > SATURATED).mean() for n, r in zip(norms, sites, strict=True)]
    assert found["saturated"] == pytest.approx(saturated, abs=2e-3) and max(saturated) > 0.01
    assert model.training


@pytest.mark.parametrize("more", [DYT, GROUPED], ids=["plain", "grouped"])
def test_the_largest_logit_is_that_of_the_queries_and_keys_that_attention_gets(tiny, trained, more, monkeypatch):
    engine, expected, attention = trained(composed([*tiny, *more]), 5), [], F.scaled_dot_product_attention

    def watched(q, k, v, **options):
        scores = torch.einsum("bhid,bhjd->bhij", q.double(), k.double()) / math.sqrt(q.shape[-1])
        expected.append(scores[..., torch.ones(scores.shape[-2:], dtype=torch.bool).tril()].abs().max().item())
        return attention(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    assert probe(engine)["logit"] == pytest.approx(expected, abs=1e-4) and len(expected) == 2
