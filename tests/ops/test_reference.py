"""The reference is an oracle only if it is right: against the formula written out and numerical derivatives, in fp64."""

import pytest
import torch
import torch.nn.functional as F

from ops import layer_norm_fn

from .cases import reference_path

D = torch.float64


def double(*shape, seed=0):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("rms", [False, True])
def test_equals_the_formula(rms, zero_centered):
    x, x1, residual = (double(6, 33, seed=i) for i in range(3))
    w, b, w1, b1 = (double(33, seed=i) for i in range(3, 7))
    scale, scale1 = double(6, seed=7), double(6, seed=8)
    with reference_path():
        y, y1, r = layer_norm_fn(
            x, w, b, residual, x1, w1, b1, rowscale=scale, rowscale1=scale1, prenorm=True, is_rms_norm=rms, eps=1e-5,
            zero_centered_weight=zero_centered,
        )  # fmt: skip
    torch.testing.assert_close(r, x * scale[:, None] + x1 * scale1[:, None] + residual, rtol=1e-12, atol=1e-12)
    centred = r if rms else r - r.mean(1, keepdim=True)
    x_hat = centred / (centred.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(y, x_hat * (w + zero_centered) + b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y1, x_hat * (w1 + zero_centered) + b1, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rms", [False, True])
def test_gradients_match_numerical_derivatives(rms):
    def fn(x, residual, x1, w, b, w1, b1, rowscale, rowscale1):
        return layer_norm_fn(
            x, w, b, residual, x1, w1, b1, dropout_p=0.3, rowscale=rowscale, rowscale1=rowscale1, prenorm=True,
            zero_centered_weight=True, is_rms_norm=rms, eps=1e-5, seed=4,
        )  # fmt: skip

    args = (
        [double(3, 5, seed=i) for i in range(3)]
        + [double(5, seed=i) for i in range(3, 7)]
        + [double(3, seed=7), double(3, seed=8)]
    )
    with reference_path():
        assert torch.autograd.gradcheck(fn, args)


def test_statistics_come_from_the_rounded_sum():
    """Trap: statistics of the unrounded sum, x̂ in backward from the rounded one."""
    x = torch.randn(4, 64).bfloat16()
    residual = (100 * torch.randn(4, 64)).bfloat16()
    with reference_path():
        y, r = layer_norm_fn(x, None, None, residual, prenorm=True, out_dtype=torch.float32, eps=1e-5)
    assert r.dtype == torch.bfloat16
    torch.testing.assert_close(y, F.layer_norm(r.float(), (64,), eps=1e-5), rtol=1e-5, atol=1e-5)
