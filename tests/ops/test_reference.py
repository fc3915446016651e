"""The reference against formulas written out and numerical derivatives, in fp64."""

import pytest
import torch

from ops import Norm, backend_for, kernels, layer_norm_fn, norm_fn

from .cases import reference_path

# As published; a norm without an entry is tested against `reference.NORMS` alone.
FORMULAS = {
    Norm.layernorm: lambda r, eps: (r - r.mean(1, keepdim=True)) / (r.var(1, correction=0, keepdim=True) + eps).sqrt(),
    Norm.rmsnorm: lambda r, eps: r / (r.square().mean(1, keepdim=True) + eps).sqrt(),
}


def double(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("norm", FORMULAS)
def test_equals_the_formula(norm, zero_centered):
    x, x1, residual = (double(6, 33, seed=i) for i in range(3))
    w, b, w1, b1 = (double(33, seed=i) for i in range(3, 7))
    scale, scale1 = double(6, seed=7), double(6, seed=8)
    with reference_path():
        how = {"prenorm": True, "eps": 1e-5, "zero_centered_weight": zero_centered}
        found = norm_fn(norm, x, w, b, residual, x1, w1, b1, rowscale=scale, rowscale1=scale1, **how)
    r = x * scale[:, None] + x1 * scale1[:, None] + residual
    x_hat = FORMULAS[norm](r, 1e-5)
    expected = (x_hat * (w + zero_centered) + b, x_hat * (w1 + zero_centered) + b1, r)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", Norm)
def test_gradients_match_numerical_derivatives(norm):
    how = {"dropout_p": 0.3, "prenorm": True, "zero_centered_weight": True, "eps": 1e-5, "seed": 4}

    def fn(x, residual, x1, w, b, w1, b1, rowscale, rowscale1):
        return norm_fn(norm, x, w, b, residual, x1, w1, b1, rowscale=rowscale, rowscale1=rowscale1, **how)

    rows, weights = [double(3, 5, seed=i) for i in range(3)], [double(5, seed=i) for i in range(3, 7)]
    scales = [double(3, seed=7), double(3, seed=8)]
    scales[0].data[1] = scales[1].data[1:] = 0.0  # there too
    with reference_path():
        assert torch.autograd.gradcheck(fn, (*rows, *weights, *scales))


def test_the_reference_has_gradients_of_gradients():
    x, w, scale = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5), (5,), (2,)))
    scale.data[0] = 0.0

    def site(x, w, scale):
        return layer_norm_fn(x, w, None, x, dropout_p=0.3, rowscale=scale, prenorm=True, seed=1)

    with reference_path():
        assert torch.autograd.gradgradcheck(site, (x, w, scale))
        batch = torch.stack([x, 2 * x])  # and is mapped over a batch
        torch.testing.assert_close(torch.vmap(lambda x: site(x, w, scale)[1])(batch)[1], site(2 * x, w, scale)[1])


def test_devices_without_kernels_take_the_reference(monkeypatch):
    ran = {True: "Triton interpreter", False: "PyTorch reference"}
    for interpreted in (True, False):
        monkeypatch.setattr(kernels, "INTERPRET", interpreted)
        assert backend_for("cpu") == ran[interpreted] and backend_for("cuda") == "Triton kernels"
        assert {backend_for(device) for device in ("meta", "xpu", "mps", "hpu")} == {"PyTorch reference"}
    for device in ("meta", "cpu"):  # of the others, this torch has no tensors
        x, w = torch.zeros(3, 12, device=device, dtype=torch.bfloat16, requires_grad=True), torch.zeros(12, device=device)
        y, r = layer_norm_fn(x, w, None, x, dropout_p=0.1, prenorm=True)
        y.sum().backward()
        assert (y.device.type, y.shape, r.dtype, x.grad.device.type) == (device, (3, 12), torch.bfloat16, device)
