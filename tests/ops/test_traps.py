"""Mistakes found in other libraries' norms, each with the test that ours passes. Some are in the files of their subject."""

import pytest
import torch
import torch.nn.functional as F

from ops import Norm, kit, layer_norm_fn, modulated_norm_fn, norm_fn, rms_norm_fn
from ops.norm import NORM
from ops.records import BackwardInputs

from .cases import BF16, FP32, leaves, shapes


@pytest.mark.parametrize("zero_centered", [False, True])
def test_bias1_without_bias_or_weight1(zero_centered, device):
    x, w, b1 = leaves(device, (5, 32), (32,), (32,))
    _, y1 = layer_norm_fn(x, w, None, bias1=b1, eps=1e-5, zero_centered_weight=zero_centered)
    torch.testing.assert_close(y1, F.layer_norm(x, (32,), None, b1, 1e-5))
    y1.sum().backward()
    torch.testing.assert_close(b1.grad, torch.full_like(b1, 5.0))


@pytest.mark.parametrize(
    "given", ["residual weight", "residual scale", "shift weight", "shift residual", "scale", "gate shift"]
)
@pytest.mark.parametrize("n", [32, 2048])  # several rows a tile, and one
def test_what_multiplies_and_what_is_added_stand_alone(given, n, device):
    """Trap: Triton 3.6 takes a call with a bias alone for one with a weight alone."""
    x, residual, scale, shift, gate, w = leaves(device, (2, 3, n), (2, 3, n), (2, n), (2, n), (2, n), (n,))
    every = {"residual": residual, "scale": scale, "shift": shift, "gate": gate, "weight": w}
    chosen = {name: every[name] for name in given.split()}
    r = x * chosen.get("gate", torch.ones_like(gate))[:, None] + chosen.get("residual", 0.0)
    y = F.rms_norm(r, (n,), chosen.get("weight"), 1e-6) * (1 + chosen.get("scale", torch.zeros_like(scale)))[:, None]
    y = y + chosen.get("shift", torch.zeros_like(shift))[:, None]
    torch.testing.assert_close(modulated_norm_fn(x, **chosen, is_rms_norm=True), y, rtol=1e-4, atol=1e-5)


def recorded(monkeypatch):
    """The inputs of each backward from now on, and the dtypes of the gradients that it computes."""
    calls, original = [], NORM.start_backward
    kit.forget()

    def noted(b, o, wanted):
        run = original(b, o, wanted)
        return lambda b: (calls.append((BackwardInputs(*b), wanted)), run(b))[1]

    monkeypatch.setattr(NORM, "start_backward", noted)
    return calls


def test_frozen_weights_and_unused_outputs_skip_their_part_of_backward(device, monkeypatch):
    """Traps: a residual output that nobody used is made up as zeros; dw is computed for frozen weights, or never."""
    calls = recorded(monkeypatch)
    for trained in (False, True):
        x, w, b = leaves(device, (4, 32), (32,), (32,))
        layer_norm_fn(x, w.requires_grad_(trained), b, x, prenorm=True)[0].sin().sum().backward()
        assert x.grad is not None and b.grad is not None and (w.grad is not None) == trained
        inputs, wanted = calls.pop()
        assert inputs.dr is None and wanted[-6:-2] == (FP32 if trained else None, FP32, None, None)
    # Each gradient finds its output among those that are there.
    _, y1, r = layer_norm_fn(x, w, b, x, weight1=w, bias1=b, prenorm=True)
    found = torch.autograd.grad(y1.sin().sum() + r.cos().sum(), (x, w, b))
    y, r = layer_norm_fn(x, w, b, x, prenorm=True)
    torch.testing.assert_close(found, torch.autograd.grad(y.sin().sum() + r.cos().sum(), (x, w, b)))


@pytest.mark.parametrize("stream", [BF16, FP32])
def test_without_a_norm_of_the_sum_the_residual_takes_the_upstream_gradient_and_nothing_is_written_for_it(
    stream, device, monkeypatch
):
    calls = recorded(monkeypatch)
    x, w, residual = (torch.randn(s, device=device) for s in ((4, 32), (32,), (4, 32)))
    x, residual = x.bfloat16().requires_grad_(), residual.to(stream).requires_grad_()
    w.requires_grad_()

    def gradients(scale):
        _, r = norm_fn("none", x, residual=residual, branch_norm="rmsnorm", branch_weight=w, prenorm=True, residual_scale=scale)
        assert r.dtype == stream
        return torch.autograd.grad(r.sin().sum(), (x, w, residual)), calls.pop()[1].dz, r

    (dx, dw, dresidual), written, r = gradients(1.0)
    assert written is None
    torch.testing.assert_close(dresidual, r.detach().cos(), rtol=0, atol=0)
    (_, _, scaled), written, r = gradients(0.5)
    assert written == stream
    torch.testing.assert_close(scaled, 0.5 * r.detach().cos())
    wide = x.detach().float().requires_grad_()
    expected = torch.autograd.grad((F.rms_norm(wide, (32,), w, 1e-6) + residual).sin().sum(), (wide, w))
    torch.testing.assert_close((dx.float(), dw), expected, rtol=0.05, atol=0.05)


