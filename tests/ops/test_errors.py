"""A mistake raises before anything is launched, and the message names the argument, what was given and what is accepted."""

# ruff: noqa: E501
import re
from contextlib import nullcontext
from decimal import Decimal

import numpy as np
import pytest
import torch

from ops import (
    LayerNorm,
    Norm,
    RMSNorm,
    cross_entropy_fn,
    dropout_mask,
    gated_activation_fn,
    gated_rms_norm_fn,
    layer_norm_fn,
    layer_norm_linear_fn,
    linear_cross_entropy_fn,
    log_softmax_fn,
    modulated_norm_fn,
    norm_fn,
    rms_norm_fn,
    rotary_qk_fn,
    rotary_qkv_fn,
    seeded_dropout,
    softmax_fn,
)

from .cases import BF16, FP32, equal, reference_path, shapes

X = torch.randn(4, 6, 8)
W = torch.ones(8)
TABLE, TARGETS = torch.zeros(6, 1), torch.zeros(4, 6, dtype=torch.int64)
BUFFERS = ("out", "residual_out")


def gated(**wrong):
    right = {"x": X, "z": X, "weight": W, "eps": 1.0}
    gated_rms_norm_fn(**right)  # what is remembered of it lets no other pass
    gated_rms_norm_fn(**right | wrong)


