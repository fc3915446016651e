"""What the probes see of a tiny model, against values that are computed here in another way."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from configs import Config
from data import load_corpus
from study.engine import Engine, initial_values, windows_of
from study.probes import ROWS, SATURATED, probe
from study.runs import _run
from tests.runs import composed, losses, precision, train_here

DYT = ["norm.kind=dyt", "norm.alpha=2.0", "model.embedding_scale=unit"]
GROUPED = ["norm.kind=rmsnorm", "model.heads=4", "model.kv_heads=2", "model.qk_norm=true", "model.positions=rotary"]


def trained(overrides: list[str], steps: int) -> Engine:
    cfg: Config = composed(overrides)
    corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
    engine = Engine(cfg, precision(torch.float32), corpus)
    engine.begin(cfg, initial_values(cfg, engine.precision, corpus), windows_of(cfg, corpus, torch.device("cpu")))
    engine.advance(steps)
    return engine


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


def test_size_and_saturation_of_the_stream_are_those_of_the_model_written_out(tiny):
    engine = trained([*tiny, *DYT], 5)
    found = probe(engine)
    sites = stream_of(engine.model, engine.val[0][0][:ROWS])
    assert found["rms"] == pytest.approx([site.pow(2).mean().item() ** 0.5 for site in sites], abs=1e-4)
    assert found["most"] == pytest.approx([site.abs().max().item() for site in sites], abs=1e-4)
    norms = [norm for block in engine.model.blocks for norm in (block.attention_norm, block.mlp_norm)]
    saturated = [(np.abs(np.tanh(n.scalars.item() * r.numpy())) > SATURATED).mean() for n, r in zip(norms, sites, strict=False)]
    assert found["saturated"] == pytest.approx(saturated, abs=2e-3) and max(saturated) > 0.01
    assert engine.model.training


@pytest.mark.parametrize("more", [DYT, GROUPED])
def test_the_largest_logit_is_that_of_the_queries_and_keys_that_attention_gets(tiny, more, monkeypatch):
    engine, seen, attention = trained([*tiny, *more], 5), [], F.scaled_dot_product_attention

    def watched(q, k, v, **options):
        seen.append((q, k))
        return attention(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    found = probe(engine)["logit"]
    expected = []
    for q, k in seen:
        scores = torch.einsum("bhid,bhjd->bhij", q.double(), k.double()) / math.sqrt(q.shape[-1])
        past = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        expected.append(scores[..., past].abs().max().item())
    assert found == pytest.approx(expected, abs=1e-4) and len(found) == 2


def test_gradient_norms_and_losses_are_those_that_train_py_logs(tiny, tmp_path):
    overrides = [*tiny, "optim.lr=3e-3", "logging.every=1", "train.steps=10"]
    _, metrics = train_here(overrides, tmp_path / "run")
    engine = trained(overrides, 10)
    assert engine.grad_norms.tolist() == losses(metrics, "train/grad_norm")
    assert engine.losses.tolist() == losses(metrics)
    corpus = load_corpus(engine.cfg.data, engine.cfg.tokenizer, context=engine.cfg.model.context)
    engine.begin(
        engine.cfg, initial_values(engine.cfg, engine.precision, corpus), windows_of(engine.cfg, corpus, torch.device("cpu"))
    )
    result = _run(engine, "a", [])
    assert result.grad_norm == pytest.approx(float(np.sort(losses(metrics, "train/grad_norm"))[4]))  # torch's median
    assert result.spikes == 0 and [seen["step"] for seen in result.probes] == [2, 4, 6, 8, 10]
