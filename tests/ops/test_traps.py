"""Mistakes found in other libraries' norms, each with the test that ours passes."""

import pytest
import torch
import torch.nn.functional as F

from ops import launch, layer_norm_fn, registration, rms_norm_fn
from ops.records import Inputs, Options

from .cases import BF16, FP32, leaf


@pytest.mark.parametrize("zero_centered", [False, True])
def test_bias1_without_bias_or_weight1(zero_centered, device):
    x, w, b1 = leaf(5, 32, device=device), leaf(32, device=device), leaf(32, device=device)
    _, y1 = layer_norm_fn(x, w, None, bias1=b1, eps=1e-5, zero_centered_weight=zero_centered)
    torch.testing.assert_close(y1, F.layer_norm(x, (32,), None, b1, 1e-5))
    y1.sum().backward()
    torch.testing.assert_close(b1.grad, torch.full_like(b1, 5.0))


def test_python_floats_do_not_reach_the_kernel_as_fp64(device):
    """eps and the dropout scale that fp32 can't hold exactly: eager and compiled give the same bits."""
    x, w = torch.randn(64, 96, device=device), torch.rand(96, device=device)

    def fn(x, w):
        return layer_norm_fn(x, w, None, x, eps=1.1e-5, dropout_p=0.1, prenorm=True, seed=3)

    compiled = torch.compile(fn, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(fn(x, w), compiled(x, w), strict=True))


def test_unused_residual_output_is_not_made_up_as_zeros(device, monkeypatch):
    seen = []
    original = launch.norm_backward
    monkeypatch.setattr(launch, "norm_backward", lambda inputs, *a: (seen.append(inputs.dr), original(inputs, *a)))
    x, residual = leaf(4, 32, device=device), leaf(4, 32, device=device)
    y, _ = layer_norm_fn(x, None, None, residual, prenorm=True)
    y.sum().backward()
    assert seen == [None]


@pytest.mark.parametrize("looped", [False, True])
def test_gradient_of_the_residual_output_alone_skips_the_norm(looped, device, request):
    """Whatever the norm would make of an infinite row, it has no part in this gradient."""
    if looped:
        request.getfixturevalue("narrow_tiles")
    x, residual, w = leaf(4, 40, device=device), leaf(4, 40, device=device), leaf(40, device=device)
    with torch.no_grad():
        x[2, 7] = torch.inf
    _, r = layer_norm_fn(x, w, None, residual, prenorm=True)
    g = torch.randn_like(r)
    r.backward(g)
    assert torch.equal(x.grad, g) and torch.equal(residual.grad, g)
    assert w.grad is None


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("rms", [False, True])
def test_forward_and_backward_normalise_the_rounded_sum(rms, looped, device, request):
    """Trap: statistics of the unrounded sum, x̂ in backward from the rounded one. A stream so coarse that the two differ."""
    if looped:
        request.getfixturevalue("narrow_tiles")
    x = leaf(6, 40, device=device)
    residual = (300 * torch.randn(6, 40, device=device)).to(BF16).requires_grad_()
    w, g = leaf(40, device=device), torch.randn(6, 40, device=device)
    y, r = layer_norm_fn(x, w, None, residual, prenorm=True, is_rms_norm=rms, eps=1e-5)
    y.backward(g)
    stored = r.detach().float().requires_grad_()
    expected = F.rms_norm(stored, (40,), w, 1e-5) if rms else F.layer_norm(stored, (40,), w, None, 1e-5)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    dx, dw = torch.autograd.grad(expected, (stored, w), g)
    torch.testing.assert_close(w.grad, dw, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad, dx, rtol=1e-4, atol=1e-6)


def test_a_mean_that_overflows_with_rstd_leaves_no_nan(device):
    x = torch.full((2, 17), 1e30, device=device, requires_grad=True)
    layer_norm_fn(x, None, None, eps=1e-20).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("shape", ["leading", "flat", "bf16"])
def test_rowscale_belongs_to_its_row_in_either_shape(shape, device):
    x, scale = torch.randn(2, 3, 16, device=device), torch.rand(2, 3, device=device)
    given = {"leading": scale, "flat": scale.flatten(), "bf16": scale.to(BF16)}[shape]
    _, r = layer_norm_fn(x, None, None, rowscale=given, prenorm=True)
    assert torch.equal(r, x * given.float().view(2, 3, 1))


