"""A mistake raises before anything is launched, and the message names the argument, what was given and what is accepted."""

# ruff: noqa: E501
import re
from decimal import Decimal

import pytest
import torch

from ops import LayerNorm, Norm, dropout_mask, layer_norm_fn, layer_norm_linear_fn, norm_fn

from .cases import BF16, FP32, shapes

X = torch.randn(4, 6, 8)
W = torch.ones(8)
BUFFERS = ("out", "residual_out")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_norm_fn(X[..., :0], W, None), "x has shape (4, 6, 0), expected (..., N) with N ≥ 1"),
        (lambda: layer_norm_fn(X.int(), W, None), "layer_norm_fn: x is int32 on cpu, accepted there: float32, bfloat16, float16"),
        (lambda: layer_norm_fn(X, torch.ones(512), None), "weight has shape (512,), expected (8,) to match the last dimension of x (4, 6, 8)"),
        (lambda: layer_norm_fn(X, W, None, rowscale=torch.ones(6)), "rowscale has shape (6,), expected (4, 6) or (24,), one factor for each row"),
        (lambda: layer_norm_fn(X, W, None, dropout_p=1.0), "layer_norm_fn: dropout_p must be in [0, 1), got 1.0"),
        (lambda: layer_norm_fn(X, W, None, out=X.mT.contiguous().mT), "out must be contiguous, got strides (48, 1, 6)"),
        (lambda: layer_norm_fn(X, W, None, out=(b := torch.empty(4, 6, 8)), residual_out=b), "are the same tensor"),
        (lambda: dropout_mask(0, 4, 8, 0.5, stream=-1), "dropout_mask: stream must be 0 (what x drops), 1"),
        (lambda: norm_fn("dyt", X, scalars=torch.ones(2)), "scalars has shape (2,), expected (1,), the learned scalars of dyt"),
        (lambda: norm_fn("none", X, x1=X, branch_norm="rmsnorm"), "norm_fn: x1 was given with a norm of the branch x"),
        (lambda: layer_norm_linear_fn(X, W, None, torch.ones(3, 7), None), "linear_weight has shape (3, 7), expected (3, 8) to match the last dimension of x"),
        (lambda: norm_fn("batchnorm", X), f"norm_fn: norm is 'batchnorm', accepted: {', '.join(norm.name for norm in Norm)}"),
        (lambda: LayerNorm(8, dropout_p=2), "LayerNorm: dropout_p must be in [0, 1), got 2"),
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
