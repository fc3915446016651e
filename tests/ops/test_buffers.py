"""Memory as callers hand it over: buffers for the results, rows that lie apart, nothing at all."""

from contextlib import nullcontext

import pytest
import torch

from ops import dropout_mask, layer_norm_fn, seeded_dropout

from .cases import leaves, reference_path, shapes
from .tiles import SHAPES, tile_for


@pytest.fixture(params=["kernels", "reference"])
def way(request):
    """Whichever of the two runs, the same holds."""
    with nullcontext() if request.param == "kernels" else reference_path():
        yield


def test_buffers_are_written_and_returned_and_gradients_flow(way, device):
    """Trap: a caller's residual_out is ignored, residual stream and gradients are wrong."""
    x, residual, w = leaves(device, (5, 32), (5, 32), (32,))
    out, residual_out = (torch.full((5, 32), torch.nan, device=device) for _ in range(2))
    found = layer_norm_fn(x, w, None, residual, prenorm=True, out=out, residual_out=residual_out)
    assert found[0] is out and found[1] is residual_out
    expected = layer_norm_fn(x, w, None, residual, prenorm=True)
    assert all(map(torch.equal, found, expected))
    gradients = [torch.autograd.grad(y.sin().sum() + r.cos().sum(), (x, residual, w)) for y, r in (found, expected)]
    assert all(map(torch.equal, *gradients))
    assert torch.equal(layer_norm_fn(x, w, None, residual, residual_out=residual_out.zero_()), expected[0])  # without prenorm
    assert torch.equal(residual_out, expected[1])


def test_empty_batch(way, device):
    x, residual, w = leaves(device, (0, 3, 40), (0, 3, 40), (40,))
    y, r = layer_norm_fn(x, w, w, residual, dropout_p=0.1, prenorm=True)
    assert y.shape == r.shape == (0, 3, 40)
    (y.sum() + r.sum()).backward()
    assert x.grad.shape == x.shape and torch.equal(w.grad, torch.zeros(40, device=device))
    assert seeded_dropout(x, 0.5, 1).shape == x.shape and dropout_mask(1, 0, 40, 0.5, device=device).shape == (0, 40)


@pytest.mark.parametrize(("n", "apart"), [(24, 16), (24, 4), (33, 1), (33, None)])
@pytest.mark.parametrize("shape", SHAPES)
def test_strided_inputs(shape, n, apart, device, use_tile):
    """Rows at distances of this alignment, of each tensor another, and NaN between them; without one, elements apart."""
    use_tile(tile_for(n, shape))
    torch.manual_seed(0)
    one = shape == "split"  # such rows have one norm and no gradient of a scale
    sizes = {name: size for name, size in shapes(3, n=n).items() if not one or "1" not in name}
    dense = {name: torch.randn(size, device=device) for name, size in sizes.items()}
    upstream = {name: torch.randn(3, n, device=device) for name in ("dy", "dr" if one else "dy1", "dr")}

    def run(tensors):
        inputs = {
            name: t.detach().requires_grad_("scale" not in name or not one) for name, t in tensors.items() if name in dense
        }
        outputs = layer_norm_fn(**inputs, prenorm=True, dropout_p=0.2, seed=1)
        wanted = [t for t in inputs.values() if t.requires_grad]
        return *outputs, *torch.autograd.grad(outputs, wanted, [tensors[name] for name in upstream])

    def strided(i, t):
        if apart is None:
            return t.repeat_interleave(2, dim=-1)[..., ::2]
        between = t.new_full((3, 48 - n + apart * (2 * i + 1)), torch.nan)
        return torch.cat((t, between), dim=1)[:, :n] if t.dim() == 2 else t

    tensors = dense | upstream
    apart_ones = {name: strided(i, t) for i, (name, t) in enumerate(tensors.items())}
    assert not apart_ones["x"].is_contiguous()
    assert all(map(torch.equal, run(apart_ones), run(tensors)))


@pytest.mark.parametrize("n", [16, 70_000])  # rows that are held, and rows that are read twice
def test_buffers_may_be_whole_inputs_and_overlap_nothing_else(n, way, device):
    def call(memory, out, residual_out=None):
        rows = {name: memory[2 * i : 2 * i + 2] for i, name in enumerate(("x", "residual", "x1"))}
        buffers = {name: memory[at : at + 2] for name, at in (("out", out), ("residual_out", residual_out)) if at is not None}
        return layer_norm_fn(weight=memory[9], bias=None, prenorm=True, **rows, **buffers)

    memory = torch.randn(12, n, device=device)
    expected = call(memory.clone(), 10, 7)
    for places in ((0, 2), (2, 0), (4, 2), (7, 0)):
        assert all(map(torch.equal, call(memory.clone(), *places), expected))
    for wrong, message in (
        ((6, 7), "out and residual_out overlap"),
        ((1,), "out overlaps x"),
        ((6, 8), "residual_out overlaps weight"),
    ):
        with pytest.raises(ValueError, match=f"layer_norm_fn: {message}"):
            call(memory, *wrong)


@pytest.mark.parametrize("grad", [False, True])
def test_autograd_knows_that_a_buffer_was_overwritten(grad, way, device):
    """A buffer that an earlier operation saved must make its backward fail; one whose history is gone has no gradient."""
    (a,) = leaves(device, (3, 16))
    b = a * 1.0
    loss = b.square().sum()
    with torch.set_grad_enabled(grad):
        y = layer_norm_fn(torch.randn(3, 16, device=device), None, None, out=b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(retain_graph=True)
    if grad:
        assert torch.equal(torch.autograd.grad(y.sum(), a)[0], torch.zeros_like(a))
