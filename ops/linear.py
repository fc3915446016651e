"""Norm, then a linear layer, without keeping the norm's output for backward."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import LAST_OF_X, as_flags, check_input, check_operands, check_tensor
from .kit import refused
from .norm import norm_fn
from .reference import Norm
from .torch_state import product_dtype, transformed_by_func


def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """linear(norm(x + residual)); backward computes the norm's output again from the residual stream instead of keeping it.

    Args:
        x: (..., N).
        norm_weight, norm_bias: (N,) or None.
        linear_weight: (K, N); linear_bias: (K,) or None. Under autocast the product runs in autocast's dtype, else in
            linear_weight's.
        The others as for `layer_norm_fn`.

    Returns:
        (..., K), or with prenorm a tuple with the residual stream, shape of x, behind it.

    Raises:
        ValueError: as `layer_norm_fn`, or linear_weight doesn't match x.
    """
    name = "layer_norm_linear_fn"
    _, dtypes = check_input(name, x)
    check_operands(name, x, dtypes, (x.shape[-1:],), LAST_OF_X, norm_weight=norm_weight, norm_bias=norm_bias)
    check_tensor(name, "linear_weight", linear_weight)
    K, N = linear_weight.shape[:1], x.shape[-1]
    check_operands(name, x, dtypes, ((*K, N),), LAST_OF_X, linear_weight=linear_weight)
    check_operands(name, x, dtypes, (K,), " to match the rows of linear_weight", linear_bias=linear_bias)
    flags = as_flags(name, prenorm=prenorm, residual_in_fp32=residual_in_fp32, is_rms_norm=is_rms_norm)
    prenorm, residual_in_fp32, is_rms_norm = flags.values()
    norm = Norm.rmsnorm if is_rms_norm else Norm.layernorm
    results = norm_fn(
        norm, x, norm_weight, norm_bias, residual,
        eps=eps, prenorm=True, residual_in_fp32=residual_in_fp32, out_dtype=product_dtype(linear_weight),
    )  # fmt: skip
    y, r = cast(tuple[Tensor, Tensor], results)
    if transformed_by_func():  # which wants plain operations
        output = _linear(y, linear_weight, linear_bias)
    else:
        output = _LinearOfNorm.apply(y, r, norm_weight, norm_bias, linear_weight, linear_bias, eps, norm)
    return (output, r) if prenorm else output


def _linear(y, weight, bias):
    return F.linear(y, weight.to(y.dtype), None if bias is None else bias.to(y.dtype))


class _LinearOfNorm(torch.autograd.Function):
    """linear(y) for y = norm(r), keeping r, which the norm keeps anyway, instead of y."""

    @staticmethod
    def forward(ctx, y, r, norm_weight, norm_bias, linear_weight, linear_bias, eps, norm):
        ctx.save_for_backward(r, norm_weight, norm_bias, linear_weight)
        ctx.dtype, ctx.eps, ctx.norm = y.dtype, eps, norm
        ctx.linear_bias_dtype = None if linear_bias is None else linear_bias.dtype
        return _linear(y, linear_weight, linear_bias)

    @staticmethod
    def backward(ctx, dout):
        there = dout, *ctx.saved_tensors  # read once: a checkpoint gives them once
        _, r, norm_weight, norm_bias, linear_weight = there
        dy = dweight = dbias = None
        with torch.no_grad():
            dout = dout.to(ctx.dtype)
            if ctx.needs_input_grad[0]:
                dy = dout @ linear_weight.to(ctx.dtype)
            if ctx.needs_input_grad[4]:
                y = cast(Tensor, norm_fn(ctx.norm, r, norm_weight, norm_bias, eps=ctx.eps, out_dtype=ctx.dtype))
                dweight = (dout.reshape(-1, dout.shape[-1]).mT @ y.reshape(-1, y.shape[-1])).to(linear_weight.dtype)
            if ctx.needs_input_grad[5]:
                dbias = dout.reshape(-1, dout.shape[-1]).sum(0).to(ctx.linear_bias_dtype)
        gradients = dy, None, None, None, dweight, dbias, None, None
        return refused("layer_norm_linear_fn", there, gradients) if torch.is_grad_enabled() else gradients
