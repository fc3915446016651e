import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ops import layer_norm_fn, layer_norm_linear_fn

from .cases import BF16, leaves


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("prenorm", [False, True])
def test_equals_norm_then_linear_with_all_gradients(rms, prenorm, device):
    tensors = leaves(device, (3, 5, 32), (3, 5, 32), (32,), (32,), (16, 32), (16,))
    x, residual, nw, nb, lw, lb = tensors

    y, r = layer_norm_fn(x, nw, nb, residual, eps=1e-5, prenorm=True, is_rms_norm=rms)
    expected = (F.linear(y, lw, lb), r) if prenorm else F.linear(y, lw, lb)
    found = layer_norm_linear_fn(x, nw, nb, lw, lb, residual, 1e-5, prenorm, is_rms_norm=rms)
    torch.testing.assert_close(found, expected)
    upstream = [torch.randn_like(t) for t in ((y @ lw.T, r) if prenorm else (y @ lw.T,))]
    gradients = [torch.autograd.grad(outputs, tensors, upstream, retain_graph=True) for outputs in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_keeps_no_norm_output_for_backward_and_autocast_decides_the_dtype_of_the_product(device):
    x, w, lw = leaves(device, (64, 32), (32,), (8, 32))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        layer_norm_linear_fn(x, w, None, lw, None)
    assert [t for t in saved if t.numel() == x.numel() and t.data_ptr() != x.data_ptr()] == []
    with torch.autocast(device.type, BF16):
        z = layer_norm_linear_fn(x, w, None, lw, None)
    z.sum().backward()
    assert (z.dtype, lw.grad.dtype) == (BF16, lw.dtype)


def test_a_checkpoint_whose_gradient_keeps_its_graph_gives_the_same(device):
    x, residual, w, matrix = leaves(device, (4, 8), (4, 8), (8,), (3, 8))

    def gradient(call):
        return torch.autograd.grad(call(x, w, None, matrix, None, residual).square().sum(), x, create_graph=True)

    found = gradient(lambda *given: checkpoint(layer_norm_linear_fn, *given, use_reentrant=False))
    assert all(map(torch.equal, found, gradient(layer_norm_linear_fn)))


def test_a_single_row_without_leading_dimensions(device):
    """Backward takes a row of shape (N,) for no matrix."""
    x, matrix, bias = leaves(device, (8,), (3, 8), (3,))
    layer_norm_linear_fn(x, None, None, matrix, bias).sum().backward()
    torch.testing.assert_close(matrix.grad, F.layer_norm(x.detach(), (8,), eps=1e-6).expand(3, 8))
    torch.testing.assert_close(bias.grad, torch.ones_like(bias))
