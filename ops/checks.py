"""What a call may be, and what follows from its shapes, dtypes and options alone.

A mistake raises before anything is launched: which argument, what was given, what is accepted.
"""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .records import Options
from .reference import Norm

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REFERENCE_DTYPES = (*KERNEL_DTYPES, torch.float64)


class Plan(NamedTuple):
    name: str  # of the public function, for messages
    inference: Options
    training: Options  # the same, and keep what backward needs
    dtypes: tuple[torch.dtype | None, ...]  # of Inputs
    drops: bool
    returns_y1: bool
    r_is_x: bool  # nothing is added to x or changed in it


# Tensors as callers give them: the fields of Inputs, with an int or None where the seed may be one.
Given = tuple[Any, ...]
# The options as callers give them: norm, eps, dropout_p, zero_centered_weight, whether the residual is kept (prenorm, or a
# buffer for it), residual_in_fp32, return_dropout_mask, out_dtype. Plain, as a named one costs each call 1 µs.
Request = tuple[Any, ...]


def make_plan(given: Given, request: Request, kernels: bool) -> Plan:
    """
    Raises:
        ValueError, TypeError: as `layer_norm_fn` documents, for all but the buffers.
    """
    x, residual, x1, weight, bias, weight1, bias1, rowscale, rowscale1, seed = given
    norm, eps, dropout_p, zero_centered_weight, keeps_residual, residual_in_fp32, return_mask, out_dtype = request
    name = function_name(norm)
    dtypes = KERNEL_DTYPES if kernels else REFERENCE_DTYPES
    check_input(name, x, dtypes)
    check_weights(name, x, dtypes, weight=weight, bias=bias, weight1=weight1, bias1=bias1)
    check_like_input(name, x, dtypes, residual=residual, x1=x1)
    if rowscale is not None or rowscale1 is not None:
        rows, flat = x.shape[:-1], (x.shape[:-1].numel(),)
        check_operands(
            name, x, dtypes, (rows, flat), lambda: f"{tuple(rows)} or {flat}, one factor for each row of x {tuple(x.shape)}",
            rowscale=rowscale, rowscale1=rowscale1,
        )  # fmt: skip
    if rowscale1 is not None and x1 is None:
        raise ValueError(f"{name}: rowscale1 was given without x1, which it scales; pass x1 or leave rowscale1 out")
    check_dropout_p(name, "dropout_p", dropout_p)
    check_eps(name, eps)
    check_flags(
        name, zero_centered_weight=zero_centered_weight, residual_in_fp32=residual_in_fp32, return_dropout_mask=return_mask
    )
    if seed is not None:
        check_seed(name, seed, x.device)
    if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype in dtypes):
        raise ValueError(f"{name}: out_dtype is {out_dtype}, accepted on {x.device}: {', '.join(map(str, dtypes))}")

    residual_dtype = x.dtype
    if residual is not None:
        residual_dtype = residual.dtype
    elif residual_in_fp32:
        residual_dtype = torch.promote_types(x.dtype, torch.float32)
    drops = dropout_p > 0.0
    adds = residual is not None or x1 is not None or drops or rowscale is not None
    r_is_x = not adds and residual_dtype == x.dtype
    inference = Options(
        float(eps),
        float(dropout_p),
        int(norm),
        bool(zero_centered_weight),
        x.dtype if out_dtype is None else out_dtype,
        residual_dtype,
        store_residual=bool(keeps_residual) and not r_is_x,
        store_stats=False,
        return_mask=bool(return_mask) and drops,
    )
    # Backward normalises r again; where nothing was added it finds the same numbers in x.
    training = inference._replace(store_residual=inference.store_residual or adds, store_stats=True)
    given_dtypes = (*[None if t is None else t.dtype for t in given[:-1]], torch.int64 if drops else None)
    return Plan(name, inference, training, given_dtypes, drops, weight1 is not None or bias1 is not None, r_is_x)


_FUNCTIONS: dict[int, str] = {Norm.layernorm: "layer_norm_fn", Norm.rmsnorm: "rms_norm_fn"}


def function_name(norm: int) -> str:
    """The public function of a norm, for messages."""
    return _FUNCTIONS.get(norm, "norm_fn")


def as_norm(norm: Any) -> Norm:
    try:
        return Norm[norm] if isinstance(norm, str) else Norm(norm)
    except (KeyError, ValueError):
        raise ValueError(f"norm_fn: norm is {norm!r}, accepted: {', '.join(kind.name for kind in Norm)}") from None


