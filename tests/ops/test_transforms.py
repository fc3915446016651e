"""Derivatives beyond one backward, torch.func, torch.export, and devices that have no kernels."""

from functools import partial

import pytest
import torch

from ops import kernels, layer_norm_fn, layer_norm_linear_fn, rms_norm_fn, seeded_dropout

from .cases import leaves

N = 12


@pytest.fixture
def x(device):
    return torch.randn(3, N, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.fixture
def w(device):
    return (1 + torch.arange(N) / N).to(device)


def test_torch_func_differentiates_dropout_rowscale_and_the_linear_layer_behind_a_norm(x, w):
    rowscale, matrix = torch.rand(3, device=x.device), torch.randn(2, N, device=x.device)

    def site(x, rowscale):
        y = seeded_dropout(layer_norm_fn(x, w, None, x, dropout_p=0.5, rowscale=rowscale, seed=3), 0.5, 4)
        return layer_norm_linear_fn(y, w, None, matrix, None).sin().sum()

    found = torch.func.grad(site, argnums=(0, 1))(x, rowscale)
    expected = torch.autograd.grad(site(x.requires_grad_(), rowscale.requires_grad_()), (x, rowscale))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_vmap_gives_each_sample_what_it_gets_alone(x, w):
    matrix, batch = torch.randn(2, N, device=x.device), torch.stack([x, 2 * x, x.cos()])
    norm = partial(rms_norm_fn, weight=w, bias=None, dropout_p=0.5, seed=1)
    linear = partial(layer_norm_linear_fn, norm_weight=w, norm_bias=None, linear_weight=matrix, linear_bias=None)
    for fn in (norm, linear):
        torch.testing.assert_close(torch.func.vmap(fn)(batch), torch.stack([fn(x) for x in batch]))


def test_a_penalty_on_a_gradient_is_refused_where_what_follows_is_constant_too(x, w):
    (matrix,) = leaves(x.device, (2, N))
    wanted = [x.requires_grad_(), w.requires_grad_(), matrix]
    for _ in range(2):  # on the plain path, then prepared
        y = layer_norm_linear_fn(x, w, None, matrix, None)
        expected = torch.autograd.grad(y, wanted, torch.ones_like(y), retain_graph=True)
        gradients = torch.autograd.grad(y, wanted, torch.ones_like(y), create_graph=True)
        for gradient, first in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient.detach(), first)
            loss = y.square().mean() + gradient.square().sum()
            with pytest.raises(RuntimeError, match=r"_fn: its gradients can't be differentiated again"):
                loss.backward(retain_graph=True)


def test_the_reference_has_gradients_of_gradients(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", False)
    x, w, scale = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5), (5,), (2,)))
    scale.data[0] = 0.0

    def site(x, w, scale):
        return layer_norm_fn(x, w, None, x, dropout_p=0.3, rowscale=scale, prenorm=True, seed=1)

    assert torch.autograd.gradgradcheck(site, (x, w, scale))
    batch = torch.stack([x, 2 * x])  # and is mapped over a batch
    torch.testing.assert_close(torch.vmap(lambda x: site(x, w, scale)[1])(batch)[1], site(2 * x, w, scale)[1])
