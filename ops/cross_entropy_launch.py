"""From checked tensors to the kernels of `kernels.cross_entropy`: tile shapes, buffers, launches; PyTorch where none run."""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cross_entropy_reference import MEAN, NONE, LossOptions
from .kernels import INTERPRET
from .kernels import cross_entropy as kernels

GROUP = 4  # blocks
REGISTERS = 65536  # of a multiprocessor
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class LossTile:
    block: int  # columns
    held: int  # blocks of a row in registers
    group: int  # blocks that are loaded together of what is not held
    warps: int
    programs_per_sm: int = 0  # that registers are to suffice for; 0: as many as they do


# Bytes of a row: warps, and programs on a multiprocessor. The second reading of a row comes from L2, as long as all rows in
# work fit there (132 x 2 x 100 KB, or 132 x 250 KB, of an H100's 50 MB). It is free then: 50304 columns in bf16 take 1.03 times
# as long as a copy of them.
_BY_SIZE = {2048: (1, 0), 12 * 1024: (4, 0), 48 * 1024: (8, 4), 112 * 1024: (16, 2), math.inf: (32, 1)}


def loss_tile(V: int, itemsize: int) -> LossTile:
    """The launch that computes loss and gradient of rows of V logits."""
    vector = 16 // itemsize
    warps, programs = next(tile for size, tile in _BY_SIZE.items() if V * itemsize <= size)
    block = 32 * vector * warps
    held = held_blocks(V, vector, block)
    if warps == 32 and held == 1:  # such a row may not fit L2, and registers have room for more of it
        held += GROUP
    return LossTile(block, held, GROUP, warps, programs)


