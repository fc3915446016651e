"""From checked tensors to the kernels of `kernels.cross_entropy`: tile shapes, buffers, launches."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
import triton
from torch import Tensor

from .cross_entropy_reference import MEAN, NONE, LossOptions
from .kernels import INTERPRET
from .kernels import cross_entropy as kernels
from .kernels.cross_entropy import Pointers
from .launch import TRITON_DTYPE, Launcher, device_facts
from .tiling import REGISTERS

GROUP = 4  # blocks
PROGRAMS_PER_SM = 8  # of a kernel that mostly has nothing to do


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


def losses(logits: Tensor, targets: Tensor, options: LossOptions, stats: Tensor | None = None) -> Tensor:
    """fp32 [M], of logits [M, V]; statistics of the rows are written into `stats`, fp32 [M, 2]."""
    return _losses(Pointers(dense(logits), targets=targets, stats=stats), options, streaming_tile)


def one_pass(logits: Tensor, targets: Tensor, options: LossOptions, scale: Tensor | None = None) -> Tensor:
    """The losses, fp32 [M]; logits [M, V] become scale · dloss/dlogits. scale: fp32 [1]; empty or None for 1."""
    return _losses(Pointers(logits, logits, targets, scale=scale), options, loss_tile)


def gradient(
    dloss: Tensor, logits: Tensor, targets: Tensor, stats: Tensor, scale: Tensor, options: LossOptions, out: Tensor
) -> None:
    """out [M, V], which may be the logits: their gradient."""
    M, V = logits.shape
    tile = replace(streaming_tile(V, logits.itemsize), held=0)
    p = Pointers(dense(logits), out, targets, stats=stats, scale=scale, dloss=dloss)
    how, strides = _variant(p, options, tile)
    groups = -(-(V + (how.VECTOR - 1 if how.SHIFTED else 0)) // (tile.group * tile.block))
    numbers = (*strides, *options[1:], dloss.dim() > 0, how)
    _start(kernels.cross_entropy_gradient_kernel, M * groups, p, *numbers, num_warps=tile.warps)


def finish(losses: Tensor, targets: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """The reduced loss, and `scale_of` the targets."""
    scale = scale_of(targets, options)
    return reduced(losses, scale, options), scale


def scale_of(targets: Tensor, options: LossOptions) -> Tensor:
    """fp32 [1]: for the mean, 1 over the number of targets that count; empty for other reductions."""
    if options.reduction != MEAN:
        return targets.new_empty(0, dtype=torch.float32)
    scale, M = targets.new_empty(1, dtype=torch.float32), len(targets)
    block, warps = _line(M)
    pointers = Pointers(targets=targets, scale=scale)
    _start(kernels.count_targets_kernel, 1, pointers, M, options.ignore_index, block, num_warps=warps)
    return scale


def reduced(losses: Tensor, scale: Tensor, options: LossOptions) -> Tensor:
    """[M], or their sum or mean as a scalar, added in a fixed order."""
    if options.reduction == NONE:
        return losses
    total, M = losses.new_empty(()), len(losses)
    block, warps = _line(M)
    _start(kernels.sum_losses_kernel, 1, Pointers(loss=losses, scale=scale, total=total), M, block, num_warps=warps)
    return total


def multiply(rows: Tensor, factor: Tensor) -> None:
    """rows [M, V] *= factor, a scalar on the device; reads nothing where that is 1."""
    M, V = rows.shape
    block = min(4096, triton.next_power_of_2(V))
    blocks = triton.cdiv(V, block)
    programs = blocks * min(M, max(1, PROGRAMS_PER_SM * device_facts(rows.device).multiprocessors // blocks))
    _start(kernels.scale_kernel, programs, Pointers(gradient=rows, dloss=factor), rows.stride(0), M, V, block)


def _losses(p: Pointers, options: LossOptions, tile_of: Callable[[int, int], LossTile]) -> Tensor:
    """What else is written is given."""
    M, V = p.logits.shape
    if INTERPRET:  # which lets the kernel's own check pass, and reads there
        wrong = p.targets[(p.targets != options.ignore_index) & ((p.targets < 0) | (p.targets >= V))]
        if len(wrong):
            raise IndexError(f"Target {wrong[0]} is out of bounds.")
    tile = tile_of(V, p.logits.itemsize)
    p = p._replace(loss=p.logits.new_empty(M, dtype=torch.float32))
    how, strides = _variant(p, options, tile)
    registers = REGISTERS // (32 * tile.warps * max(1, tile.programs_per_sm)) // 8 * 8
    _start(
        kernels.cross_entropy_kernel, M, p, *strides, *options[1:], how,
        num_warps=tile.warps, maxnreg=registers if tile.programs_per_sm and registers < 255 else None,
        **({} if INTERPRET else {"debug": True, "sanitize_overflow": False}),  # for the check of the targets
    )  # fmt: skip
    return p.loss


def _start(kernel: Any, programs: int, p: Pointers, *rest: Any, num_warps: int = 8, **options: Any) -> None:
    if p.scale is not None and p.scale.numel() == 0:
        p = p._replace(scale=None)
    device = next(t.device for t in p if t is not None)
    start = Launcher(kernel, Pointers, device, strided=("logits", "gradient"), num_warps=num_warps, **options)
    start(programs, p, *rest)


def dense(rows: Tensor) -> Tensor:
    """Rows that the kernels can read: without gaps inside."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _variant(p: Pointers, options: LossOptions, tile: LossTile) -> tuple[kernels.RowTile, tuple[int, int]]:
    """What the kernel is compiled for, and the distances between rows of logits and of their gradient, in its unit."""
    logits, out = p.logits, p.gradient
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
        V, tile.block, tile.held, tile.group, pairs, 16 // logits.itemsize, shifted, unit, TRITON_DTYPE[logits.dtype],
        GRADIENT=out is not None, SOFTCAP=options.softcap > 0, SMOOTHING=options.label_smoothing > 0,
    )  # fmt: skip
    return how, (strides[0] // unit, strides[1] // unit)


def _line(M: int) -> tuple[int, int]:
    """Block and warps of the one program that reads M numbers."""
    block = min(16384, max(16, triton.next_power_of_2(M)))
    return block, max(1, block // 512)
