"""From tensors to a launch: picks the tile, sets the flags, starts the kernels. Tensors are [M, N] with unit last stride."""

from contextlib import nullcontext
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dropout_kernels import dropout_kernel
from .kernels import finish_weight_gradients_kernel, norm_backward_kernel, norm_forward_kernel
from .philox import drop_threshold, keep_scale
from .tiling import backward_tile, forward_tile

_TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    x1: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    rowscale: Tensor | None,
    rowscale1: Tensor | None,
    seed: Tensor | None,
    y: Tensor,
    y1: Tensor | None,
    r: Tensor | None,
    stats: Tensor | None,
    mask: Tensor | None,
    mask1: Tensor | None,
    *,
    eps: float,
    dropout_p: float,
    zero_centered_weight: bool,
    is_rms_norm: bool,
    residual_dtype: torch.dtype,
) -> None:
    """Fills y and those of y1, r, stats, mask and mask1 that are there."""
    M, N = x.shape
    if M == 0:
        return
    tile = forward_tile(N, residual is not None)
    with _on(x.device):
        norm_forward_kernel[(triton.cdiv(M, tile.rows),)](
            x, x1, residual, rowscale, rowscale1, weight, bias, weight1, bias1, seed,
            y, y1, r, stats, mask, mask1,
            M, N, x.stride(0), _stride(x1), _stride(residual), y.stride(0), _stride(y1), _stride(r),
            eps, drop_threshold(dropout_p), keep_scale(dropout_p),
            ROWS=tile.rows, BLOCK_N=tile.block_n, LOOPED=tile.block_n < N, EVEN_N=tile.block_n == N,
            RESIDUAL_DTYPE=_TRITON_DTYPE[residual_dtype], IS_RMS=is_rms_norm, DROPOUT=dropout_p > 0.0,
            ZERO_CENTERED=zero_centered_weight, num_warps=tile.warps,
        )  # fmt: skip


def norm_backward(
    dy: Tensor | None,
    dy1: Tensor | None,
    dr: Tensor | None,
    r: Tensor,
    x: Tensor | None,
    x1: Tensor | None,
    weight: Tensor | None,
    weight1: Tensor | None,
    rowscale: Tensor | None,
    rowscale1: Tensor | None,
    stats: Tensor,
    seed: Tensor | None,
    dz: Tensor | None,
    dx: Tensor | None,
    dx1: Tensor | None,
    drowscale: Tensor | None,
    drowscale1: Tensor | None,
    weight_gradients: Tensor,
    wanted: list[bool],
    *,
    dropout_p: float,
    zero_centered_weight: bool,
    is_rms_norm: bool,
) -> None:
    """Fills those of dz, dx, dx1, drowscale and drowscale1 that are there, and weight_gradients [sum(wanted), N].

    wanted: which of dweight, dbias, dweight1, dbias1 to compute, in that order.
    """
    M, N = r.shape
    if M == 0:
        weight_gradients.zero_()
        return
    tile = backward_tile(N, dr is not None)
    tiles = triton.cdiv(M, tile.rows)
    programs = min(tiles, _multiprocessors(r.device) * tile.programs_per_sm)
    count = weight_gradients.shape[0]
    partial = torch.empty((programs, count, N), dtype=torch.float32, device=r.device)
    slots = iter(range(count))
    dweight, dbias, dweight1, dbias1 = (partial[:, next(slots)] if want else None for want in wanted)
    with _on(r.device):
        norm_backward_kernel[(programs,)](
            dy, dy1, dr, r, x, x1, weight, weight1, rowscale, rowscale1, stats, seed,
            dz, dx, dx1, drowscale, drowscale1, dweight, dbias, dweight1, dbias1,
            M, N, tiles, _stride(dy), _stride(dy1), _stride(dr), r.stride(0), _stride(x), _stride(x1), count * N,
            drop_threshold(dropout_p), keep_scale(dropout_p),
            ROWS=tile.rows, BLOCK_N=tile.block_n, LOOPED=tile.block_n < N, EVEN_N=tile.block_n == N, STAGES=tile.stages,
            IS_RMS=is_rms_norm, DROPOUT=dropout_p > 0.0, ZERO_CENTERED=zero_centered_weight, num_warps=tile.warps,
        )  # fmt: skip
        if count:
            finish_weight_gradients_kernel[(triton.cdiv(count * N, 32),)](
                partial, weight_gradients, programs, count * N, BLOCK_P=32, BLOCK_N=32, num_warps=4
            )


def dropout(x: Tensor | None, y: Tensor, seed: Tensor, p: float, stream: int) -> None:
    """y [M, N] = dropout(x), or the mask of what is kept where there is no x."""
    M, N = y.shape
    if M == 0:
        return
    block_n = min(1024, max(16, triton.next_power_of_2(N)))
    rows = max(1, 2048 // block_n)
    with _on(y.device):
        dropout_kernel[(triton.cdiv(M, rows) * triton.cdiv(N, block_n),)](
            x, y, seed, M, N, _stride(x), drop_threshold(p), keep_scale(p),
            STREAM=stream, ROWS=rows, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip


def _stride(t: Tensor | None) -> int:
    return 0 if t is None else t.stride(0)


def _on(device: torch.device):
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    """Cached: asking the driver costs more than a launch. The interpreter gets two, so that partial sums are really summed."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
