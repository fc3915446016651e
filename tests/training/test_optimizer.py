"""Which parameters decay."""

import pytest
import torch
from torch import nn

import configs
from configs.machine import Machine
from model import GPT
from training.step import adamw, parameter_groups

SMALL = ["model.layers=2", "model.heads=2", "model.width=16", "model.context=8"]


def gpt(*overrides):
    cfg = configs.load([*SMALL, *overrides], on=Machine("cpu"))
    return cfg, GPT(cfg.model, cfg.norm, vocab_size=50)


@pytest.mark.parametrize("impl", ["fused", "torch"])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("variant", ["model.qk_norm=true", "model.block=parallel", "model.tie_embeddings=false"])
def test_every_parameter_is_in_one_group_and_no_norm_decays(impl, kind, variant):
    cfg, model = gpt(f"norm.impl={impl}", f"norm.kind={kind}", variant)

    decayed, kept = adamw(model, cfg.optim).param_groups

    assert (decayed["weight_decay"], kept["weight_decay"]) == (cfg.optim.weight_decay, 0.0)
    ids = [id(p) for group in (decayed, kept) for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    kept_ids = {id(p) for p in kept["params"]}
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    assert norms and all(id(p) in kept_ids for p in norms)
    assert all(p.ndim >= 2 for p in decayed["params"])


def test_both_implementations_have_the_same_groups():
    names = []
    for impl in ("fused", "torch"):
        _, model = gpt(f"norm.impl={impl}")
        decay, _ = parameter_groups(model)
        names.append([name for name, p in model.named_parameters() if any(p is q for q in decay)])

    assert names[0] == names[1]


def test_adamws_settings_are_those_of_the_config():
    cfg, model = gpt("optim.lr=0.002", "optim.beta1=0.7", "optim.beta2=0.8", "optim.eps=1e-5", "optim.weight_decay=0.3")

    groups = adamw(model, cfg.optim).param_groups

    assert all((group["lr"], group["betas"], group["eps"]) == (0.002, (0.7, 0.8), 1e-5) for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]


def test_frozen_parameters_are_left_out():
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)

    decay, no_decay = parameter_groups(model)

    assert (len(decay), len(no_decay)) == (1, 0)


def test_a_norm_parameter_among_the_matrices_is_caught():
    model = nn.Module()
    model.norm = nn.Linear(4, 4)

    with pytest.raises(AssertionError, match=r"norm\.weight .* would be decayed"):
        parameter_groups(model)


def test_a_norm_weight_does_not_shrink_and_a_matrix_does():
    cfg, model = gpt("optim.weight_decay=0.5", "optim.lr=0.1")
    optimizer = adamw(model, cfg.optim)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    optimizer.step()

    for name, p in model.named_parameters():
        factor = 1.0 if p.ndim < 2 else 1 - 0.1 * 0.5
        torch.testing.assert_close(p.detach(), before[name] * factor)
