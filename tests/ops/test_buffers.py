"""Memory as callers hand it over: buffers for the results, rows that lie apart, nothing at all."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from ops import dropout_mask, layer_norm_fn, seeded_dropout

from .cases import leaf, reference_path
from .tiles import SHAPES, tile_for


@pytest.fixture(params=["kernels", "reference"])
def way(request):
    """Whichever of the two runs, the same holds."""
    with nullcontext() if request.param == "kernels" else reference_path():
        yield


def test_buffers_are_written_and_returned_and_gradients_flow(way, device):
    """Trap: a caller's residual_out is ignored, residual stream and gradients are wrong."""
    x, residual, w = leaf(5, 32, device=device), leaf(5, 32, device=device), leaf(32, device=device)
    out, residual_out = torch.full((5, 32), torch.nan, device=device), torch.full((5, 32), torch.nan, device=device)
    found = layer_norm_fn(x, w, None, residual, prenorm=True, out=out, residual_out=residual_out)
    assert found[0] is out and found[1] is residual_out
    expected = layer_norm_fn(x, w, None, residual, prenorm=True)
    assert all(map(torch.equal, found, expected))
    gradients = [torch.autograd.grad(y.sin().sum() + r.cos().sum(), (x, residual, w)) for y, r in (found, expected)]
    assert all(map(torch.equal, *gradients))


def test_residual_out_without_prenorm_is_written(way, device):
    x, buffer = torch.randn(3, 16, device=device), torch.empty(3, 16, device=device)
    assert isinstance(layer_norm_fn(x, None, None, x, residual_out=buffer), torch.Tensor)
    assert torch.equal(buffer, x + x)


@pytest.mark.parametrize("n", [1, 40])
def test_empty_batch(n, way, device):
    x, residual, w = leaf(0, 3, n, device=device), leaf(0, 3, n, device=device), leaf(n, device=device)
    y, r = layer_norm_fn(x, w, w, residual, dropout_p=0.1, prenorm=True)
    assert y.shape == r.shape == (0, 3, n)
    (y.sum() + r.sum()).backward()
    assert x.grad.shape == x.shape and torch.equal(w.grad, torch.zeros(n, device=device))
    assert seeded_dropout(x, 0.5, 1).shape == x.shape and dropout_mask(1, 0, n, 0.5, device=device).shape == (0, n)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *product(("x", "residual", "dy", "dr"), SHAPES),
        *product(("x1", "dy1"), SHAPES[:-1]),
        *product(("weight", "bias1", "rowscale"), SHAPES[:1]),
    ],
)
def test_strided_inputs(name, shape, device, use_tile):
    """Elements apart, or rows as far apart as an alignment of 1, 4 or 16 elements."""
    use_tile(tile_for(24, shape))
    g = torch.Generator().manual_seed(0)
    rows, weights = ("x", "residual", "dy", "dr"), ("weight", "bias", "rowscale")
    if name in ("x1", "dy1", "bias1"):  # split rows have none of them
        rows, weights = (*rows, "x1", "dy1"), (*weights, "weight1", "bias1")
    dense = {k: torch.randn(3, 24, generator=g).to(device) for k in rows}
    dense |= {k: torch.randn(3 if k == "rowscale" else 24, generator=g).to(device) for k in weights}

    def run(tensors):
        upstream = [k for k in ("dy", "dy1", "dr") if k in rows]
        inputs = {k: t.detach().requires_grad_(k != "rowscale" or name == k) for k, t in tensors.items() if k not in upstream}
        outputs = layer_norm_fn(**inputs, prenorm=True, dropout_p=0.2, seed=1)
        wanted = [t for t in inputs.values() if t.requires_grad]
        return *outputs, *torch.autograd.grad(outputs, wanted, [tensors[k] for k in upstream])

    expected = run(dense)
    apart = [dense[name].repeat_interleave(2, dim=-1)[..., ::2]]
    if dense[name].dim() == 2:
        filled = torch.cat((dense[name], torch.full_like(dense[name], torch.nan)), dim=1)
        apart += [filled[:, :width].contiguous()[:, :24] for width in (25, 28, 48)]
    for strided in apart:
        assert not strided.is_contiguous()
        assert all(map(torch.equal, run(dense | {name: strided}), expected))


def test_expanded_gradient(device):
    x, w = leaf(6, 32, device=device), leaf(32, device=device)
    found = torch.autograd.grad(layer_norm_fn(x, w, None).sum(), (x, w))
    expected = torch.autograd.grad(F.layer_norm(x, (32,), w, None, 1e-6).sum(), (x, w))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_out_may_be_x_itself(way, device):
    x = torch.randn(3, 16, device=device)
    expected = layer_norm_fn(x, None, None)
    out, buffer = x.clone(), torch.empty_like(x)
    y, r = layer_norm_fn(out, None, None, prenorm=True, out=out)
    assert y is out and torch.equal(y, expected) and torch.equal(r, x)
    out = x.clone()
    layer_norm_fn(out, None, None, out=out, residual_out=buffer)
    assert torch.equal(out, expected) and torch.equal(buffer, x)


@pytest.mark.parametrize("grad", [False, True])
def test_autograd_knows_that_a_buffer_was_overwritten(grad, way, device):
    """A buffer that an earlier operation saved must make its backward fail; one whose history is gone has no gradient."""
    a = leaf(3, 16, device=device)
    b = a * 1.0
    loss = b.square().sum()
    with torch.set_grad_enabled(grad):
        y = layer_norm_fn(torch.randn(3, 16, device=device), None, None, out=b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(retain_graph=True)
    if grad:
        assert torch.equal(torch.autograd.grad(y.sum(), a)[0], torch.zeros_like(a))


def test_buffers_that_share_memory_are_refused(device):
    x, buffer = torch.randn(4, 32, device=device), torch.empty(6, 32, device=device)
    for out, residual_out in ((buffer[:4], buffer[:4].view(4, 32)), (buffer[:4], buffer[2:])):
        with pytest.raises(ValueError, match="share memory"):
            layer_norm_fn(x, None, None, residual=x.clone(), prenorm=True, out=out, residual_out=residual_out)


def test_full_buffers_leave_nothing_to_allocate_for_y_and_r(device):
    x, out, residual_out = (torch.randn(4, 32, device=device) for _ in range(3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer_norm_fn(x, None, None, x, prenorm=True, out=out, residual_out=residual_out)
    assert "aten::empty_like" not in {event.name for event in profile.events()}
