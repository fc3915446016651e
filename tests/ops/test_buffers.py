"""Memory as callers hand it over: buffers for the results, rows that lie apart, nothing at all."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from ops import dropout_mask, layer_norm_fn, seeded_dropout

from .cases import leaf, reference_path

STRIDED = ("x", "x1", "residual", "dy", "dy1", "dr", "weight", "bias1", "rowscale")


def test_residual_out_buffer_is_written_and_returned_and_gradients_flow(device):
    x, residual, w = leaf(5, 32, device=device), leaf(5, 32, device=device), leaf(32, device=device)
    out, residual_out = torch.full((5, 32), torch.nan, device=device), torch.full((5, 32), torch.nan, device=device)
    y, r = layer_norm_fn(x, w, None, residual, prenorm=True, out=out, residual_out=residual_out)
    assert y is out and r is residual_out
    (y.sin() + r.cos()).sum().backward()
    found = [t.grad for t in (x, residual, w)]
    for t in (x, residual, w):
        t.grad = None
    expected_y, expected_r = layer_norm_fn(x, w, None, residual, prenorm=True)
    (expected_y.sin() + expected_r.cos()).sum().backward()
    assert torch.equal(out, expected_y) and torch.equal(residual_out, expected_r)
    assert all(torch.equal(a, t.grad) for a, t in zip(found, (x, residual, w), strict=True))


@pytest.mark.parametrize("looped", [False, True])
def test_inference_updates_the_residual_stream_in_place(looped, device, request):
    if looped:
        request.getfixturevalue("narrow_tiles")
    x, residual, w = torch.randn(5, 40, device=device), torch.randn(5, 40, device=device), torch.rand(40, device=device)
    expected_y, expected_r = layer_norm_fn(x, w, None, residual.clone(), prenorm=True)
    out = torch.full_like(x, torch.nan)
    y, r = layer_norm_fn(x, w, None, residual, prenorm=True, out=out, residual_out=residual)
    assert y is out and r is residual
    assert torch.equal(y, expected_y) and torch.equal(r, expected_r)


def test_residual_out_without_prenorm_is_written(device):
    x, buffer = torch.randn(3, 16, device=device), torch.empty(3, 16, device=device)
    y = layer_norm_fn(x, None, None, x, residual_out=buffer)
    assert isinstance(y, torch.Tensor)
    assert torch.equal(buffer, x + x)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("n", [1, 40])
def test_empty_batch(n, kernels, device):
    with nullcontext() if kernels else reference_path():
        x, residual, w = leaf(0, 3, n, device=device), leaf(0, 3, n, device=device), leaf(n, device=device)
        y, r = layer_norm_fn(x, w, w, residual, dropout_p=0.1, prenorm=True)
        assert y.shape == r.shape == (0, 3, n)
        (y.sum() + r.sum()).backward()
        assert x.grad.shape == x.shape and torch.equal(w.grad, torch.zeros(n, device=device))
        assert seeded_dropout(x, 0.5, 1).shape == x.shape
        assert dropout_mask(1, 0, n, 0.5, device=device).shape == (0, n)


@pytest.mark.parametrize("how", ["every second element", 25, 28, 48], ids=str)  # or so far apart rows are
@pytest.mark.parametrize("name", STRIDED)
def test_strided_inputs(name, how, device):
    g = torch.Generator().manual_seed(0)
    shapes = {"weight": (24,), "bias": (24,), "weight1": (24,), "bias1": (24,), "rowscale": (6,)}
    names = ("x", "x1", "residual", "dy", "dy1", "dr", *shapes)
    dense = {k: torch.randn(shapes.get(k, (6, 24)), generator=g).to(device) for k in names}
    if how == "every second element" or dense[name].dim() == 1:
        strided = dense[name].repeat_interleave(2, dim=-1)[..., ::2]
    else:
        strided = torch.cat((dense[name], torch.full_like(dense[name], torch.nan)), dim=1)[:, :how].contiguous()[:, :24]
    assert not strided.is_contiguous() and torch.equal(strided, dense[name])

    def run(tensors):
        inputs = {k: t.detach().requires_grad_() for k, t in tensors.items() if k not in ("dy", "dy1", "dr")}
        outputs = layer_norm_fn(**inputs, prenorm=True, dropout_p=0.2, seed=1)
        return *outputs, *torch.autograd.grad(outputs, list(inputs.values()), [tensors[k] for k in ("dy", "dy1", "dr")])

    for a, b in zip(run(dense), run(dense | {name: strided}), strict=True):
        assert torch.equal(a, b)


def test_expanded_gradient(device):
    x, w = leaf(6, 32, device=device), leaf(32, device=device)
    layer_norm_fn(x, w, None).sum().backward()
    assert x.grad.abs().max() < 10 and torch.isfinite(w.grad).all()
    expected = torch.autograd.grad(F.layer_norm(x, (32,), w, None, 1e-6).sum(), (x, w))
    torch.testing.assert_close(x.grad, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w.grad, expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", [False, True])
def test_out_may_be_x_itself(kernels, device):
    x = torch.randn(3, 16, device=device)
    with nullcontext() if kernels else reference_path():
        expected = layer_norm_fn(x, None, None)
        out, buffer = x.clone(), torch.empty_like(x)
        y, r = layer_norm_fn(out, None, None, prenorm=True, out=out)
        assert y is out and torch.equal(y, expected) and torch.equal(r, x)
        out = x.clone()
        layer_norm_fn(out, None, None, out=out, residual_out=buffer)
        assert torch.equal(out, expected) and torch.equal(buffer, x)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_autograd_knows_that_a_buffer_was_overwritten(grad, kernels, device):
    """A buffer that an earlier operation saved must make its backward fail; one whose history is gone has no gradient."""
    a = leaf(3, 16, device=device)
    with nullcontext() if kernels else reference_path():
        b = a * 1.0
        loss = b.square().sum()
        with torch.set_grad_enabled(grad):
            y = layer_norm_fn(torch.randn(3, 16, device=device), None, None, out=b)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward(retain_graph=True)
        if grad:
            assert torch.equal(torch.autograd.grad(y.sum(), a)[0], torch.zeros_like(a))


def test_buffers_that_share_memory_are_refused(device):
    x = torch.randn(4, 32, device=device)
    buffer = torch.empty(6, 32, device=device)
    for out, residual_out in ((buffer[:4], buffer[:4].view(4, 32)), (buffer[:4], buffer[2:])):
        with pytest.raises(ValueError, match="share memory"):
            layer_norm_fn(x, None, None, residual=x.clone(), prenorm=True, out=out, residual_out=residual_out)
