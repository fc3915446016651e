"""Softmax and log-softmax over the last dimension, with a scale and a mask applied on the way in."""

import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kit
from .checks import REFERENCE_DTYPES, as_number, check_input, check_operand, is_finite

MB = 1024**2


def softmax_fn(x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """exp(z) / Σ exp(z) over the last dimension, z = scale · x + mask, computed in fp32 and rounded once.

    A row that is -inf throughout gives NaN, as PyTorch's softmax does.

    Args:
        x: (..., N) in bf16, fp16 or fp32; elsewhere than on a GPU also fp64. N ≥ 1 of any size.
        scale: a finite number, before the mask is added.
        mask: broadcasts to x's shape and is read as it lies in memory. Boolean: columns where it is False count as -inf, and
            their x gets no gradient. Any floating dtype of x's: added to scale · x; it gets a gradient if it requires one.

    Returns:
        x's shape and dtype.

    Raises:
        TypeError: x or mask is no tensor.
        ValueError: a shape, dtype or device that does not fit, or a scale that is no finite number.
    """
    return _softmax("softmax_fn", x, scale, mask, log=False)


def log_softmax_fn(x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """z - log Σ exp(z) over the last dimension, z = scale · x + mask. Arguments and errors as for `softmax_fn`."""
    return _softmax("log_softmax_fn", x, scale, mask, log=True)


def _softmax(name: str, x: Tensor, scale: float, mask: Tensor | None, log: bool) -> Tensor:
    kernels, _ = check_input(name, x)
    scale = as_number(name, "scale", scale, "a finite number", is_finite)
    if mask is not None:
        check_operand(name, "mask", mask, x, (torch.bool, *REFERENCE_DTYPES))
        if mask.dim() > x.dim() or any(m not in (1, n) for m, n in zip(mask.shape[::-1], x.shape[::-1], strict=False)):
            raise ValueError(
                f"{name}: mask has shape {tuple(mask.shape)}, expected one that broadcasts to x's {tuple(x.shape)}"
            )
    if not kernels:
        return reference(x, scale, mask, log)
    return softmax(Inputs(x, mask), Options(scale, log))[0]


def reference(x: Tensor, scale: float, mask: Tensor | None, log: bool) -> Tensor:
    """The same in PyTorch's own operations, in fp32, or in fp64 for fp64."""
    z = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    if mask is not None:
        z = z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask
    return (torch.log_softmax(z, -1) if log else torch.softmax(z, -1)).to(x.dtype)


# ---- operator ----------------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    x: Tensor
    mask: Tensor | None  # broadcasts to x's shape


class Options(NamedTuple):
    scale: float
    log: bool


class Softmax(kit.Op):
    name, Inputs, Options = "softmax", Inputs, Options
    Backward = namedtuple("Backward", "dy y mask")

    def function(self, given, o):
        return "log_softmax_fn" if o.log else "softmax_fn"

    def start(self, i, o):
        kernels = kit.kernels("softmax")
        launch = _launch(kernels.softmax_kernel, kernels.Pointers, i.x, i.x.itemsize, o, kernels.MaskRows(1, 1, 0, 0, 0))

        def run(i):
            x, mask = i
            y = x.new_empty(x.shape)
            launch(o.scale, x, mask, y)
            return (y,)

        return run

    def start_backward(self, b, o, wanted):
        kernels = kit.kernels("softmax")
        itemsize = max(b.y.itemsize, b.dy.itemsize)
        launch = _launch(kernels.softmax_backward_kernel, kernels.BackwardPointers, b.y, itemsize, o, None)
        hides = b.mask is not None and b.mask.dtype == torch.bool  # an additive mask is in y

        def run(b):
            dy, y, mask = b
            dx = y.new_empty(y.shape)
            if wanted.dmask is None:
                launch(o.scale, y, dy, mask if hides else None, dx)
                return dx, None
            launch(1.0, y, dy, None, dx)
            dmask = dx.float().sum_to_size(mask.shape).to(wanted.dmask)
            return None if wanted.dx is None else dx * o.scale, dmask

        return run


softmax = Softmax()


# ---- launch ------------------------------------------------------------------------------------------------------------------


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
    width = max(16, 1 << (N - 1).bit_length())
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


def _launch(kernel: Any, record: Any, x: Tensor, itemsize: int, o: Options, no_rows: Any) -> Callable[..., None]:
    """For rows like x's, of tensors of which the widest has this itemsize: a function of the scale and the tensors of the
    record. no_rows: what the kernel is told where there is no mask."""
    kernels, N, device, vector = kit.kernels("softmax"), x.shape[-1], x.device, 16 // itemsize
    tile = softmax_tile(N, vector, "dy" in record._fields, kit.device_facts(device).since_sm_90)

    @kit.memoised
    def made(mask_cols: int, *_: Any) -> tuple:
        how = kernels.SoftmaxVariant(
            N, o.log, tile.rows, tile.block_n, vector, LOOPED=tile.looped, MASK_COLS=mask_cols, PREFETCH=tile.distance > 0
        )
        return kit.Launcher(kernel, record, device, strided=("mask",), num_warps=tile.warps), how

    plain = made(1)

    def launch(scale: float, *tensors: Any) -> None:
        *first, mask, out = tensors
        (start, how), rows, M = plain, no_rows, out.numel() // N
        if M == 0:
            return
        if mask is not None:
            mask, numbers, cols = rows_of_mask(mask.expand(out.shape))
            rows = kernels.MaskRows(*numbers)
            # Triton compiles for what it sees of the numbers of a tuple.
            start, how = made(cols, *[(n == 1, n % 16 == 0, -(2**31) <= n < 2**31) for n in numbers])
        start(-(-M // tile.rows), (*first, mask, out), rows, M, scale, tile.distance, how)

    return launch


def rows_of_mask(mask: Tensor) -> tuple[Tensor, tuple[int, ...], int]:
    """The mask, where the kernels find its rows (`MaskRows`), and the distance of its columns. Copied where it broadcasts in
    more than three different ways, or its columns lie apart."""
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
    return mask, (n1, n2, s0, s1, s2), mask.stride(-1)
