"""Mistakes found in other libraries' norms, each with the test that ours passes. Some are in the files of their subject."""

import pytest
import torch
import torch.nn.functional as F

from ops import Norm, launch, layer_norm_fn, norm_fn, rms_norm_fn
from ops.records import Inputs, Options

from .cases import BF16, FP32, leaf


@pytest.mark.parametrize("zero_centered", [False, True])
def test_bias1_without_bias_or_weight1(zero_centered, device):
    x, w, b1 = leaf(5, 32, device=device), leaf(32, device=device), leaf(32, device=device)
    _, y1 = layer_norm_fn(x, w, None, bias1=b1, eps=1e-5, zero_centered_weight=zero_centered)
    torch.testing.assert_close(y1, F.layer_norm(x, (32,), None, b1, 1e-5))
    y1.sum().backward()
    torch.testing.assert_close(b1.grad, torch.full_like(b1, 5.0))


@pytest.fixture
def backward_calls(monkeypatch):
    """(inputs, options) of each backward."""
    calls, original = [], launch.backward
    monkeypatch.setattr(launch, "backward", lambda *records: calls.append(records) or original(*records))
    return calls


def test_unused_residual_output_is_not_made_up_as_zeros(device, backward_calls):
    x, residual = leaf(4, 32, device=device), leaf(4, 32, device=device)
    layer_norm_fn(x, None, None, residual, prenorm=True)[0].sum().backward()
    assert [inputs.dr for inputs, _ in backward_calls] == [None]


def test_frozen_weights_skip_the_weight_reduction_and_trained_ones_do_not(device, backward_calls):
    for frozen in (True, False):
        x, w, b = leaf(4, 32, device=device), torch.ones(32, device=device), leaf(32, device=device)
        layer_norm_fn(x, w.requires_grad_(not frozen), b).sin().sum().backward()
        assert x.grad is not None and b.grad is not None and (w.grad is None) == frozen
    assert [how.wanted for _, how in backward_calls] == [(False, True, False, False), (True, True, False, False)]


def test_a_mean_that_overflows_with_rstd_leaves_no_nan(device):
    x = torch.full((2, 17), 1e30, device=device, requires_grad=True)
    layer_norm_fn(x, None, None, eps=1e-20).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("name", ["x", "residual", "x1", "weight", "bias", "weight1", "bias1", "rowscale", "rowscale1"])
def test_any_single_input_may_be_the_only_one_that_requires_a_gradient(name, device):
    """Trap: only the residual requires a gradient, statistics are not saved, backward breaks."""

    def gradients(only):
        g = torch.Generator().manual_seed(0)
        shapes = dict.fromkeys(("x", "residual", "x1"), (4, 32)) | dict.fromkeys(("weight", "bias", "weight1", "bias1"), (32,))
        shapes |= {"rowscale": (4,), "rowscale1": (4,)}
        tensors = {k: torch.randn(s, generator=g).to(device).requires_grad_(only in (k, "all")) for k, s in shapes.items()}
        y, y1, r = layer_norm_fn(**tensors, dropout_p=0.2, prenorm=True, seed=1)
        (y.sin() + y1.cos() + r.square()).sum().backward()
        return {k: t.grad for k, t in tensors.items()}

    alone, together = gradients(name), gradients("all")
    torch.testing.assert_close(alone[name], together[name])
    assert all(grad is None for k, grad in alone.items() if k != name)


def test_statistics_are_fp32_whatever_the_inputs(device):
    x = torch.randn(4, 32, device=device).to(BF16)
    how = Options(1e-5, 0.0, Norm.layernorm, False, BF16, BF16, store_residual=False, store_stats=True, return_mask=False)
    stats = launch.forward(Inputs(x, *(None,) * 9), how).stats
    assert stats.dtype == FP32 and stats.shape == (4, 2)
    torch.testing.assert_close(stats[:, 1], x.float().mean(1))
    torch.testing.assert_close(stats[:, 0], (x.float().var(1, correction=0) + 1e-5).rsqrt())


