"""From checked tensors to the kernels of `kernels.cross_entropy`: tile shapes, buffers, launches; PyTorch where none run."""

from contextlib import nullcontext
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernels import INTERPRET
from .kernels import cross_entropy as kernels
from .launch import device_facts

NONE, MEAN, SUM = range(3)  # reductions
REDUCTIONS = {"none": NONE, "mean": MEAN, "sum": SUM}
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class LossOptions(NamedTuple):
    ignore_index: int
    reduction: int
    softcap: float  # 0: none
    z_loss: float
    label_smoothing: float


@dataclass(frozen=True)
class LossTile:
    block: int  # columns
    held: int  # blocks of a row in registers
    group: int  # blocks that are loaded together of what is not held
    warps: int
    programs_per_sm: int = 0  # persistent programs; 0: a program for each row
    prefetch: bool = False  # a persistent program's next row is brought into L2


def loss_tile(V: int, itemsize: int) -> LossTile:
    """The launch that computes loss and gradient of rows of V logits."""
    vector = 16 // itemsize
    warps = min(16, 1 << max(0, (V // (128 * vector)).bit_length() - 1))
    block = 32 * vector * warps
    blocks = -(-V // block)
    most = 13 if itemsize == 2 else 20
    group = 4
    held = blocks if blocks <= most else blocks - -(-(blocks - most) // group) * group
    wide = warps == 16
    return LossTile(block, held, group, warps, programs_per_sm=1 if wide else 0, prefetch=wide)


def streaming_tile(V: int, itemsize: int) -> LossTile:
    """The launch that computes the loss alone, or the gradient from known statistics."""
    vector = 16 // itemsize
    warps = min(8, 1 << max(0, (V // (128 * vector)).bit_length() - 1))
    return LossTile(32 * vector * warps, 0, 4, warps)


def loss(logits: Tensor, targets: Tensor, options: LossOptions, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, statistics (fp32 [M, 2]) and scale (fp32 [1] for the mean) of logits [M, V]; those two are empty unless `keep`."""
    M = logits.shape[0]
    scale = scale_of(targets, options)
    stats = logits.new_empty((M if keep else 0, 2), dtype=torch.float32)
    losses = logits.new_empty(M, dtype=torch.float32)
    tile = streaming_tile(logits.shape[1], logits.itemsize)
    _start(logits, None, targets, losses, stats if keep else None, None, options, tile)
    return reduced(losses, scale, options), stats, scale


def loss_and_gradient(
    logits: Tensor, targets: Tensor, options: LossOptions, scale: Tensor | None, tile: LossTile | None = None
) -> Tensor:
    """The losses [M]; logits [M, V] become scale · dloss/dlogits. scale: fp32 [1], or None for 1."""
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    _start(logits, logits, targets, losses, None, scale, options, tile or loss_tile(logits.shape[1], logits.itemsize))
    return losses


def gradient(
    dloss: Tensor, logits: Tensor, targets: Tensor, stats: Tensor, scale: Tensor, options: LossOptions, out: Tensor
) -> None:
    """out [M, V], which may be the logits: their gradient."""
    M, V = logits.shape
    if M == 0:
        return
    tile = streaming_tile(V, logits.itemsize)
    p = kernels.Pointers(logits, out, targets, None, stats, scale if scale.numel() else None)
    how, stride = _variant(logits, out, options, tile, gradient=True)
    groups = -(-V // (tile.group * tile.block))
    per_row = dloss.dim() > 0
    with on_device(logits.device):
        kernels.cross_entropy_gradient_kernel[(M * groups,)](
            p, dloss.contiguous(), M, stride, *_numbers(options), per_row, how, num_warps=tile.warps
        )


def scale_of(targets: Tensor, options: LossOptions) -> Tensor:
    """fp32 [1]: for the mean, 1 over the number of targets that count; empty for other reductions."""
    if options.reduction != MEAN:
        return targets.new_empty(0, dtype=torch.float32)
    scale = targets.new_empty(1, dtype=torch.float32)
    with on_device(targets.device):
        kernels.count_targets_kernel[(1,)](targets, scale, len(targets), options.ignore_index, _line(len(targets)), num_warps=8)
    return scale


def reduced(losses: Tensor, scale: Tensor, options: LossOptions) -> Tensor:
    """[M], or their sum or mean as a scalar, added in a fixed order."""
    if options.reduction == NONE:
        return losses
    total = losses.new_empty(())
    with on_device(losses.device):
        p_scale = scale if scale.numel() else None
        kernels.sum_losses_kernel[(1,)](losses, p_scale, total, len(losses), _line(len(losses)), num_warps=8)
    return total


def multiply(gradient: Tensor, factor: Tensor) -> None:
    """gradient (contiguous) *= factor, a scalar on the device; reads nothing where that is 1."""
    block = 4096
    with on_device(gradient.device):
        kernels.scale_kernel[(triton.cdiv(gradient.numel(), block),)](gradient, factor, gradient.numel(), block, num_warps=8)


def _start(logits, gradient, targets, losses, stats, scale, options, tile) -> None:
    M = logits.shape[0]
    if M == 0:
        return
    device = logits.device
    facts = device_facts(device)
    how, stride = _variant(
        logits, gradient, options, tile, gradient=gradient is not None, prefetch=tile.prefetch and facts.since_sm_90
    )
    programs = min(M, facts.multiprocessors * tile.programs_per_sm) if tile.programs_per_sm else M
    p = kernels.Pointers(logits, gradient, targets, losses, stats, scale)
    registers = 65536 // (32 * tile.warps * max(1, tile.programs_per_sm))
    with on_device(device):
        kernels.cross_entropy_kernel[(programs,)](
            p, M, stride, *_numbers(options), how,
            num_warps=tile.warps, maxnreg=registers if tile.programs_per_sm and registers < 255 else None,
            **({} if INTERPRET else {"debug": True, "sanitize_overflow": False}),  # for the check of the targets
        )  # fmt: skip


def _variant(logits, out, options, tile, gradient: bool, prefetch: bool = False) -> tuple[kernels.RowTile, int]:
    """What the kernel is compiled for, and the distance between rows in its unit."""
    V, stride = logits.shape[1], logits.stride(0)
    unit = gcd(16, stride)
    places = (logits,) if out is None else (logits, out)
    pairs = logits.itemsize == 2 and V % 2 == 0 and unit % 2 == 0 and all(t.data_ptr() % 4 == 0 for t in places)
    how = kernels.RowTile(
        V, tile.block, tile.held, tile.group, pairs, unit, _DTYPES[logits.dtype], gradient,
        SOFTCAP=options.softcap > 0, SMOOTHING=options.label_smoothing > 0, PREFETCH=prefetch,
    )  # fmt: skip
    return how, stride // unit


def _numbers(options: LossOptions) -> tuple[int, float, float, float]:
    return options.ignore_index, options.softcap, options.z_loss, options.label_smoothing


def _line(M: int) -> int:
    return min(4096, max(16, triton.next_power_of_2(M)))


def on_device(device: torch.device):
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" and device.index != torch.cuda.current_device() else nullcontext()
