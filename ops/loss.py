"""Cross-entropy of logits, and of the product that makes them, whose logits are then nobody's but the loss's."""

import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import checks, kit
from .checks import REFERENCE_DTYPES
from .kernels import INTERPRET
from .tiling import REGISTERS
from .torch_state import is_eager, product_dtype


class Reduction(IntEnum):
    none = 0
    mean = 1
    sum = 2


_REDUCTIONS = {kind.name: kind for kind in Reduction}  # Dynamo of PyTorch 2.11 doesn't look into an Enum


class Options(NamedTuple):
    reduction: Reduction
    ignore_index: int
    softcap: float  # 0: none
    z_loss: float
    label_smoothing: float
    in_place: bool = False  # forward overwrites the logits with their gradient; of eager calls alone
    # Of the product and its loss:
    chunks: int = 1
    dtype: torch.dtype = torch.float32  # of the product
    needs_hidden: bool = False
    needs_weight: bool = False


def cross_entropy_fn(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    in_place: bool = False,
) -> Tensor:
    """-log softmax(x)[target] in nats, x = logits or softcap · tanh(logits / softcap); computed in fp32.

    The formulas stand in `kernels.cross_entropy`. The loss agrees with `F.cross_entropy` of fp32 logits; a row that is -inf
    throughout gives NaN, and the mean over no targets too.

    With in_place=True this call overwrites the logits with their gradient, so that each logit is read once: in eager mode on
    kernels, for the mean and the sum of bf16 or fp32 logits that need a gradient. Their version counter says so: whoever has
    saved the logits for a backward pass of his own gets PyTorch's error, and so does a second backward through this call.
    Whoever reads their values afterwards reads the gradient. Elsewhere (torch.compile, the reference, no gradients, fp16,
    reduction="none") nothing is overwritten.

    Args:
        logits: (..., V) in bf16, fp16 or fp32; elsewhere than on a GPU also fp64.
        targets: (...) int64 or int32: columns, or ignore_index where a row doesn't count. Another number raises IndexError on
            the CPU; on a GPU it stops the kernel with an assertion, after which the process must end, as with PyTorch.
        reduction: "mean" over the rows that count, "sum" or "none". No choice waits for the device.
        softcap: Gemma 2's cap of logits, above 0; None: none.
        z_loss: times log(Σ exp x)² is added to the loss of a row (PaLM, arXiv:2204.02311).
        label_smoothing: in [0, 1], as for `F.cross_entropy`.

    Returns:
        A scalar, or (...) for "none"; fp32, or fp64 for fp64 logits.

    Raises:
        TypeError: logits or targets are no tensors, or in_place is neither true nor false.
        ValueError: a shape, dtype, device or option that doesn't fit; in_place=True and logits that are a leaf which requires
            a gradient, or whose rows don't lie apart at one distance, each without gaps.
    """
    name = "cross_entropy_fn"
    options = check_options(name, ignore_index, reduction, softcap, z_loss, label_smoothing)
    checks.check_tensor(name, "logits", logits)
    kernels, dtypes = checks.kernels_for(logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"{name}: logits has shape {tuple(logits.shape)}, expected (..., V) with V ≥ 1")
    checks.check_dtype(name, "logits", logits, dtypes)
    check_targets(name, targets, logits, "logits")
    (in_place,) = checks.as_flags(name, in_place=in_place).values()
    rows, flat = checks.as_rows(logits), targets.flatten()
    in_place = in_place and torch.is_grad_enabled() and logits.requires_grad and not torch.compiler.is_compiling()
    if in_place:
        check_overwritable(name, logits, rows)
    if not kernels:
        total = plain_finish(plain_losses(rows, flat, options), flat, options)
    else:
        # The factor of the loss isn't known yet for a row's own, and in fp16 p / count is often 0.
        late = options.reduction == Reduction.none or logits.dtype == torch.float16
        if in_place and not late and is_eager((logits, targets)):
            options = options._replace(in_place=True)
        total = cross_entropy(Inputs(rows, flat), options)[0]
    return total.view(targets.shape) if options.reduction == Reduction.none else total


