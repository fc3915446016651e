"""Launches of the softmax kernels, and their tile shapes."""

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from .kernels import softmax as kernels
from .launch import Launcher, device_facts
from .softmax import empty

MB = 1024**2


@dataclass(frozen=True)
class SoftmaxTile:
    rows: int
    block_n: int  # columns in a block
    warps: int
    looped: bool = False  # a row is read twice, but for its first block
    distance: int = 0  # how many tiles ahead rows are brought into L2; 0: none are


def softmax_tile(N: int, vector: int, backward: bool = False, since_sm_90: bool = True) -> SoftmaxTile:
    """The launch for rows of N columns. vector: columns in 16 bytes of the widest tensor.

    A row has a program; narrow rows share one of four warps, in which a thread holds two vectors. In backward, where it holds
    vectors of two tensors, it is one of each, and two of wider rows. Wide rows are read twice where registers have no room for
    them, and in backward of 16 bits from 24576 columns on, where one program with its row in L2 is faster.
    """
    if (24576 if backward and vector > 4 else 32768) < N:
        warps = 32 if backward else 16  # in backward, one program with its row in L2 beats two (50304 columns: 2.3 ms, 3.4)
        return SoftmaxTile(1, 32 * vector * warps, warps, looped=True)
    shared = 128 * vector if backward else 256 * vector  # columns of a program that has several rows
    width = max(16, triton.next_power_of_2(N))
    rows = max(1, shared // width)
    if shared // 2 < N:
        per_warp = 64 * vector if backward else 128 * vector
        warps = min(32, max(4 if backward else 2, width * rows // per_warp))
    else:
        warps = 4
    block_n = min(width, 32 * vector * max(1, warps // rows))
    # Forward waits for its rows before it has anything else to do; backward has twice as many loads in flight.
    ahead = since_sm_90 and not backward and rows <= 4 and warps < 32
    return SoftmaxTile(rows, block_n, warps, distance=max(1, MB * vector // (16 * rows * N)) if ahead else 0)


def softmax(x: Tensor, mask: Tensor | None, scale: float, log: bool) -> Tensor:
    """mask: broadcasts to x's shape."""
    y = empty(x)
    _start(kernels.softmax_kernel, kernels.Pointers(x, mask, y), kernels.MaskRows(1, 1, 0, 0, 0), scale, x.itemsize, log)
    return y


def softmax_backward(y: Tensor, dy: Tensor, mask: Tensor | None, scale: float, log: bool) -> Tensor:
    """mask: a boolean one, as of `softmax`."""
    dx = empty(y)
    itemsize = max(y.itemsize, dy.itemsize)
    _start(kernels.softmax_backward_kernel, kernels.BackwardPointers(y, dy, mask, dx), None, scale, itemsize, log)
    return dx


def _start(kernel: Any, pointers: Any, mask_rows: kernels.MaskRows | None, scale: float, itemsize: int, log: bool) -> None:
    """mask_rows: what the kernel is told without a mask; itemsize: of the widest tensor of rows."""
    out, mask_cols = pointers[-1], 1
    if pointers.mask is not None and out.numel():
        mask, mask_rows, mask_cols = rows_of_mask(pointers.mask.expand(out.shape))
        pointers = pointers._replace(mask=mask)
    N, vector, backward = out.shape[-1], 16 // itemsize, kernel is kernels.softmax_backward_kernel
    tile = softmax_tile(N, vector, backward, device_facts(out.device).since_sm_90)
    how = kernels.SoftmaxVariant(
        N, log, tile.rows, tile.block_n, vector, LOOPED=tile.looped, MASK_COLS=mask_cols, PREFETCH=tile.distance > 0
    )
    M = out.numel() // N
    start = Launcher(kernel, type(pointers), out.device, strided=("mask",), num_warps=tile.warps)
    start(-(-M // tile.rows), pointers, mask_rows, M, scale, tile.distance, how)


def rows_of_mask(mask: Tensor) -> tuple[Tensor, kernels.MaskRows, int]:
    """The mask, where the kernels find its rows, and the distance of its columns. Copied where it broadcasts in more than three
    different ways, or its columns lie apart."""
    if mask.stride(-1) not in (0, 1):
        mask = mask.contiguous()
    dims: list[tuple[int, int]] = []  # size and stride, neighbours that can be one dimension joined
    for size, stride in zip(mask.shape[:-1], mask.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if len(dims) > 3:
        return rows_of_mask(mask.contiguous())
    (_, s0), (n1, s1), (n2, s2) = [(1, 0)] * (3 - len(dims)) + dims
    return mask, kernels.MaskRows(n1, n2, s0, s1, s2), mask.stride(-1)
