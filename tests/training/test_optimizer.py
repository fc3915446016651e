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


def test_muon_makes_updates_orthogonal_in_blocks_and_leaves_the_rest_to_adamw(tiny):
    overrides = [*tiny, "optim.kind=muon", "optim.lr=1e-2", "optim.weight_decay=0.1", "model.tie_embeddings=false"]
    cfg, model, optimizer = model_and_optimizer(overrides)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with_gradients(model)
    optimizer.step()

    _, reference, _ = model_and_optimizer(overrides)
    with_gradients(reference)
    adamw(reference, cfg.optim).step()
    by_adamw = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        if not (name.startswith("blocks.") and parameter.ndim == 2):
            assert torch.equal(parameter, by_adamw[name]), name
            continue
        update = (before[name] * (1 - 1e-2 * 0.1) - parameter).detach().double() / 1e-2
        scale = 0.2 * max(parameter.shape) ** 0.5
        assert torch.allclose(torch.linalg.svdvals(update / scale), torch.ones(1).double(), atol=0.5), name
        left, _, right = torch.linalg.svd(parameter.grad.double(), full_matrices=False)
        cosine = torch.nn.functional.cosine_similarity(update.flatten(), (left @ right).flatten(), dim=0)
        assert cosine > 0.9, name


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


def test_a_rate_on_the_device_gives_the_step_of_the_same_number(tiny):
    ends = []
    for as_rate in (float, torch.tensor):
        _, model, optimizer = model_and_optimizer([*tiny, "optim.kind=muon"])
        for seed in (1, 2):
            with_gradients(model, seed)
            for group in optimizer.param_groups:
                group["lr"] = as_rate(3e-2)
            optimizer.step()
        ends.append([p.detach().clone() for p in model.blocks.parameters() if p.ndim == 2])
    for number, tensor in zip(*ends, strict=True):
        torch.testing.assert_close(number, tensor, rtol=1e-6, atol=1e-7)