def check_input(name: str, x: Tensor, accepted: Sequence[torch.dtype]) -> None:
    check_tensor(name, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, expected (..., N) with N ≥ 1")
    check_dtype(name, "x", x, accepted)


def check_operands(
    name: str, x: Tensor, accepted: Sequence[torch.dtype], shapes: Sequence, expected: Callable, **operands: Tensor | None
) -> None:
    """expected: returns the shapes in words, and why. A graph's sizes that are put into words are no longer dynamic."""
    for argument, t in operands.items():
        if t is None:
            continue
        check_tensor(name, argument, t)
        if all(t.shape != shape for shape in shapes):
            raise ValueError(f"{name}: {argument} has shape {tuple(t.shape)}, expected {expected()}")
        check_dtype(name, argument, t, accepted)
        if t.device != x.device:
            raise ValueError(f"{name}: {argument} is on {t.device}, expected {x.device}, the device of x")


def check_like_input(name: str, x: Tensor, accepted: Sequence[torch.dtype], **operands: Tensor | None) -> None:
    check_operands(name, x, accepted, (x.shape,), lambda: f"{tuple(x.shape)}, the shape of x", **operands)


def check_weights(name: str, x: Tensor, accepted: Sequence[torch.dtype], **weights: Tensor | None) -> None:
    shape = x.shape[-1:]
    why = "to match the last dimension of x"
    check_operands(name, x, accepted, (shape,), lambda: f"{tuple(shape)} {why} {tuple(x.shape)}", **weights)


def check_buffers(
    name: str, out: Tensor | None, residual_out: Tensor | None, x: Tensor, dtype: torch.dtype, residual_dtype: torch.dtype
) -> None:
    for argument, buffer, accepted in (("out", out, dtype), ("residual_out", residual_out, residual_dtype)):
        if buffer is None:
            continue
        check_like_input(name, x, (accepted,), **{argument: buffer})
        if not buffer.is_contiguous():
            raise ValueError(
                f"{name}: {argument} must be contiguous, got strides {buffer.stride()} for shape {tuple(buffer.shape)}"
            )
        if buffer.is_leaf and buffer.requires_grad:
            raise ValueError(
                f"{name}: {argument} is a leaf that requires a gradient and can't be overwritten; pass {argument}.detach()"
            )
    if out is not None and residual_out is not None and (out is residual_out or _overlap(out, residual_out)):
        raise ValueError(
            f"{name}: out and residual_out are the same tensor or share memory; they hold y and the residual stream, pass two"
        )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory. Graph capture, whose tensors have none, is taken at its word."""
    if torch.compiler.is_compiling() or type(a) is not Tensor or type(b) is not Tensor:
        return False
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def check_dropout_p(name: str, argument: str, p: float) -> None:
    if not isinstance(p, float | int) or isinstance(p, bool) or not 0.0 <= p < 1.0:
        raise ValueError(f"{name}: {argument} must be in [0, 1), got {p!r}")


def check_eps(name: str, eps: float) -> None:
    if not isinstance(eps, float | int) or not eps >= 0.0:
        raise ValueError(f"{name}: eps must be a number of 0 or more, got {eps!r}")


def check_flags(name: str, **flags: object) -> None:
    # Whatever else is true or false, numpy's booleans among it, but nothing that may be neither.
    for argument, flag in flags.items():
        if not (isinstance(flag, bool | int) or flag is None or type(flag).__name__ in ("bool", "bool_", "SymBool")):
            raise TypeError(f"{name}: {argument} must be True or False, got {type(flag).__name__}")


def check_size(name: str, argument: str, size: Any, least: int) -> None:
    whole = isinstance(size, Integral | torch.SymInt) and not isinstance(size, bool)
    if not whole or not least <= size < 2**63:
        raise ValueError(f"{name}: {argument} must be an int of {least} or more, got {size!r}")


def as_device(name: str, device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: device must be a torch.device or its name, got {device!r}: {error}") from None


def check_mask(name: str, p: float, seed: Tensor | int, stream: int, device: torch.device) -> None:
    """What decides a mask."""
    check_dropout_p(name, "p", p)
    check_seed(name, seed, device)
    if not isinstance(stream, int) or stream not in range(2**31):
        raise ValueError(
            f"{name}: stream must be 0 (what x drops), 1 (what x1 drops) or a larger int of your own, got {stream!r}"
        )


def check_seed(name: str, seed: Tensor | int, device: torch.device) -> None:
    if isinstance(seed, int) and not isinstance(seed, bool):
        return
    if not isinstance(seed, Tensor):
        raise TypeError(f"{name}: seed must be an int or a one-element int64 tensor, got {type(seed).__name__}")
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise ValueError(f"{name}: seed must be an int or a one-element int64 tensor, got {tuple(seed.shape)} of {seed.dtype}")
    if seed.device != device:
        raise ValueError(f"{name}: seed is on {seed.device}, expected {device}, the device of x")


def check_dtype(name: str, argument: str, t: Tensor, accepted: Sequence[torch.dtype]) -> None:
    if t.dtype not in accepted:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
        raise ValueError(f"{name}: {argument} is {str(t.dtype).removeprefix('torch.')} on {t.device}, accepted there: {names}")


def check_tensor(name: str, argument: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: {argument} must be a tensor, got {type(t).__name__}")
    # Dynamo, which traces no other layouts, can't trace the question in a backward pass.
    if not torch.compiler.is_compiling() and t.layout != torch.strided:
        raise ValueError(f"{name}: {argument} must be a dense tensor, got one with layout {t.layout}")
