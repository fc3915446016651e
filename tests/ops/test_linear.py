import pytest
import torch
import torch.nn.functional as F

from ops import layer_norm_fn, layer_norm_linear_fn

from .cases import BF16


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("prenorm", [False, True])
def test_equals_norm_then_linear_with_all_gradients(rms, prenorm, device):
    g = torch.Generator().manual_seed(0)
    shapes = [(3, 5, 32), (3, 5, 32), (32,), (32,), (16, 32), (16,)]
    tensors = [torch.randn(s, generator=g).to(device).requires_grad_() for s in shapes]
    x, residual, nw, nb, lw, lb = tensors

    def run(fused):
        if fused:
            out = layer_norm_linear_fn(x, nw, nb, lw, lb, residual, 1e-5, prenorm, is_rms_norm=rms)
            z, r = out if prenorm else (out, None)
        else:
            y, r = layer_norm_fn(x, nw, nb, residual, eps=1e-5, prenorm=True, is_rms_norm=rms)
            z = F.linear(y, lw, lb)
        loss = z.sin().sum() + (r.cos().sum() if prenorm else 0.0)
        return z, torch.autograd.grad(loss, tensors)

    (z, grads), (expected_z, expected_grads) = run(True), run(False)
    torch.testing.assert_close(z, expected_z)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_keeps_no_norm_output_for_backward_and_autocast_decides_the_dtype_of_the_product(device):
    x, w, lw = (torch.randn(s, device=device, requires_grad=True) for s in ((64, 32), (32,), (8, 32)))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        layer_norm_linear_fn(x, w, None, lw, None)
    kept = [t for t in saved if t.numel() == x.numel() and t.data_ptr() != x.data_ptr()]
    assert kept == []
    with torch.autocast(device.type, BF16):
        z = layer_norm_linear_fn(x, w, None, lw, None)
    z.sum().backward()
    assert (z.dtype, lw.grad.dtype) == (BF16, lw.dtype)


def test_a_single_row_without_leading_dimensions(device):
    """Backward takes a row of shape (N,) for no matrix."""
    x, matrix, bias = (torch.randn(shape, device=device, requires_grad=True) for shape in ((8,), (3, 8), (3,)))
    layer_norm_linear_fn(x, None, None, matrix, bias).sum().backward()
    torch.testing.assert_close(matrix.grad, F.layer_norm(x.detach(), (8,), eps=1e-6).expand(3, 8))
    torch.testing.assert_close(bias.grad, torch.ones_like(bias))