def test_frozen_weights_skip_the_weight_reduction_and_trained_ones_do_not(device, monkeypatch):
    wanted = []
    original = launch.norm_backward
    monkeypatch.setattr(launch, "norm_backward", lambda *a: (wanted.append(a[-1].wanted), original(*a)))
    for frozen in (True, False):
        x, w, b = leaf(4, 32, device=device), torch.ones(32, device=device), leaf(32, device=device)
        w.requires_grad_(not frozen)
        layer_norm_fn(x, w, b).sin().sum().backward()
        assert x.grad is not None and b.grad is not None and (w.grad is None) == frozen
    assert wanted == [(False, True, False, False), (True, True, False, False)]


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
    how = Options(1e-5, 0.0, False, False, BF16, BF16, store_residual=False, store_stats=True, return_mask=False)
    stats = registration.forward(Inputs(x, *(None,) * 9), how).stats
    assert stats.dtype == FP32 and stats.shape == (4, 2)
    torch.testing.assert_close(stats[:, 1], x.float().mean(1))
    torch.testing.assert_close(stats[:, 0], (x.float().var(1, correction=0) + 1e-5).rsqrt())


def test_statistics_that_hooks_bring_back_anywhere_in_memory(device, monkeypatch):
    """A GPU reads the two of a row as a word, which must lie at a multiple of its size."""
    places = []
    original = launch.Launcher.__call__

    def start(self, *tensors):
        places.extend(t.data_ptr() % 8 for t in tensors if t is not None and t.shape == (5, 2))
        original(self, *tensors)

    def bring_back(t):
        flat = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:]
        return flat.copy_(t.flatten()).view(t.shape)

    x = leaf(5, 32, device=device)
    (expected,) = torch.autograd.grad(layer_norm_fn(x, None, None).sin().sum(), x)
    monkeypatch.setattr(launch.Launcher, "__call__", start)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, bring_back):
        y = layer_norm_fn(x, None, None)
    assert torch.equal(torch.autograd.grad(y.sin().sum(), x)[0], expected)
    assert places == [0, 0]  # forward's and backward's


def test_small_and_zero_weights_have_right_gradients(device):
    """Trap: x̂ recovered as (y − bias) / weight."""
    x, b = leaf(6, 32, device=device), leaf(32, device=device)
    w = torch.cat([torch.zeros(16), torch.full((16,), 1e-20)]).to(device).requires_grad_()
    g = torch.randn(6, 32, device=device)
    layer_norm_fn(x, w, b, eps=1e-5).backward(g)
    x_hat = F.layer_norm(x.detach(), (32,), eps=1e-5)
    torch.testing.assert_close(w.grad, (g * x_hat).sum(0), rtol=1e-4, atol=1e-5)
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("looped", [False, True])
def test_runs_are_bit_identical(looped, device, request):
    if looped:
        request.getfixturevalue("narrow_tiles")
    rows = 300 if device.type == "cuda" else 12
    x, w, b = leaf(rows, 48, device=device), leaf(48, device=device), leaf(48, device=device)
    g = torch.randn(rows, 48, device=device)
    runs = []
    for _ in range(3 if device.type == "cpu" else 20):
        runs.append(torch.autograd.grad(layer_norm_fn(x, w, b, x, dropout_p=0.1, seed=1), (x, w, b), g))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.gpu
def test_tensors_on_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(8, 64, device="cuda:1", requires_grad=True)
    y = layer_norm_fn(x, None, None, x, dropout_p=0.1, seed=1)
    y.sum().backward()
    assert y.device == x.grad.device == torch.device("cuda:1")
    assert torch.isfinite(x.grad).all()


def test_returned_tuple_has_the_documented_order(device):
    x = torch.randn(4, 32, device=device)
    w = torch.ones(32, device=device)
    y, y1, r, mask, mask1 = rms_norm_fn(
        x, w, None, x1=x, weight1=2 * w, prenorm=True, dropout_p=0.5, return_dropout_mask=True, seed=1
    )
    assert torch.equal(y1, 2 * y)
    assert torch.equal(r, x * mask * 2 + x * mask1 * 2)
    y, mask, mask1 = rms_norm_fn(x, w, None, return_dropout_mask=True)
    assert mask.all() and mask1 is None
