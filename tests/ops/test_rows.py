"""What every shape of tile does at the edges: of rows, of the batch, of memory, of numbers."""

from contextlib import nullcontext

import pytest
import torch

from ops import Norm, dropout_mask, layer_norm_fn, norm_fn

from .cases import BF16, FP32, leaves, reference_path
from .tiles import SHAPES, tile_for

pytestmark = pytest.mark.parametrize("shape", SHAPES)


@pytest.mark.parametrize("value", [1288.0, 3.0])
def test_a_constant_row_has_its_own_mean(value, shape, device, use_tile):
    """Σ r / N is exact here and Σ r · (1 / N) is not; with a small eps, rstd makes the difference a thousand times larger."""
    use_tile(tile_for(1000, shape))
    y = layer_norm_fn(torch.full((3, 1000), value, dtype=BF16, device=device), None, None, eps=1e-6)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize(("branches", "dtype"), [(1, FP32), (2, BF16)])  # a thread holds 4 or 8 columns
def test_both_directions_drop_what_the_reference_drops(branches, dtype, shape, device, use_tile):
    m, n, seed, p = 3, 40, 99, 0.4
    with reference_path():
        expected = [dropout_mask(seed, m, n, p, stream, device) for stream in (0, 1)]
    use_tile(tile_for(n, shape))
    x, *x1 = leaves(device, *[(m, n)] * branches, dtype=dtype)
    y, *masks = layer_norm_fn(x, None, None, x1=x1[0] if x1 else None, dropout_p=p, return_dropout_mask=True, seed=seed)
    gradients = torch.autograd.grad(y, (x, *x1), torch.randn(m, n, device=device).to(dtype))
    for keep, mask, dx in zip(expected, masks, gradients, strict=False):
        assert torch.equal(mask, keep) and torch.equal(dx != 0, keep)


@pytest.mark.parametrize("norm", Norm)
def test_rows_of_one_column(norm, shape, device, use_tile):
    use_tile(tile_for(1, shape))
    x, w, g = leaves(device, (3, 1), (1,), (3, 1))
    results = []
    for around in (nullcontext, reference_path):
        with around():
            y = norm_fn(norm, x, w, None, x, eps=0.1)  # so that a row of one column has a small rstd
        results.append((y, *torch.autograd.grad(y, (x, w), g)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", Norm)
def test_rows_of_nan_stay_among_themselves(norm, shape, device, use_tile):
    use_tile(tile_for(40, shape))
    x = torch.randn(7, 40, device=device)
    # All ones is also what the board of split rows holds where no sum is written yet.
    x[3] = torch.tensor(-1, device=device, dtype=torch.int32).view(FP32)
    y = norm_fn(norm, x.requires_grad_())
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    for t in (y, dx) if norm != Norm.none else (y,):
        assert t.isnan().all(1).nonzero().tolist() == [[3]] and t.isnan().any(1).sum() == 1


@pytest.mark.parametrize("norm", Norm)
def test_forward_and_backward_normalise_the_rounded_sum(norm, shape, device, use_tile):
    """Trap: statistics of the unrounded sum, x̂ in backward from the rounded one. A stream so coarse that the two differ."""
    use_tile(tile_for(40, shape))
    x, w, g = leaves(device, (6, 40), (40,), (6, 40))
    residual = (300 * torch.randn(6, 40, device=device)).to(BF16).requires_grad_()
    y, r = norm_fn(norm, x, w, None, residual, prenorm=True, eps=1e-5)
    found = torch.autograd.grad(y, (x, w), g)
    stored = r.detach().float().requires_grad_()
    with reference_path():
        expected = norm_fn(norm, stored, w, eps=1e-5)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (stored, w), g), rtol=1e-4, atol=1e-4)


def test_gradient_of_the_residual_output_alone_skips_the_norm(shape, device, use_tile):
    """Whatever the norm would make of an infinite row, it has no part in this gradient."""
    use_tile(tile_for(40, shape))
    x, residual, w = leaves(device, (4, 40), (4, 40), (40,))
    with torch.no_grad():
        x[2, 7] = torch.inf
    _, r = layer_norm_fn(x, w, None, residual, prenorm=True)
    g = torch.randn_like(r)
    r.backward(g)
    assert torch.equal(x.grad, g) and torch.equal(residual.grad, g) and w.grad is None
