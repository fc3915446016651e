"""What the arguments of a call may be. A mistake raises before anything is launched: which argument, what was given, what is
accepted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .kernels import runs_kernels
from .records import ROWS, Inputs
from .reference import Norm
from .torch_state import transformed_by_func

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REFERENCE_DTYPES = (*KERNEL_DTYPES, torch.float64)


def function_name(norm: int) -> str:
    """The public function of a norm, for messages."""
    return "rms_norm_fn" if norm == Norm.rmsnorm else "layer_norm_fn" if norm == Norm.layernorm else "norm_fn"


def as_norm(norm: Any, argument: str = "norm") -> Norm:
    if isinstance(norm, Norm):
        return norm
    try:
        return Norm[norm] if isinstance(norm, str) else Norm(norm)
    except (KeyError, ValueError):
        raise ValueError(f"norm_fn: {argument} is {norm!r}, accepted: {', '.join(kind.name for kind in Norm)}") from None


def kernels_for(x: Tensor) -> tuple[bool, tuple[torch.dtype, ...]]:
    """Whether a call with x goes through kernels, and the dtypes that it accepts."""
    kernels = runs_kernels(x.device) and not transformed_by_func()
    return kernels, KERNEL_DTYPES if kernels else REFERENCE_DTYPES


def check_input(name: str, x: Tensor, takes_fp64: bool = False) -> tuple[bool, tuple[torch.dtype, ...]]:
    """`kernels_for` x (..., N). takes_fp64: an x in fp64 goes through PyTorch's operations, also on a GPU."""
    check_tensor(name, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, expected (..., N) with N ≥ 1")
    kernels, dtypes = kernels_for(x)
    check_dtype(name, "x", x, REFERENCE_DTYPES if takes_fp64 else dtypes)
    return (False, REFERENCE_DTYPES) if x.dtype == torch.float64 else (kernels, dtypes)


def check_operands(
    name: str, x: Tensor, accepted: Sequence[torch.dtype], shapes: Sequence, why: str, **operands: Tensor | None
) -> None:
    """why: these shapes, where "{x}" becomes that of x. A graph's sizes are put into words by an error alone, as those that are
    put into words are no longer dynamic."""
    for argument, t in operands.items():
        if t is None:
            continue
        check_operand(name, argument, t, x, accepted)
        if all(t.shape != shape for shape in shapes):
            expected = " or ".join([str(tuple(shape)) for shape in shapes]) + why.format(x=tuple(x.shape))
            raise ValueError(f"{name}: {argument} has shape {tuple(t.shape)}, expected {expected}")


def as_rows(t: Tensor) -> Tensor:
    """[M, N] of (..., N). Where t is empty, PyTorch doesn't know what -1 of a reshape would be."""
    return t.flatten(0, -2) if t.dim() > 1 else t[None]


def check_operand(name: str, argument: str, t: Tensor, x: Tensor, accepted: Sequence[torch.dtype], of: str = "x") -> None:
    """All but the shape. of: what x is called."""
    check_tensor(name, argument, t)
    check_dtype(name, argument, t, accepted)
    if t.device != x.device:
        raise ValueError(f"{name}: {argument} is on {t.device}, expected {x.device}, the device of {of}")


# Of `check_operands`.
SHAPE_OF_X, LAST_OF_X = ", the shape of x", " to match the last dimension of x {x}"


def check_buffers(
    name: str, out: Tensor | None, residual_out: Tensor | None, inputs: Inputs, dtype: torch.dtype, residual_dtype: torch.dtype,
    eager: bool,
) -> None:  # fmt: skip
    """eager: the tensors have memory that can be asked for."""
    for argument, buffer, accepted in (("out", out, dtype), ("residual_out", residual_out, residual_dtype)):
        if buffer is None:
            continue
        check_operands(name, inputs.x, (accepted,), (inputs.x.shape,), SHAPE_OF_X, **{argument: buffer})
        if not buffer.is_contiguous():
            raise ValueError(
                f"{name}: {argument} must be contiguous, got strides {buffer.stride()} for shape {tuple(buffer.shape)}"
            )
        for operand, t in zip(inputs._fields, inputs, strict=True) if eager else ():
            if t is None or not overlap(buffer, t):
                continue
            # Each row is read before it is written.
            if operand not in ROWS or t.data_ptr() != buffer.data_ptr() or t.dtype != buffer.dtype or not t.is_contiguous():
                raise ValueError(
                    f"{name}: {argument} overlaps {operand}; it may be all of {', '.join(ROWS)}, or else no input's"
                )
    if out is not None and residual_out is not None and (out is residual_out or (eager and overlap(out, residual_out))):
        raise ValueError(f"{name}: out and residual_out overlap; they hold y and the residual stream, pass two")


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether one begins in memory before the other has ended."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    ends = [
        t.data_ptr() + t.itemsize * (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)))
        for t in (a, b)
    ]
    return a.data_ptr() < ends[1] and b.data_ptr() < ends[0]