def streaming_tile(V: int, itemsize: int) -> LossTile:
    """The launch that computes the loss alone, or the gradient from known statistics."""
    vector = 16 // itemsize
    warps = min(8, 1 << max(0, (V // (128 * vector)).bit_length() - 1))
    block = 32 * vector * warps
    return LossTile(block, held_blocks(V, vector, block), GROUP, warps)


def held_blocks(V: int, vector: int, block: int) -> int:
    """What remains of a row behind the whole groups that lie inside it, which then need no masks; a group if nothing does."""
    columns = V if V % vector == 0 else V + vector - 1  # rows that begin anywhere are read from a vector's begin on
    group = GROUP * block
    if group > V:
        return GROUP if 32 * vector == block else 1  # rows so short are read from L1 again, but by a single warp
    return -(-(columns - max(0, V // group - (V % group == 0)) * group) // block)


def loss(logits: Tensor, targets: Tensor, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits [M, V]: the reduced loss, statistics of the rows (fp32 [M, 2]), and `scale_of` the targets."""
    logits = dense(logits)
    stats = logits.new_empty((logits.shape[0], 2), dtype=torch.float32)
    losses = _start(logits, None, targets, stats, None, options, streaming_tile(logits.shape[1], logits.itemsize))
    scale = scale_of(targets, options)
    return reduced(losses, scale, options), stats, scale


def losses_alone(logits: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    """fp32 [M]."""
    return _start(logits, None, targets, None, None, options, streaming_tile(logits.shape[1], logits.itemsize))


def finish(losses: Tensor, targets: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """The reduced loss, and `scale_of` the targets."""
    scale = scale_of(targets, options)
    return reduced(losses, scale, options), scale


def loss_and_gradient(logits: Tensor, targets: Tensor, options: LossOptions, scale: Tensor | None = None) -> Tensor:
    """The losses, fp32 [M]; logits [M, V] become scale · dloss/dlogits. scale: fp32 [1]; empty or None for 1."""
    scale = None if scale is None or scale.numel() == 0 else scale
    return _start(logits, logits, targets, None, scale, options, loss_tile(logits.shape[1], logits.itemsize))


def gradient(
    dloss: Tensor, logits: Tensor, targets: Tensor, stats: Tensor, scale: Tensor, options: LossOptions, out: Tensor
) -> None:
    """out [M, V], which may be the logits: their gradient."""
    M, V = logits.shape
    if M == 0:
        return
    logits = dense(logits)
    tile = replace(streaming_tile(V, logits.itemsize), held=0)
    p = kernels.Pointers(logits, out, targets, None, stats, scale if scale.numel() else None)
    how, strides = _variant(logits, out, options, tile, gradient=True)
    groups = -(-(V + (how.VECTOR - 1 if how.SHIFTED else 0)) // (tile.group * tile.block))
    per_row = dloss.dim() > 0
    with on_device(logits.device):
        kernels.cross_entropy_gradient_kernel[(M * groups,)](
            p, dloss.contiguous(), *strides, *_numbers(options), per_row, how, num_warps=tile.warps
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


def multiply(rows: Tensor, factor: Tensor) -> None:
    """rows [M, V] *= factor, a scalar on the device; reads nothing where that is 1."""
    M, V = rows.shape
    if M == 0:
        return
    block = min(4096, triton.next_power_of_2(V))
    with on_device(rows.device):
        kernels.scale_kernel[(M * triton.cdiv(V, block),)](rows, factor, rows.stride(0), V, block, num_warps=8)


def _start(logits, gradient, targets, stats, scale, options, tile) -> Tensor:
    """The losses; what else is written is given."""
    M, device = logits.shape[0], logits.device
    losses = logits.new_empty(M, dtype=torch.float32)
    if M == 0:
        return losses
    if device.type == "cpu":
        check_range(targets, logits.shape[1], options)
    how, strides = _variant(logits, gradient, options, tile, gradient is not None)
    p = kernels.Pointers(logits, gradient, targets, losses, stats, scale)
    registers = REGISTERS // (32 * tile.warps * max(1, tile.programs_per_sm)) // 8 * 8
    with on_device(device):
        kernels.cross_entropy_kernel[(M,)](
            p, *strides, *_numbers(options), how,
            num_warps=tile.warps, maxnreg=registers if tile.programs_per_sm and registers < 255 else None,
            **({} if INTERPRET else {"debug": True, "sanitize_overflow": False}),  # for the check of the targets
        )  # fmt: skip
    return losses


def check_range(targets: Tensor, V: int, options: LossOptions) -> None:
    """What a kernel asserts on a GPU. Raises IndexError."""
    wrong = targets[(targets != options.ignore_index) & ((targets < 0) | (targets >= V))]
    if wrong.numel():
        raise IndexError(
            f"cross_entropy_fn: target {int(wrong[0])} is out of range, expected a column in [0, {V}) or ignore_index, "
            f"{options.ignore_index}"
        )


def dense(rows: Tensor) -> Tensor:
    """Rows that the kernels can read: without gaps inside."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _variant(logits, out, options, tile, gradient: bool) -> tuple[kernels.RowTile, tuple[int, int]]:
    """What the kernel is compiled for, and the distances between rows of logits and of out, in its unit."""
    V = logits.shape[1]
    strides = logits.stride(0), 0 if out is None else out.stride(0)
    unit = gcd(16, *strides)
    places = (logits,) if out is None else (logits, out)
    # Rows that begin anywhere are read from the 16-byte boundary before them, where that is the same in both tensors.
    shifted = bool((V | strides[0]) * logits.itemsize % 16) and (out is None or strides[0] == strides[1])
    shifted = shifted and all(t.data_ptr() % 16 == 0 for t in places)
    even = V % 2 == 0 and unit % 2 == 0 and all(t.data_ptr() % 4 == 0 for t in places)
    pairs = logits.itemsize == 2 and (even or shifted)
    how = kernels.RowTile(
        V, tile.block, tile.held, tile.group, pairs, 16 // logits.itemsize, shifted, unit, _DTYPES[logits.dtype], gradient,
        SOFTCAP=options.softcap > 0, SMOOTHING=options.label_smoothing > 0,
    )  # fmt: skip
    return how, (strides[0] // unit, strides[1] // unit)


def _numbers(options: LossOptions) -> tuple[int, float, float, float]:
    return options.ignore_index, options.softcap, options.z_loss, options.label_smoothing


def _line(M: int) -> int:
    return min(4096, max(16, triton.next_power_of_2(M)))


def on_device(device: torch.device):
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" and device.index != torch.cuda.current_device() else nullcontext()
