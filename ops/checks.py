"""What the operators accept. A mistake raises before anything is launched: which argument, what was given, what is accepted."""

from collections.abc import Sequence

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REFERENCE_DTYPES = (*KERNEL_DTYPES, torch.float64)


def check_input(name: str, x: Tensor, accepted: Sequence[torch.dtype]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: x must be a tensor, got {type(x).__name__}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, expected (..., N) with N ≥ 1")
    check_dtype(name, "x", x, accepted)


def check_like_input(name: str, argument: str, t: Tensor | None, x: Tensor, accepted: Sequence[torch.dtype]) -> None:
    """For residual, x1 and output buffers: x's shape and device, any float dtype."""
    if t is None:
        return
    if t.shape != x.shape:
        raise ValueError(f"{name}: {argument} has shape {tuple(t.shape)}, expected {tuple(x.shape)}, the shape of x")
    check_dtype(name, argument, t, accepted)
    check_device(name, argument, t, x)


def check_weight(name: str, argument: str, t: Tensor | None, x: Tensor, accepted: Sequence[torch.dtype]) -> None:
    if t is None:
        return
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
    if t.shape != x.shape[:-1] and t.shape != (x.shape[:-1].numel(),):
        raise ValueError(
            f"{name}: {argument} has shape {tuple(t.shape)}, expected {tuple(x.shape[:-1])}, "
            f"one factor for each row of x {tuple(x.shape)}"
        )
    check_dtype(name, argument, t, accepted)
    check_device(name, argument, t, x)


def check_dropout_p(name: str, argument: str, p: float) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name}: {argument} must be in [0, 1), got {p}")


def check_seed(name: str, seed: Tensor | int | None, device: torch.device) -> None:
    if seed is None or (isinstance(seed, int) and not isinstance(seed, bool)):
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