def linear_cross_entropy_fn(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunks: int = 1,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """cross_entropy_fn(hidden @ weight.T, targets), with the gradients of hidden and weight computed at once.

    On kernels the logits live only inside this call, so their gradient takes their memory, also under torch.compile. Backward
    multiplies the gradients of hidden and weight by its upstream gradient.

    Args:
        hidden: (..., K) in bf16, fp16, fp32, or fp64, in which no kernels but PyTorch's operations compute the loss.
        weight: (V, K). The product runs in autocast's dtype, or else in weight's.
        chunks: kernels get the rows in so many parts, so that 1 / chunks of the logits is there at a time.
        reduction: "mean" or "sum".
        The others as for `cross_entropy_fn`.

    Returns:
        A scalar in fp32, or fp64 for fp64 hidden and weight.

    Raises:
        TypeError, ValueError: as `cross_entropy_fn`.
    """
    name = "linear_cross_entropy_fn"
    options = check_options(name, ignore_index, reduction, softcap, z_loss, label_smoothing)
    if options.reduction == Reduction.none:
        raise ValueError(f'{name}: reduction is "none", accepted: mean, sum')
    checks.check_tensor(name, "hidden", hidden)
    checks.check_dtype(name, "hidden", hidden, REFERENCE_DTYPES)
    checks.check_operand(name, "weight", weight, hidden, REFERENCE_DTYPES, "hidden")
    if hidden.dim() == 0 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or 0 in weight.shape:
        shapes = f"hidden has shape {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
        raise ValueError(f"{name}: {shapes}, expected (..., K) and (V, K) with K and V ≥ 1")
    check_targets(name, targets, hidden, "hidden")
    chunks = checks.as_size(name, "chunks", chunks, 1)
    dtype = product_dtype(weight)
    kernels = checks.kernels_for(hidden)[0] and dtype != torch.float64
    rows, targets = checks.as_rows(hidden), targets.flatten()
    if not kernels:
        return plain_finish(plain_losses(F.linear(rows.to(dtype), weight.to(dtype)), targets, options), targets, options)
    return linear_cross_entropy(LinearInputs(rows, weight, targets), options._replace(chunks=chunks, dtype=dtype))[0]


# ---- checks ------------------------------------------------------------------------------------------------------------------


def check_options(name: str, ignore_index: Any, reduction: Any, softcap: Any, z_loss: Any, label_smoothing: Any) -> Options:
    reduction = checks.as_choice(name, "reduction", reduction, _REDUCTIONS)
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise ValueError(f"{name}: ignore_index must be an int, got {ignore_index!r}")
    above = "a finite number above 0, or None for none"
    cap = 0.0 if softcap is None else checks.as_number(name, "softcap", softcap, above, lambda c: 0.0 < c < math.inf)
    z_loss = checks.as_number(name, "z_loss", z_loss, "a finite number of 0 or more", lambda z: 0.0 <= z < math.inf)
    label_smoothing = checks.as_number(name, "label_smoothing", label_smoothing, "in [0, 1]", lambda e: 0.0 <= e <= 1.0)
    return Options(reduction, ignore_index, cap, z_loss, label_smoothing)


def check_targets(name: str, targets: Any, like: Tensor, of: str) -> None:
    """One for each row of `like`, which is called `of`."""
    checks.check_operand(name, "targets", targets, like, (torch.int64, torch.int32), of)
    shape = like.shape[:-1]
    if targets.shape != shape:
        raise ValueError(f"{name}: targets has shape {tuple(targets.shape)}, expected {tuple(shape)}, a row of {of} for each")


def check_overwritable(name: str, logits: Tensor, rows: Tensor) -> None:
    """rows [M, V] have to be a view of the logits."""
    if logits.is_leaf:
        raise ValueError(f"{name}: in_place=True would overwrite logits, a leaf that requires a gradient; leave in_place out")
    if rows.numel() and (rows.data_ptr() != logits.data_ptr() or rows.stride(1) != 1 or rows.stride(0) < rows.shape[1]):
        raise ValueError(
            f"{name}: in_place=True needs logits whose rows lie at one distance, without gaps inside; got strides "
            f"{logits.stride()} for shape {tuple(logits.shape)}. Leave in_place out, or pass logits.contiguous()"
        )


# ---- operators ---------------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    logits: Tensor  # [M, V]
    targets: Tensor  # [M]


class Outputs(NamedTuple):
    total: Tensor  # [M], or their sum or mean as a scalar
    stats: Tensor | None  # fp32 [M, 2], of the rows, for backward
    scale: Tensor | None  # fp32 [1]: for the mean, 1 over the number of targets that count


class CrossEntropy(kit.Op):
    name, Inputs, Options, Outputs = "cross_entropy", Inputs, Options, Outputs
    Backward = namedtuple("Backward", "dtotal stats scale logits targets")  # in place, the logits are their gradient

    def width(self, tensors):
        return tensors[-2].shape[1]  # of the logits, before the targets

    def written(self, given, o):
        return ["total", *["stats"] * (not o.in_place), *["scale"] * (o.reduction == Reduction.mean and not o.in_place)]

    def asked(self, given, o):
        return ["total"]

    def outputs(self, i, o):
        total = i.targets.shape if o.reduction == Reduction.none else ()
        shapes = {"total": total, "stats": (i.logits.shape[0], 2), "scale": (1,)}
        written = {name: i.logits.new_empty(shapes[name], dtype=torch.float32) for name in self.written((), o)}
        return kit.fill(Outputs, written, written.values())

    def start(self, i, o):
        losses = losses_of(i.logits.shape[1], i.logits.dtype, i.logits.device, o, o.in_place)

        def run(i):
            logits, targets = i
            scale = scale_of(targets, o)
            if o.in_place:
                total = reduced(losses(logits, targets, scale=scale), scale, o)
                torch.autograd.graph.increment_version(logits)
                return total, None, None
            stats = logits.new_empty((len(logits), 2), dtype=torch.float32)
            return reduced(losses(logits, targets, stats), scale, o), stats, scale

        return run

    def start_backward(self, b, o, wanted):
        """In place the logits [M, V] are a view of what forward has overwritten. Autograd itself refuses a second backward, as
        their version that forward has saved is gone."""
        kernels, V, dtype = kit.kernels("cross_entropy"), b.logits.shape[1], b.logits.dtype
        tile = replace(streaming_tile(V, dtype.itemsize), held=0)
        per_row, group = o.reduction == Reduction.none, tile.group * tile.block
        launch = _on_rows(kernels.cross_entropy_gradient_kernel, V, dtype, b.logits.device, o, tile, True, per_row)

        def run(b):
            dtotal, stats, scale, logits, targets = b
            if o.in_place:
                logits = logits.detach()
                multiply(logits, dtotal)
                torch.autograd.graph.increment_version(logits)
                return logits, None
            out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
            p = kernels.Pointers(dense(logits), out, targets, stats=stats, scale=scale, dloss=dtotal)
            launch(p, lambda columns: -(-columns // group))
            return out, None

        return run


cross_entropy = CrossEntropy()


class LinearInputs(NamedTuple):
    hidden: Tensor  # [M, K]
    weight: Tensor  # [V, K]
    targets: Tensor  # [M]


class LinearOutputs(NamedTuple):
    """The products are the gradients of hidden and weight but for two factors: `scale`, and what comes upstream.

    The scale comes last because p / count is often 0 in fp16, and because backward has a factor of its own anyway. That of the
    sum is 1. Where no target counts either is infinite, and the products are zeros."""

    total: Tensor
    scale: Tensor  # [1]
    hidden_product: Tensor | None
    weight_product: Tensor | None


class LinearCrossEntropy(kit.Op):
    name, Inputs, Options, Outputs = "linear_cross_entropy", LinearInputs, Options, LinearOutputs
    Backward = namedtuple("Backward", "dtotal scale hidden_product weight_product")

    def width(self, tensors):
        return None if len(tensors) > 3 else len(tensors[1])  # the weight, of Inputs

    def written(self, given, o):
        return ["total", "scale", *["hidden_product"] * o.needs_hidden, *["weight_product"] * o.needs_weight]

    def asked(self, given, o):
        return ["total"]

    def training(self, of, o, needs):
        return o._replace(needs_hidden=needs[0], needs_weight=needs[1])

    def outputs(self, i, o):
        fp32 = torch.float32  # of sums over all rows, in which bf16 would lose the small ones
        return LinearOutputs(
            i.hidden.new_empty((), dtype=fp32),
            i.hidden.new_empty(1, dtype=fp32),
            i.hidden.new_empty(i.hidden.shape) if o.needs_hidden else None,
            i.weight.new_empty(i.weight.shape, dtype=fp32) if o.needs_weight else None,
        )

    def gradients(self, b, o, wanted):
        products = zip(b[2:], wanted[:2], strict=True)
        return self.Gradients(*[None if dtype is None else torch.empty_like(t, dtype=dtype) for t, dtype in products], None)

    def start(self, i, o):
        losses = losses_of(len(i.weight), o.dtype, i.hidden.device, o, o.needs_hidden or o.needs_weight)

        def run(i):
            hidden, weight, targets = i = LinearInputs(*i)
            _, _, dhidden, dweight = self.outputs(i, o)
            found = []
            with torch.autocast(hidden.device.type, enabled=False):
                weight = weight.to(o.dtype)
                size = max(1, -(-len(hidden) // o.chunks))
                for first in range(0, max(1, len(hidden)), size):
                    part = slice(first, first + size)
                    h = hidden[part].to(o.dtype)
                    logits = F.linear(h, weight)
                    found.append(losses(logits, targets[part]))  # which may leave dloss/dlogits as logits
                    if dhidden is not None:
                        dhidden[part] = logits @ weight
                    if dweight is not None:
                        _add_product(dweight, logits, h, first > 0)
            scale = scale_of(targets, o)
            total = reduced(torch.cat(found), scale, o)
            if scale is None:
                scale = 1 / (targets != o.ignore_index).any().to(total.dtype).view(1)
            return total, scale, dhidden, dweight

        return run

    def start_backward(self, b, o, wanted):
        def run(b):
            dtotal, scale, *products = b
            factor = (dtotal * scale).masked_fill(scale.isinf(), 0.0)  # zeros stay zeros, also where 1 / 0 items is upstream
            found = self.gradients(b, o, wanted)
            for product, gradient in zip(products, found, strict=False):
                if gradient is not None:
                    torch.mul(product, factor, out=gradient)  # in the factor's fp32, rounded once
            return found

        return run


linear_cross_entropy = LinearCrossEntropy()


def _add_product(dweight: Tensor, dlogits: Tensor, h: Tensor, adds: bool) -> None:
    """dweight = dlogits.T @ h, or += where it adds. Tensor cores sum in fp32 and write that."""
    if dlogits.is_cuda and dlogits.dtype != dweight.dtype:
        if adds:
            torch.ops.aten.addmm.dtype_out(dweight, dlogits.mT, h, dweight.dtype, out=dweight)
        else:
            torch.ops.aten.mm.dtype_out(dlogits.mT, h, dweight.dtype, out=dweight)
    else:
        torch.addmm(dweight, dlogits.mT.to(dweight.dtype), h.to(dweight.dtype), beta=int(adds), out=dweight)


# ---- launches ----------------------------------------------------------------------------------------------------------------

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


def losses_of(V: int, dtype: torch.dtype, device: torch.device, o: Options, overwrites: bool) -> Callable[..., Tensor]:
    """The losses, fp32 [M], of logits [M, V] and targets. overwrites: the logits become scale · dloss/dlogits."""
    kernels, tile = kit.kernels("cross_entropy"), (loss_tile if overwrites else streaming_tile)(V, dtype.itemsize)
    registers = REGISTERS // (32 * tile.warps * max(1, tile.programs_per_sm)) // 8 * 8
    launch = _on_rows(
        kernels.cross_entropy_kernel, V, dtype, device, o, tile, overwrites,
        maxnreg=registers if tile.programs_per_sm and registers < 255 else None,
        **({} if INTERPRET else {"debug": True, "sanitize_overflow": False}),  # for the check of the targets
    )  # fmt: skip

    def losses(logits: Tensor, targets: Tensor, stats: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """stats: fp32 [M, 2] for statistics of the rows; scale: fp32 [1], None for 1."""
        if INTERPRET:  # which lets the kernel's own check pass, and reads there
            wrong = targets[(targets != o.ignore_index) & ((targets < 0) | (targets >= V))]
            if len(wrong):
                raise IndexError(f"Target {wrong[0]} is out of bounds.")
        loss = logits.new_empty(len(logits), dtype=torch.float32)
        logits = dense(logits)
        launch(kernels.Pointers(logits, logits if overwrites else None, targets, loss, stats, scale))
        return loss

    return losses


def _on_rows(
    kernel: Any, V: int, dtype: torch.dtype, device: torch.device, o: Options, tile: LossTile, writes: bool, *more: Any,
    **options: Any,
) -> Callable[..., None]:  # fmt: skip
    """Starts a kernel on rows of logits, given Pointers, and how many programs there are for the columns of a row. What is
    compiled for strides and alignment is worked out once for each."""
    kernels, itemsize = kit.kernels("cross_entropy"), dtype.itemsize

    @kit.memoised
    def made(strides: tuple[int, int], unit: int, shifted: bool, pairs: bool) -> tuple:
        how = kernels.RowTile(
            V, tile.block, tile.held, tile.group, pairs, 16 // itemsize, shifted, unit, kit.triton_dtype(dtype),
            GRADIENT=writes, SOFTCAP=o.softcap > 0, SMOOTHING=o.label_smoothing > 0,
        )  # fmt: skip
        rest = (strides[0] // unit, strides[1] // unit, *o[1:5], *more, how)
        return kit.Launcher(kernel, kernels.Pointers, device, _ROWS, num_warps=tile.warps, **options), rest

    def launch(p: Any, programs: Callable[[int], int] = lambda columns: 1) -> None:
        logits, out = p.logits, p.gradient
        strides = logits.stride(0), 0 if out is None else out.stride(0)
        unit = gcd(16, *strides)
        at = logits.data_ptr() | (0 if out is None else out.data_ptr())
        # Rows that begin anywhere are read from the 16-byte boundary before them, where that is the same in both tensors.
        shifted = bool((V | strides[0]) * itemsize % 16) and (out is None or strides[0] == strides[1]) and at % 16 == 0
        pairs = itemsize == 2 and ((V % 2 == 0 and unit % 2 == 0 and at % 4 == 0) or shifted)
        start, numbers = made(strides, unit, shifted, pairs)
        start(len(logits) * programs(V + (16 // itemsize - 1) * shifted), p, *numbers)

    return launch


def dense(rows: Tensor) -> Tensor:
    """Rows that the kernels can read: without gaps inside."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def scale_of(targets: Tensor, o: Options) -> Tensor | None:
    """fp32 [1]: for the mean, 1 over the number of targets that count."""
    if o.reduction != Reduction.mean:
        return None
    scale, M = targets.new_empty(1, dtype=torch.float32), len(targets)
    block = _line(M)
    compiled = (o.ignore_index, block)
    _start("count_targets_kernel", 1, block // 512, (M, *compiled), compiled, targets=targets, scale=scale)
    return scale


def reduced(losses: Tensor, scale: Tensor | None, o: Options) -> Tensor:
    """[M], or their sum or mean as a scalar, added in a fixed order."""
    if o.reduction == Reduction.none:
        return losses
    total, M = losses.new_empty(()), len(losses)
    block = _line(M)
    _start("sum_losses_kernel", 1, block // 512, (M, block), (block,), loss=losses, scale=scale, total=total)
    return total


def multiply(rows: Tensor, factor: Tensor) -> None:
    """rows [M, V] *= factor, a scalar on the device; reads nothing where that is 1."""
    (M, V), stride = rows.shape, rows.stride(0)
    block = min(4096, 1 << (V - 1).bit_length())
    blocks = -(-V // block)
    programs = blocks * min(M, max(1, PROGRAMS_PER_SM * kit.device_facts(rows.device).multiprocessors // blocks))
    _start("scale_kernel", programs, 8, (stride, M, V, block), (stride, V), gradient=rows, dloss=factor)


def _line(M: int) -> int:
    """The block of the one program that reads M numbers."""
    return min(16384, max(16, 1 << (M - 1).bit_length() if M else 1))


_ROWS = ("logits", "gradient")  # of Pointers, whose strides the kernels are told


def _start(kernel: str, programs: int, warps: int, numbers: tuple, compiled: tuple, **pointers: Tensor | None) -> None:
    """compiled: those of the kernel's numbers that it is compiled for."""
    p = kit.kernels("cross_entropy").Pointers(**pointers)
    device = next(t.device for t in pointers.values() if t is not None)
    _launcher(kernel, device, kit.dtypes_of(p), max(1, warps), *compiled)(programs, p, *numbers)


@kit.memoised
def _launcher(kernel: str, device: torch.device, dtypes: tuple, warps: int, *compiled: Any) -> kit.Launcher:
    kernels = kit.kernels("cross_entropy")
    return kit.Launcher(getattr(kernels, kernel), kernels.Pointers, device, _ROWS, num_warps=warps)


# ---- reference ---------------------------------------------------------------------------------------------------------------
# The formulas of `kernels.cross_entropy` in PyTorch's own operations, in fp32, or in fp64 for fp64 logits; differentiable.


def plain_losses(logits: Tensor, targets: Tensor, o: Options) -> Tensor:
    """[M], of logits [M, V]; 0 where the target is ignored."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = o.softcap * torch.tanh(x / o.softcap) if o.softcap else x
    found = F.cross_entropy(x, targets.long(), ignore_index=o.ignore_index, reduction="none", label_smoothing=o.label_smoothing)
    if o.z_loss:
        found = found + (o.z_loss * torch.logsumexp(x, -1).square()).masked_fill(targets == o.ignore_index, 0.0)
    return found


def plain_finish(losses: Tensor, targets: Tensor, o: Options) -> Tensor:
    """[M], their sum, or their mean over the targets that count."""
    if o.reduction != Reduction.mean:
        return losses if o.reduction == Reduction.none else losses.sum()
    return losses.sum() / (targets != o.ignore_index).sum()