def test_statistics_that_hooks_bring_back_anywhere_in_memory(device, backward_calls, monkeypatch):
    """A GPU reads the two of a row as a word, which must lie at a multiple of its size."""
    places, original = [], launch.Launcher.__call__

    def start(self, tensors, *seed):
        places.extend(t.data_ptr() % 8 for t in tensors if t is not None and t.shape == (5, 2))
        original(self, tensors, *seed)

    def bring_back(t):
        return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].copy_(t.flatten()).view(t.shape)

    x = leaf(5, 32, device=device)
    (expected,) = torch.autograd.grad(layer_norm_fn(x, None, None).sin().sum(), x)
    monkeypatch.setattr(launch.Launcher, "__call__", start)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, bring_back):
        y = layer_norm_fn(x, None, None)
    assert torch.equal(torch.autograd.grad(y.sin().sum(), x)[0], expected)
    assert places == [0, 0] and backward_calls[-1][0].stats.data_ptr() % 8  # forward's and backward's


def test_small_and_zero_weights_have_right_gradients(device):
    """Trap: x̂ recovered as (y − bias) / weight."""
    x, b, g = leaf(6, 32, device=device), leaf(32, device=device), torch.randn(6, 32, device=device)
    w = torch.cat([torch.zeros(16), torch.full((16,), 1e-20)]).to(device).requires_grad_()
    layer_norm_fn(x, w, b, eps=1e-5).backward(g)
    torch.testing.assert_close(w.grad, (g * F.layer_norm(x.detach(), (32,), eps=1e-5)).sum(0), rtol=1e-4, atol=1e-5)
    assert torch.isfinite(x.grad).all()


@pytest.mark.gpu
def test_tensors_on_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(8, 64, device="cuda:1", requires_grad=True)
    y = layer_norm_fn(x, None, None, x, dropout_p=0.1, seed=1)
    y.sum().backward()
    assert y.device == x.grad.device == torch.device("cuda:1") and torch.isfinite(x.grad).all()


def test_returned_tuple_has_the_documented_order(device):
    x, w = torch.randn(4, 32, device=device), torch.ones(32, device=device)
    y, y1, r, mask, mask1 = rms_norm_fn(
        x, w, None, x1=x, weight1=2 * w, prenorm=True, dropout_p=0.5, return_dropout_mask=True, seed=1
    )
    assert torch.equal(y1, 2 * y) and torch.equal(r, x * mask * 2 + x * mask1 * 2)
    y, mask, mask1 = rms_norm_fn(x, w, None, return_dropout_mask=True)
    assert mask.all() and mask1 is None
    y, mask, mask1 = rms_norm_fn(x, w, None, x1=x, return_dropout_mask=True)
    assert mask.all() and mask1.all()


def test_the_functions_with_flash_attentions_interface_are_norm_fn_of_their_norm(device):
    x, residual, x1 = torch.randn(3, 4, 24, device=device)
    w, b, w1, b1 = torch.randn(4, 24, device=device)
    scales = {"rowscale": torch.rand(4, device=device), "rowscale1": torch.rand(4, device=device)}
    tensors = (x, w, b, residual, x1, w1, b1)
    # In FlashAttention's order: eps, dropout_p, rowscale, prenorm, residual_in_fp32, zero_centered_weight
    plain = (0.1, 0.5, scales["rowscale"], True, True, True)
    named = {"eps": 0.1, "dropout_p": 0.5, "prenorm": True, "residual_in_fp32": True, "zero_centered_weight": True, "seed": 1}
    how = {"rowscale1": scales["rowscale1"], "return_dropout_mask": True, "out_dtype": BF16, "seed": 1}
    for norm, found in (
        (Norm.layernorm, layer_norm_fn(*tensors, *plain, **how)),
        (Norm.rmsnorm, layer_norm_fn(*tensors, *plain, True, **how)),
        (Norm.rmsnorm, rms_norm_fn(*tensors, *plain, **how)),
    ):
        expected = norm_fn(norm.name, *tensors, **scales, **named, return_dropout_mask=True, out_dtype=BF16)
        assert len(found) == 5 and all(map(torch.equal, found, expected))


class _GivesNoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.sum()

    @staticmethod
    def backward(ctx, dout):
        return None


def test_no_gradient_of_any_output_is_none_of_any_input(device):
    """Trap: a kernel that is started without an upstream gradient."""
    x, w = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((4, 40), (40,)))
    used = _GivesNoGradient.apply(layer_norm_fn(x, w, None))
    assert torch.autograd.grad(used, (x, w), allow_unused=True) == (None, None)