def activation(*wrong):
    gated_activation_fn(X, X, "gelu")  # the same
    gated_activation_fn(*wrong)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_norm_fn(X[..., :0], W, None), "x has shape (4, 6, 0), expected (..., N) with N ≥ 1"),
        (lambda: layer_norm_fn(X.int(), W, None), "layer_norm_fn: x is int32 on cpu, accepted there: float32, bfloat16, float16"),
        (lambda: layer_norm_fn(X, torch.ones(512), None), "weight has shape (512,), expected (8,) to match the last dimension of x (4, 6, 8)"),
        (lambda: layer_norm_fn(X, W, None, rowscale=torch.ones(6)), "rowscale has shape (6,), expected (4, 6) or (24,), one factor for each row"),
        (lambda: layer_norm_fn(X, W, None, dropout_p=1.0), "layer_norm_fn: dropout_p must be in [0, 1), got 1.0"),
        (lambda: layer_norm_fn(X, W, None, out=X.mT.contiguous().mT), "out must be contiguous, got strides (48, 1, 6)"),
        (lambda: layer_norm_fn(X, W, None, out=(b := torch.empty(4, 6, 8)), residual_out=b), "out and residual_out overlap; they hold y"),
        (lambda: dropout_mask(0, 4, 8, 0.5, stream=-1), "dropout_mask: stream must be 0 (what x drops), 1"),
        (lambda: norm_fn("dyt", X, scalars=torch.ones(2)), "scalars has shape (2,), expected (1,), the learned scalars of dyt"),
        (lambda: norm_fn("none", X, x1=X, branch_norm="rmsnorm"), "norm_fn: x1 was given with a norm of the branch x"),
        (lambda: layer_norm_linear_fn(X, W, None, torch.ones(3, 7), None), "linear_weight has shape (3, 7), expected (3, 8) to match the last dimension of x"),
        (lambda: norm_fn("batchnorm", X), f"norm_fn: norm is 'batchnorm', accepted: {', '.join(norm.name for norm in Norm)}"),
        (lambda: LayerNorm((2, 16)), "LayerNorm: hidden_size is (2, 16), expected one number"),
        (lambda: RMSNorm([0]), "RMSNorm: hidden_size must be an int of 1 or more, got 0"),
        (lambda: LayerNorm(8, dropout_p=2), "LayerNorm: dropout_p must be in [0, 1), got 2"),
        (lambda: softmax_fn(X[..., :0]), "softmax_fn: x has shape (4, 6, 0), expected (..., N) with N ≥ 1"),
        (lambda: log_softmax_fn(X, 1.0, torch.ones(3)), "log_softmax_fn: mask has shape (3,), expected one that broadcasts"),
        (lambda: cross_entropy_fn(X, TARGETS[0]), "targets has shape (6,), expected (4, 6), a row of logits for each"),
        (lambda: cross_entropy_fn(X, TARGETS, reduction="avg"), "reduction is 'avg', accepted: none, mean, sum"),
        (lambda: cross_entropy_fn(X.clone().requires_grad_(), TARGETS, in_place=True), "would overwrite logits, a leaf"),
        (lambda: linear_cross_entropy_fn(X, torch.ones(5, 9), TARGETS), "hidden has shape (4, 6, 8), weight (5, 9), expected"),
        (lambda: rotary_qkv_fn(X, TABLE, TABLE, 4, 1), "qkv has shape (4, 6, 8), expected (..., T, (4 + 2·1)·D)"),
        (lambda: rotary_qkv_fn(X, TABLE, TABLE[1:], 2, 1), "sin (5, 1), expected (6 or more, R/2) for both"),
        (lambda: rotary_qkv_fn(X, TABLE, TABLE, 2, 1, positions=TARGETS[:, :3]), "positions has shape (4, 3), expected (4, 6)"),
        (lambda: rotary_qkv_fn(X, TABLE, TABLE, 2, 1, norm="rmsnorm", q_weight=W[:2], k_weight=W[None, :2]), "q_weight has shape (2,), expected (2,), or (2, 2) where all weights and biases are by head"),
        (lambda: rotary_qk_fn(X[None], X[None, :2], None, None), "rotary_qk_fn: k has shape"),
        (lambda: modulated_norm_fn(X, torch.ones(3, 8)), "scale has shape (3, 8), expected the first dimensions of x (4, 6, 8)"),
        (lambda: modulated_norm_fn(X, None, torch.ones(4, 1)), "shift has shape (4, 1)"),
        (lambda: modulated_norm_fn(X, gate=torch.ones(4, 6, 6, 8)), "gate has shape (4, 6, 6, 8)"),
        (lambda: modulated_norm_fn(X, gate=torch.ones(4, 8).long()), "gate is int64"),
        (lambda: modulated_norm_fn(X, residual=X[0]), "residual has shape (6, 8), expected (4, 6, 8)"),
        (lambda: modulated_norm_fn(X, weight=W[:4]), "weight has shape (4,), expected (8,)"),
        (lambda: modulated_norm_fn(X, eps=-1.0), "eps must be a number of 0 or more"),
        (lambda: modulated_norm_fn(X, out_dtype=torch.int8), "out_dtype is torch.int8, accepted"),
        (lambda: gated(z=X[:2]), "z has shape (2, 6, 8), expected (4, 6, 8)"),
        (lambda: gated(z=None), "z must be a tensor, got NoneType"),
        (lambda: gated(weight=W[:4]), "weight has shape (4,), expected (8,)"),
        (lambda: gated(group_size=3), "group_size is 3, expected a divisor of the 8 columns of x"),
        (lambda: gated(activation="gelu"), "activation is 'gelu', accepted: silu, sigmoid"),
        (lambda: gated(activation=["silu"]), "activation is ['silu'], accepted: silu, sigmoid"),
        (lambda: gated(eps=-1.0), "eps must be a number of 0 or more"),
        (lambda: gated(eps=True), "eps must be a number of 0 or more, got True"),
        (lambda: gated(out_dtype=torch.int8), "out_dtype is torch.int8, accepted on"),
        (lambda: activation(X, X, ["gelu"]), "activation is ['gelu'], accepted: gelu"),
        (lambda: activation(X, X, "swish"), "activation is 'swish', accepted: gelu, gelu_tanh, silu"),
        (lambda: activation(X[..., :7]), "it has an odd 7 columns"),
        (lambda: activation(X, X[:1]), "value has shape (1, 6, 8), expected (4, 6, 8)"),
        (lambda: activation(X.long()), "x is int64"),
    ],
)  # fmt: skip
def test_message(call, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()


def good(device):
    sizes = shapes(4, 6, n=8) | dict.fromkeys(BUFFERS, X.shape)
    tensors = {name: torch.ones(size, device=device) for name, size in sizes.items()}
    return tensors | {"seed": torch.tensor([1], device=device), "dropout_p": 0.5, "eps": 0.5}


def bad_values(name, value):
    if isinstance(value, float):
        yield from (-1.0, "0.5", None, [0.5], Decimal("0.5"), torch.tensor(0.5))
        return
    yield from (3.5, [1.0], value[:0], value.to(torch.int32), value.to("meta"), value.unsqueeze(0).expand(2, *value.shape))
    if name == "seed":
        yield from (True, value.double(), value.repeat(2))
    else:
        yield from (3, value.to(torch.complex64), value[..., :-1], value.to_sparse(), value.double())
    if name in BUFFERS:
        yield from (value.mT.contiguous().mT, value.to(BF16))


@pytest.mark.parametrize("name", good(torch.device("cpu")))
def test_a_bad_call_does_not_pass_because_a_good_one_did(name, device):
    # Without buffers, as a call with them takes no site.
    accepted = {key: value for key, value in good(device).items() if key not in BUFFERS or name in BUFFERS}
    layer_norm_fn(**accepted, out_dtype=FP32)
    for value in bad_values(name, accepted[name]):
        messages = []
        for _ in range(2):  # nor because a bad one came before it
            with pytest.raises((ValueError, TypeError)) as error:
                layer_norm_fn(**accepted | {name: value}, out_dtype=FP32)
            messages.append(str(error.value))
        assert messages[0] == messages[1] and messages[0].startswith("layer_norm_fn: ") and name in messages[0], value
    layer_norm_fn(**accepted, out_dtype=FP32)


@pytest.mark.parametrize("flag", [torch.zeros(2), "yes", [True], 1.0])
def test_a_flag_that_is_no_bool_is_refused(flag, device):
    for name in ("prenorm", "residual_in_fp32", "zero_centered_weight", "is_rms_norm", "return_dropout_mask"):
        layer_norm_fn(X.to(device), None, None, **{name: True})  # which 1.0 equals
        with pytest.raises(TypeError, match=re.escape(f"{name} must be True or False, got {type(flag).__name__}")):
            layer_norm_fn(X.to(device), None, None, **{name: flag})


def as_a_block_calls_it(x, module, true, *_):
    return *rms_norm_fn(x, None, None, x, prenorm=true), *module(x, x, true)


def every_flag_and_number(x, module, true, half, two):
    """The results of calls with these as flags, numbers and sizes."""
    w, rows, targets = x.new_full((8,), 0.5), x[0] * 1, torch.arange(6, device=x.device)
    q, k = x.view(4, 3, two, 8), x.view(4, 3, 2, 8)
    cos, sin = x.new_full((3, 4), 0.6), x.new_full((3, 4), 0.8)
    how = {"eps": half, "prenorm": true, "residual_in_fp32": true}
    return (
        *as_a_block_calls_it(x, module, true),
        *layer_norm_fn(x.bfloat16(), w, None, return_dropout_mask=true, dropout_p=half, is_rms_norm=true, seed=1, **how),
        *norm_fn("none", x, residual=x, zero_centered_weight=true, residual_scale=half, return_statistics=true, **how),
        *layer_norm_linear_fn(x, w, None, torch.stack((w, w)), None, is_rms_norm=true, **how),
        *rotary_qk_fn(q, k, cos, sin, norm="rmsnorm", q_weight=w, eps=half, zero_centered_weight=true, interleaved=true),
        softmax_fn(x, half),
        seeded_dropout(x, half, 1),
        cross_entropy_fn(rows, targets, softcap=half, z_loss=half, label_smoothing=half, in_place=true),
        linear_cross_entropy_fn(rows, x[1], targets % 2, chunks=two, z_loss=half),
    )


@pytest.mark.parametrize(("way", "grad"), [("kernels", True), ("kernels", False), ("reference", False), ("compiled", False)])
def test_what_counts_as_a_bool_or_a_number_is_one_everywhere(way, grad, device):
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_(grad)
    plain, numpys = (True, 0.5, 2), (np.True_, np.float32(0.5), np.int64(2))
    modules = [RMSNorm(8, half, half, zero_centered_weight=true, device=device).eval() for true, half, _ in (plain, numpys)]
    eager = call = as_a_block_calls_it if way == "compiled" else every_flag_and_number
    if way == "compiled":  # where numpy's scalars are tensors
        torch._dynamo.reset()
        call = torch.compile(eager, backend="aot_eager", fullgraph=True)
    with reference_path() if way == "reference" else nullcontext():
        expected = eager(x, modules[0], *plain)
        assert equal(call(x, modules[1], 1, 0.5, 2), expected)
        if way != "compiled":
            assert equal(call(x, modules[1], *numpys), expected)
