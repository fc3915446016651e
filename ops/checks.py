"""What the operators accept. A mistake raises before anything is launched: which argument, what was given, what is accepted."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REFERENCE_DTYPES = (*KERNEL_DTYPES, torch.float64)


def check_input(name: str, x: Tensor, accepted: Sequence[torch.dtype]) -> None:
    check_tensor(name, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, expected (..., N) with N ≥ 1")
    check_dtype(name, "x", x, accepted)


def check_like_input(name: str, argument: str, t: Tensor | None, x: Tensor, accepted: Sequence[torch.dtype]) -> None:
    """For residual, x1 and output buffers: x's shape and device, any float dtype."""
    if t is None:
        return
    check_tensor(name, argument, t)
    if t.shape != x.shape:
        raise ValueError(f"{name}: {argument} has shape {tuple(t.shape)}, expected {tuple(x.shape)}, the shape of x")
    check_dtype(name, argument, t, accepted)
    check_device(name, argument, t, x)


def check_buffers(
    name: str, out: Tensor | None, residual_out: Tensor | None, x: Tensor, dtype: torch.dtype, residual_dtype: torch.dtype
) -> None:
    for argument, buffer, accepted in (("out", out, dtype), ("residual_out", residual_out, residual_dtype)):
        if buffer is None:
            continue
        check_like_input(name, argument, buffer, x, (accepted,))
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


def check_out_dtype(name: str, out_dtype: torch.dtype | None, x: Tensor, accepted: Sequence[torch.dtype]) -> None:
    if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype in accepted):
        raise ValueError(f"{name}: out_dtype is {out_dtype}, accepted on {x.device}: {', '.join(map(str, accepted))}")


def check_weight(name: str, argument: str, t: Tensor | None, x: Tensor, accepted: Sequence[torch.dtype]) -> None:
    if t is None:
        return
    check_tensor(name, argument, t)
    if t.shape != x.shape[-1:]:
        raise ValueError(
            f"{name}: {argument} has shape {tuple(t.shape)}, expected {tuple(x.shape[-1:])} "
            f"to match the last dimension of x {tuple(x.shape)}"
        )
    check_dtype(name, argument, t, accepted)
    check_device(name, argument, t, x)


def check_rowscale(name: str, argument: str, t: Tensor | None, x: Tensor, accepted: Sequence[torch.dtype]) -> None:
    if t is None:
        return
    check_tensor(name, argument, t)
    if t.shape != x.shape[:-1] and t.shape != (x.shape[:-1].numel(),):
        raise ValueError(
            f"{name}: {argument} has shape {tuple(t.shape)}, expected {tuple(x.shape[:-1])} or "
            f"({x.shape[:-1].numel()},), one factor for each row of x {tuple(x.shape)}"
        )
    check_dtype(name, argument, t, accepted)
    check_device(name, argument, t, x)


def check_dropout_p(name: str, argument: str, p: float) -> None:
    if not isinstance(p, float | int) or isinstance(p, bool) or not 0.0 <= p < 1.0:
        raise ValueError(f"{name}: {argument} must be in [0, 1), got {p!r}")


def check_eps(name: str, eps: float) -> None:
    if not isinstance(eps, float | int) or not eps >= 0.0:
        raise ValueError(f"{name}: eps must be a number of 0 or more, got {eps!r}")


def check_flag(name: str, argument: str, flag: object) -> None:
    # Whatever else is true or false, numpy's booleans among it, but nothing that may be neither.
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


def check_stream(name: str, stream: int) -> None:
    if not isinstance(stream, int) or stream not in range(2**31):
        raise ValueError(
            f"{name}: stream must be 0 (what x drops), 1 (what x1 drops) or a larger int of your own, got {stream!r}"
        )


def check_seed(name: str, seed: Tensor | int | None, device: torch.device, required: bool = False) -> None:
    if (seed is None and not required) or (isinstance(seed, int) and not isinstance(seed, bool)):
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


def check_device(name: str, argument: str, t: Tensor, x: Tensor) -> None:
    if t.device != x.device:
        raise ValueError(f"{name}: {argument} is on {t.device}, expected {x.device}, the device of x")


def check_tensor(name: str, argument: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: {argument} must be a tensor, got {type(t).__name__}")
    if t.layout != torch.strided:
        raise ValueError(f"{name}: {argument} must be a dense tensor, got one with layout {t.layout}")
