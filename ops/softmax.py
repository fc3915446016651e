"""Softmax and log-softmax over the last dimension, with a scale and a mask applied on the way in."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import operators
from .autograd import first_order
from .checks import KERNEL_DTYPES, REFERENCE_DTYPES, as_number, check_input, check_operand
from .kernels import runs_kernels
from .operators import operator, register_autograd
from .torch_state import below_autograd, transformed_by_func


def softmax_fn(x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """exp(z) / Σ exp(z) over the last dimension, z = scale · x + mask, computed in fp32 and rounded once.

    A row that is -inf throughout gives NaN, as PyTorch's softmax does.

    Args:
        x: (..., N) in bf16, fp16 or fp32; elsewhere than on a GPU also fp64. N ≥ 1 of any size.
        scale: a finite number, before the mask is added.
        mask: broadcasts to x's shape and is read as it lies in memory. Boolean: columns where it is False count as -inf, and
            their x gets no gradient. Any floating dtype of x's: added to scale · x; it gets a gradient if it requires one.

    Returns:
        x's shape and dtype.

    Raises:
        TypeError: x or mask is no tensor.
        ValueError: a shape, dtype or device that does not fit, or a scale that is no finite number.
    """
    return _softmax("softmax_fn", x, scale, mask, log=False)


def log_softmax_fn(x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """z - log Σ exp(z) over the last dimension, z = scale · x + mask. Arguments and errors as for `softmax_fn`."""
    return _softmax("log_softmax_fn", x, scale, mask, log=True)


def _softmax(name: str, x: Tensor, scale: float, mask: Tensor | None, log: bool) -> Tensor:
    kernels = isinstance(x, Tensor) and runs_kernels(x.device) and not transformed_by_func()
    check_input(name, x, KERNEL_DTYPES if kernels else REFERENCE_DTYPES)
    scale = as_number(name, "scale", scale, "a finite number", math.isfinite)
    if mask is not None:
        check_operand(name, "mask", mask, x, (torch.bool, *REFERENCE_DTYPES))
        if mask.dim() > x.dim() or any(m not in (1, n) for m, n in zip(mask.shape[::-1], x.shape[::-1], strict=False)):
            raise ValueError(
                f"{name}: mask has shape {tuple(mask.shape)}, expected one that broadcasts to x's {tuple(x.shape)}"
            )
    if not kernels:
        return reference(x, scale, mask, log)
    return softmax_op(x, mask, scale, log)


def reference(x: Tensor, scale: float, mask: Tensor | None, log: bool) -> Tensor:
    """The same in PyTorch's own operations, in fp32, or in fp64 for fp64."""
    z = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    if mask is not None:
        z = z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask
    return (torch.log_softmax(z, -1) if log else torch.softmax(z, -1)).to(x.dtype)


# ---- operators ---------------------------------------------------------------------------------------------------------------


launches = partial(operators.launches, "softmax_launch")


def empty(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


SCHEMA = "(Tensor x, Tensor? mask, float scale, bool log) -> Tensor"
softmax_op = operator("softmax", SCHEMA, lambda *call: launches().softmax(*call), empty)
softmax_forward = operator("softmax_forward", SCHEMA, lambda *call: launches().softmax(*call), empty)
softmax_backward = operator(
    "softmax_backward", "(Tensor y, Tensor dy, Tensor? mask, float scale, bool log) -> Tensor",
    lambda *call: launches().softmax_backward(*call),
    empty,
)  # fmt: skip


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask, scale, log):
        y = below_autograd(softmax_forward, x, mask, scale, log)
        ctx.save_for_backward(y, mask if mask is not None and mask.dtype == torch.bool else None)
        ctx.scale, ctx.log, ctx.function = scale, log, "log_softmax_fn" if log else "softmax_fn"
        ctx.mask = None if mask is None else (mask.shape, mask.dtype)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        y, hides = ctx.saved_tensors
        wants_x, wants_mask, *_ = ctx.needs_input_grad
        if not wants_mask:
            return softmax_backward(y, dy, hides, ctx.scale, ctx.log), None, None, None
        dz = softmax_backward(y, dy, None, 1.0, ctx.log)
        shape, dtype = ctx.mask
        return dz * ctx.scale if wants_x else None, dz.float().sum_to_size(shape).to(dtype), None, None


register_autograd(softmax_op, softmax_forward, _Softmax.apply)
