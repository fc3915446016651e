"""Which optimizer updates which parameter, by which rule, and that two optimizers have one state."""

import copy

import pytest
import torch

from model import GPT
from tests.runs import composed
from training.optimizer import adamw, make_optimizer


def model_and_optimizer(overrides):
    cfg = composed(overrides)
    torch.manual_seed(0)
    model = GPT(cfg.model, cfg.norm, vocab_size=20)
    return cfg, model, make_optimizer(model, cfg.optim)


def with_gradients(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def muon_by_hand(gradients, rate, decay, momentum, start):
    """The weight after these gradients: Newton-Schulz in fp32 (https://kellerjordan.github.io/posts/muon) with Nesterov's
    momentum, at the size of AdamW's updates (arXiv:2502.16982)."""
    weight, mean = start.clone(), torch.zeros_like(start)
    for gradient in gradients:
        mean.lerp_(gradient, 1 - momentum)
        x = gradient.lerp(mean, momentum)
        x = x.T if (tall := x.shape[0] > x.shape[1]) else x
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        weight = weight * (1 - rate * decay) - rate * 0.2 * max(start.shape) ** 0.5 * (x.T if tall else x)
    return weight


@pytest.mark.parametrize("as_rate", [float, torch.tensor])  # a tensor is a rate on the device, as of a CUDA graph
def test_muon_is_that_of_each_matrix_of_the_blocks_by_itself_and_leaves_the_rest_to_adamw(tiny, as_rate):
    """Grouped queries and a SwiGLU: three matrices in qkv, two in up."""
    shape = ["model.kv_heads=1", "model.heads=4", "model.activation=swiglu", "model.mlp_width=48", "model.tie_embeddings=false"]
    overrides = [*tiny, *shape, "optim.kind=muon", "optim.lr=1e-2", "optim.weight_decay=0.1", "optim.momentum=0.9"]
    cfg, model, optimizer = model_and_optimizer(overrides)
    _, reference, _ = model_and_optimizer(overrides)
    by_adamw, starts = adamw(reference, cfg.optim), copy.deepcopy(dict(model.named_parameters()))
    gradients = []
    for seed in (1, 2):
        for of, step in ((model, optimizer), (reference, by_adamw)):
            with_gradients(of, seed)
            for group in step.param_groups:
                group["lr"] = as_rate(1e-2)
            step.step()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert model.blocks[0].attention.rows == [32, 8, 8]
    rows = {"qkv.weight": [32, 8, 8], "up.weight": [48, 48]}
    for name, parameter in model.named_parameters():
        if not (name.startswith("blocks.") and parameter.ndim == 2):
            assert torch.equal(parameter, dict(reference.named_parameters())[name]), name
            continue
        parts = next((of for end, of in rows.items() if name.endswith(end)), [len(parameter)])
        given = [starts[name].detach(), *(of[name] for of in gradients)]
        for now, start, *of in zip(parameter.split(parts), *(tensor.split(parts) for tensor in given), strict=True):
            expected = muon_by_hand(of, 1e-2, 0.1, 0.9, start)
            update, wanted = (after - start * (1 - 1e-2 * 0.1) ** 2 for after in (now.detach(), expected))
            assert torch.nn.functional.cosine_similarity(update.flatten(), wanted.flatten(), dim=0) > 0.999, name  # in bf16
            torch.testing.assert_close(update.square().mean(), wanted.square().mean(), rtol=0.02, atol=0)


@pytest.mark.parametrize("how", ["loaded", "copied"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_state_that_is_loaded_or_copied_goes_on_with_the_same_bits(tiny, kind, how):
    overrides = [*tiny, f"optim.kind={kind}"]
    _, whole, optimizer = model_and_optimizer(overrides)
    _, resumed, other = model_and_optimizer(overrides)
    for seed in (1, 2):
        with_gradients(whole, seed)
        optimizer.step()
    if how == "copied":
        resumed, other = copy.deepcopy((whole, optimizer))
    else:
        resumed.load_state_dict(whole.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # a loaded state shares its tensors
    for model, of in ((whole, optimizer), (resumed, other)):
        with_gradients(model, 3)
        of.step()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert len(other.state) == len(list(resumed.parameters()))