# What numpy's numbers and booleans are accepted for becomes Python's here, as neither Triton nor the dispatcher takes them.


def as_dropout_p(name: str, argument: str, p: Any) -> float:
    return as_number(name, argument, p, "in [0, 1)", lambda p: 0.0 <= p < 1.0)


def as_eps(name: str, eps: Any) -> float:
    return as_number(name, "eps", eps, "a number of 0 or more", lambda eps: eps >= 0.0)


def is_finite(number: Any) -> bool:
    """Also of a symbol of a compiled graph, for which math.isfinite would break the graph."""
    return -math.inf < number < math.inf


def as_number(name: str, argument: str, number: Any, accepted: str, fits: Callable[[Any], bool]) -> float:
    """accepted: in words."""
    known = type(number) is float or (isinstance(number, float | int | Real) and not isinstance(number, bool))
    if not known or not fits(number):
        raise ValueError(f"{name}: {argument} must be {accepted}, got {number!r}")
    return float(number)


def as_choice(name: str, argument: str, choice: Any, accepted: Mapping[str, Any]) -> Any:
    if not isinstance(choice, str) or choice not in accepted:
        raise ValueError(f"{name}: {argument} is {choice!r}, accepted: {', '.join(accepted)}")
    return accepted[choice]


def as_out_dtype(name: str, out_dtype: Any, x: Tensor, accepted: Sequence[torch.dtype]) -> torch.dtype:
    if out_dtype is None:
        return x.dtype
    if not (isinstance(out_dtype, torch.dtype) and out_dtype in accepted):
        raise ValueError(f"{name}: out_dtype is {out_dtype}, accepted on {x.device}: {', '.join(map(str, accepted))}")
    return out_dtype


def as_flags(name: str, **flags: Any) -> dict[str, bool]:
    """Whatever is true or false, but nothing that may be neither."""
    for argument, flag in flags.items():
        if not (isinstance(flag, bool | int) or flag is None or type(flag).__name__ in ("bool", "bool_", "SymBool")):
            raise TypeError(f"{name}: {argument} must be True or False, got {type(flag).__name__}")
    return {argument: bool(flag) for argument, flag in flags.items()}


def as_size(name: str, argument: str, size: Any, least: int) -> int:
    whole = isinstance(size, int | Integral | torch.SymInt) and not isinstance(size, bool)
    if not whole or not least <= size < 2**63:
        raise ValueError(f"{name}: {argument} must be an int of {least} or more, got {size!r}")
    return size if isinstance(size, torch.SymInt) else int(size)  # type: ignore[return-value]


def check_mask(name: str, seed: Tensor | int, stream: int, device: torch.device) -> None:
    """What decides a mask, beside p."""
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
    # Dynamo can't trace `layout` in a backward pass. It traces dense tensors only, so nothing is lost.
    if not torch.compiler.is_compiling() and t.layout != torch.strided:
        raise ValueError(f"{name}: {argument} must be a dense tensor, got one with layout {t.layout}")