def test_a_mean_that_overflows_with_rstd_leaves_no_nan(device):
    x = torch.full((2, 17), 1e30, device=device, requires_grad=True)
    layer_norm_fn(x, None, None, eps=1e-20).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("name", shapes(4, n=32))
def test_any_single_input_may_be_the_only_one_that_requires_a_gradient(name, device):
    """Trap: only the residual requires a gradient, statistics are not saved, backward breaks."""

    def gradients(only):
        torch.manual_seed(0)
        tensors = {k: torch.randn(s, device=device).requires_grad_(only in (k, "all")) for k, s in shapes(4, n=32).items()}
        y, y1, r = layer_norm_fn(**tensors, dropout_p=0.2, prenorm=True, seed=1)
        (y.sin() + y1.cos() + r.square()).sum().backward()
        return {k: t.grad for k, t in tensors.items()}

    alone, together = gradients(name), gradients("all")
    torch.testing.assert_close(alone[name], together[name])
    assert all(grad is None for k, grad in alone.items() if k != name)


def test_returned_tuple_has_the_documented_order(device):
    x, w = torch.randn(4, 32, device=device), torch.ones(32, device=device)
    how = {"prenorm": True, "dropout_p": 0.5, "return_dropout_mask": True, "seed": 1}
    y, y1, r, mask, mask1 = rms_norm_fn(x, w, None, x1=x, weight1=2 * w, **how)
    assert torch.equal(y1, 2 * y) and torch.equal(r, x * mask * 2 + x * mask1 * 2)
    for x1 in (None, x):
        _, mask, mask1 = rms_norm_fn(x, w, None, x1=x1, return_dropout_mask=True)
        assert mask.all() and (mask1 is None if x1 is None else mask1.all())


def test_the_functions_with_flash_attentions_interface_are_norm_fn_of_their_norm(device):
    named = {name: torch.randn(shape, device=device) for name, shape in shapes(3, 4, n=24).items()}
    how = {"rowscale1": named["rowscale1"], "return_dropout_mask": True, "out_dtype": BF16, "seed": 1}
    # In FlashAttention's order.
    tensors = [named[name] for name in ("x", "weight", "bias", "residual", "x1", "weight1", "bias1")]
    options = {"eps": 0.1, "dropout_p": 0.5, "rowscale": named["rowscale"], "prenorm": True, "residual_in_fp32": True}
    options |= {"zero_centered_weight": True}
    for kind, found in (
        (Norm.layernorm, layer_norm_fn(*tensors, *options.values(), **how)),
        (Norm.rmsnorm, layer_norm_fn(*tensors, *options.values(), True, **how)),
        (Norm.rmsnorm, rms_norm_fn(*tensors, *options.values(), **how)),
    ):
        expected = norm_fn(kind.name, **named | options | how)
        assert len(found) == 5 and all(map(torch.equal, found, expected))


def test_no_gradient_of_any_output_is_none_of_any_input(device):
    """Trap: a kernel that is started without an upstream gradient."""

    class GivesNoGradient(torch.autograd.Function):
        forward, backward = staticmethod(lambda ctx, y: y.sum()), staticmethod(lambda ctx, dout: None)

    x, w = leaves(device, (4, 40), (40,))
    used = GivesNoGradient.apply(layer_norm_fn(x, w, None))
    assert torch.autograd.grad(used, (x, w), allow_unused=True) == (None, None)


def test_without_a_norm_y_and_r_are_one_tensor_also_where_backward_keeps_r(device):
    x, residual = (torch.randn(3, 16, device=device, requires_grad=True) for _ in range(2))
    y, _, r = norm_fn("none", x, None, None, residual, weight1=torch.ones(16, device=device), prenorm=True)
    assert y is r
    r.mul_(2)  # what backward keeps is a tensor of its own
    torch.testing.assert_close(torch.autograd.grad(r.sum(), x)[0], torch.full_like(x, 2.0))
