"""Dropout by itself, with the masks of the norms: for models that are not fused and must drop the same elements."""

import torch
from torch import Tensor

from . import checks, operators, reference
from .kernels import runs_kernels
from .philox import drop_threshold, keep_scale, seed_tensor
from .torch_state import below_autograd, differentiated_by_func


def seeded_dropout(x: Tensor, p: float, seed: Tensor | int, stream: int = 0) -> Tensor:
    """Dropout of x (..., N) that drops what `layer_norm_fn` drops of x (stream 0) or of x1 (stream 1) with the same seed.

    No mask is stored: backward regenerates it from the seed.

    Args:
        p: in [0, 1).
        seed: an int or a one-element int64 tensor on x's device.
    """
    name = "seeded_dropout"
    kernels = isinstance(x, Tensor) and runs_kernels(x.device) and not differentiated_by_func()
    checks.check_input(name, x, checks.KERNEL_DTYPES if kernels else checks.REFERENCE_DTYPES)
    p = checks.as_dropout_p(name, "p", p)
    checks.check_mask(name, seed, stream, x.device)
    if p == 0.0:
        return x
    rows = x.reshape(-1, x.shape[-1])
    seed = seed_tensor(seed, x.device)
    if kernels:
        return _dropout(rows, seed, p, stream).view(x.shape)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return reference.dropout(rows.to(compute), p, seed, stream)[0].to(x.dtype).view(x.shape)


def dropout_mask(
    seed: Tensor | int, rows: int, cols: int, p: float, stream: int = 0, device: torch.device | str | None = None
) -> Tensor:
    """Bool [rows, cols], True where `layer_norm_fn` with this seed keeps an element of x (stream 0) or of x1 (stream 1).

    Args:
        p: in [0, 1).
        device: where the mask is made; by default the seed's, or the CPU for an int.
    """
    if device is None:
        device = seed.device if isinstance(seed, Tensor) else "cpu"
    device = torch.empty(0, device=device).device  # "cuda" has an index then
    p = checks.as_dropout_p("dropout_mask", "p", p)
    checks.check_mask("dropout_mask", seed, stream, device)
    seed = seed_tensor(seed, device)
    if runs_kernels(device):
        return _dropout_mask(seed, rows, cols, p, stream)
    return reference.keep_mask(seed, rows, cols, p, stream)


def _launch(x: Tensor | None, y: Tensor, seed: Tensor, p: float, stream: int) -> Tensor:
    """y [M, N], contiguous, filled with dropout(x); or, without x, with the mask: True where kept."""
    from .kernels.dropout import Pointers, dropout_kernel  # needs Triton, which a machine without a GPU may lack

    M, N = y.shape
    block_n = min(1024, max(16, 1 << (N - 1).bit_length()))
    rows = 2048 // block_n
    numbers = (M, drop_threshold(p), keep_scale(p), N, stream, rows, block_n)
    start = operators.launches().Launcher(dropout_kernel, Pointers, y.device, num_warps=4)
    start(-(-M // rows) * -(-N // block_n), (x, y), seed, *numbers)
    return y


_dropout = operators.operator(
    "dropout",
    "(Tensor x, Tensor seed, float p, SymInt stream) -> Tensor",
    lambda x, *rest: _launch(x, torch.empty_like(x, memory_format=torch.contiguous_format), *rest),
    lambda x, *rest: x.new_empty(x.shape),
)
_dropout_mask = operators.operator(
    "dropout_mask",
    "(Tensor seed, SymInt rows, SymInt cols, float p, SymInt stream) -> Tensor",
    lambda seed, rows, cols, *rest: _launch(None, seed.new_empty((rows, cols), dtype=torch.bool), seed, *rest),
    lambda seed, rows, cols, *rest: seed.new_empty((rows, cols), dtype=torch.bool),
)


class _Dropout(torch.autograd.Function):
    """Its own backward, since dx = dropout(dy) with the same mask."""

    @staticmethod
    def forward(ctx, x, seed, p, stream):
        ctx.save_for_backward(seed)
        ctx.p, ctx.stream = p, stream
        return below_autograd(_dropout, x, seed, p, stream)

    @staticmethod
    def backward(ctx, dy):
        (seed,) = ctx.saved_tensors
        return _dropout(dy, seed, ctx.p, ctx.stream), None, None, None


operators.register_autograd(_dropout, _dropout, _Dropout.apply)
