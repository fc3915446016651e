"""Cross-entropy of logits, and of the product that makes them, whose logits are then nobody's but the loss's."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import checks, operators
from . import cross_entropy_reference as reference
from .autograd import first_order
from .checks import KERNEL_DTYPES, REFERENCE_DTYPES
from .cross_entropy_reference import MEAN, NONE, REDUCTIONS, LossOptions
from .kernels import runs_kernels
from .operators import operator, register_autograd
from .torch_state import below_autograd, is_eager, known_to_inductor, transformed_by_func


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
    kernels = isinstance(logits, Tensor) and runs_kernels(logits.device) and not transformed_by_func()
    options = check_options(name, ignore_index, reduction, softcap, z_loss, label_smoothing)
    checks.check_tensor(name, "logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"{name}: logits has shape {tuple(logits.shape)}, expected (..., V) with V ≥ 1")
    checks.check_dtype(name, "logits", logits, KERNEL_DTYPES if kernels else REFERENCE_DTYPES)
    check_targets(name, targets, logits, "logits")
    (in_place,) = checks.as_flags(name, in_place=in_place).values()
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    in_place = in_place and torch.is_grad_enabled() and logits.requires_grad and not torch.compiler.is_compiling()
    if in_place:
        check_overwritable(name, logits, rows)
    if not kernels:
        total, _ = reference.finish(reference.losses(rows, flat, options), flat, options)
    # The factor of the loss isn't known yet for a row's own, and in fp16 p / count is often 0.
    elif in_place and reduction != "none" and logits.dtype != torch.float16 and is_eager((logits, targets)):
        total = _InPlace.apply(rows, flat, options)
    else:
        total = cross_entropy_op(rows, flat, *options)[0]
    return total.view(targets.shape) if options.reduction == NONE else total


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

    The logits live only inside this call, so their gradient always takes their memory, also under torch.compile. Backward
    multiplies the gradients of hidden and weight by its upstream gradient.

    Args:
        hidden: (..., K) in bf16, fp16, fp32, or fp64, in which no kernels but PyTorch's operations compute the loss.
        weight: (V, K). The product runs in autocast's dtype, or else in weight's.
        chunks: the rows are taken in so many parts, so that 1 / chunks of the logits is there at a time.
        reduction: "mean" or "sum".
        The others as for `cross_entropy_fn`.

    Returns:
        A scalar in fp32, or fp64 for fp64 hidden and weight.

    Raises:
        TypeError, ValueError: as `cross_entropy_fn`.
    """
    name = "linear_cross_entropy_fn"
    options = check_options(name, ignore_index, reduction, softcap, z_loss, label_smoothing)
    if options.reduction == NONE:
        raise ValueError(f'{name}: reduction is "none", accepted: mean, sum')
    checks.check_tensor(name, "hidden", hidden)
    checks.check_dtype(name, "hidden", hidden, REFERENCE_DTYPES)
    checks.check_operand(name, "weight", weight, hidden, REFERENCE_DTYPES, "hidden")
    if hidden.dim() == 0 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or 0 in weight.shape:
        shapes = f"hidden has shape {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
        raise ValueError(f"{name}: {shapes}, expected (..., K) and (V, K) with K and V ≥ 1")
    check_targets(name, targets, hidden, "hidden")
    chunks = checks.as_size(name, "chunks", chunks, 1)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if transformed_by_func() or device not in ("cpu", "cuda", "meta"):  # no operator there
        losses = reference.losses(F.linear(rows.to(dtype), weight.to(dtype)), targets, options)
        return reference.finish(losses, targets, options)[0]
    return linear_op(rows, weight, targets, chunks, dtype, False, False, *options)[0]


# ---- checks ------------------------------------------------------------------------------------------------------------------


def check_options(name: str, ignore_index: Any, reduction: Any, softcap: Any, z_loss: Any, label_smoothing: Any) -> LossOptions:
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction is {reduction!r}, accepted: {', '.join(REDUCTIONS)}")
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise ValueError(f"{name}: ignore_index must be an int, got {ignore_index!r}")
    above = "a finite number above 0, or None for none"
    cap = 0.0 if softcap is None else checks.as_number(name, "softcap", softcap, above, lambda c: 0.0 < c < math.inf)
    z_loss = checks.as_number(name, "z_loss", z_loss, "a finite number of 0 or more", lambda z: 0.0 <= z < math.inf)
    label_smoothing = checks.as_number(name, "label_smoothing", label_smoothing, "in [0, 1]", lambda e: 0.0 <= e <= 1.0)
    return LossOptions(REDUCTIONS[reduction], ignore_index, cap, z_loss, label_smoothing)


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

launches = partial(operators.launches, "cross_entropy_launch")
OPTIONS = "int reduction, int ignore_index, float softcap, float z_loss, float label_smoothing"


def _forward(logits: Tensor, targets: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, statistics of the rows and the factor of the mean."""
    launch, shared = launches(), LossOptions(*options)
    stats = logits.new_empty((len(logits), 2), dtype=torch.float32)
    total, scale = launch.finish(launch.losses(logits, targets, shared, stats), targets, shared)
    return total, stats, scale


def _forward_fake(logits: Tensor, targets: Tensor, reduction: int, *_: Any) -> tuple[Tensor, ...]:
    known_to_inductor(cross_entropy_op, cross_entropy_forward, cross_entropy_backward)
    M = logits.shape[0]
    shapes = ((M,) if reduction == NONE else (), (M, 2), (int(reduction == MEAN),))
    return tuple([logits.new_empty(shape, dtype=torch.float32) for shape in shapes])


def _backward(dloss: Tensor, logits: Tensor, targets: Tensor, stats: Tensor, scale: Tensor, *options: Any) -> Tensor:
    gradient = _empty_like(dloss, logits)
    launches().gradient(dloss, logits, targets, stats, scale, LossOptions(*options), gradient)
    return gradient


def _empty_like(_: Tensor, logits: Tensor, *__: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


SCHEMA = f"(Tensor logits, Tensor targets, {OPTIONS}) -> (Tensor, Tensor, Tensor)"
cross_entropy_op = operator("cross_entropy", SCHEMA, _forward, _forward_fake)
cross_entropy_forward = operator("cross_entropy_forward", SCHEMA, _forward, _forward_fake)
cross_entropy_backward = operator(
    "cross_entropy_backward",
    f"(Tensor dloss, Tensor logits, Tensor targets, Tensor stats, Tensor scale, {OPTIONS}) -> Tensor",
    _backward,
    _empty_like,
)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, *options):
        outputs = below_autograd(cross_entropy_forward, logits, targets, *options)
        ctx.save_for_backward(logits, targets, *outputs[1:])
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        ctx.options, ctx.function = options, "cross_entropy_fn"
        return outputs

    @staticmethod
    @first_order
    def backward(ctx, dloss, *_):
        gradient = None if dloss is None else cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.options)
        return gradient, None, *[None] * len(ctx.options)


register_autograd(cross_entropy_op, cross_entropy_forward, _CrossEntropy.apply)


class _InPlace(torch.autograd.Function):
    """The logits [M, V], a view of what is overwritten, become their gradient in forward. A second backward is refused by
    autograd itself, as the version of the logits that forward has saved is gone."""

    @staticmethod
    def forward(ctx, logits, targets, options):
        scale = launches().scale_of(targets, options)
        losses = launches().one_pass(logits, targets, options, scale)
        torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits)
        ctx.function = "cross_entropy_fn"
        return launches().reduced(losses, scale, options)

    @staticmethod
    @first_order
    def backward(ctx, dloss):
        (logits,) = ctx.saved_tensors
        gradient = logits.detach()
        launches().multiply(gradient, dloss)
        torch.autograd.graph.increment_version(logits)
        return gradient, None, None


# ---- the product and its loss ------------------------------------------------------------------------------------------------


def _linear(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int, dtype: torch.dtype, needs_hidden: bool, needs_weight: bool,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss, the factor of the mean, and the gradients of hidden and weight but for that factor, empty where not needed.

    The factor of the sum is 1. Where no target counts either is infinite, and the gradients are zeros.
    The factor comes last because p / count is often 0 in fp16, and because backward has a factor of its own anyway.
    """
    shared = LossOptions(*options)
    functions = launches() if runs_kernels(hidden.device) and dtype != torch.float64 else reference
    _, _, dhidden, dweight = _linear_fake(hidden, weight, targets, chunks, dtype, needs_hidden, needs_weight, *options)
    losses = [dweight.new_empty(0)]
    losses_of = functions.one_pass if needs_hidden or needs_weight else functions.losses  # which leaves dloss/dlogits as logits
    with torch.autocast(hidden.device.type, enabled=False):
        weight = weight.to(dtype)
        size = max(1, -(-len(hidden) // chunks))
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            h = hidden[part].to(dtype)
            logits = F.linear(h, weight)
            losses.append(losses_of(logits, targets[part], shared))
            if needs_hidden:
                dhidden[part] = logits @ weight
            if needs_weight:
                _add_product(dweight, logits, h, first > 0)
        if needs_weight and len(hidden) == 0:
            dweight.zero_()
        total, scale = functions.finish(torch.cat(losses), targets, shared)
        if not scale.numel():
            scale = 1 / (targets != shared.ignore_index).any().to(total.dtype).view(1)
    return total, scale, dhidden, dweight


def _linear_fake(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int, dtype: torch.dtype, needs_hidden: bool, needs_weight: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    known_to_inductor(linear_op, linear_forward)
    wide = torch.promote_types(dtype, torch.float32)  # sums over all rows, in which bf16 would lose the small ones
    return (
        hidden.new_empty((), dtype=wide),
        hidden.new_empty(1, dtype=wide),
        hidden.new_empty(hidden.shape if needs_hidden else (0,)),
        weight.new_empty(weight.shape if needs_weight else (0,), dtype=wide),
    )


def _add_product(dweight: Tensor, dlogits: Tensor, h: Tensor, adds: bool) -> None:
    """dweight = dlogits.T @ h, or += where it adds. Tensor cores sum in fp32 and write that."""
    if dlogits.is_cuda and dlogits.dtype != dweight.dtype:
        if adds:
            torch.ops.aten.addmm.dtype_out(dweight, dlogits.mT, h, dweight.dtype, out=dweight)
        else:
            torch.ops.aten.mm.dtype_out(dlogits.mT, h, dweight.dtype, out=dweight)
    else:
        torch.addmm(dweight, dlogits.mT.to(dweight.dtype), h.to(dweight.dtype), beta=int(adds), out=dweight)


LINEAR = (
    "(Tensor hidden, Tensor weight, Tensor targets, int chunks, ScalarType dtype, bool needs_hidden, bool needs_weight, "
    f"{OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
linear_op = operator("linear_cross_entropy", LINEAR, _linear, _linear_fake)
linear_forward = operator("linear_cross_entropy_forward", LINEAR, _linear, _linear_fake)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, chunks, dtype, _, __, *options):
        needs = hidden.requires_grad, weight.requires_grad
        outputs = below_autograd(linear_forward, hidden, weight, targets, chunks, dtype, *needs, *options)
        ctx.save_for_backward(*outputs[1:])
        ctx.dtypes, ctx.function = (hidden.dtype, weight.dtype), "linear_cross_entropy_fn"
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @first_order
    def backward(ctx, dloss, *_):
        if dloss is None:
            return (None,) * len(ctx.needs_input_grad)
        scale, *products = ctx.saved_tensors
        factor = (dloss * scale).masked_fill(scale.isinf(), 0.0)  # zeros stay zeros, also where 1 / 0 items is upstream
        # In fp32: PyTorch would round the factor, a scalar tensor, to the dtype of a product in bf16.
        gradients = [
            (product.to(factor.dtype) * factor).to(dtype) if needed else None
            for product, dtype, needed in zip(products, ctx.dtypes, ctx.needs_input_grad, strict=False)
        ]
        return *gradients, *[None] * (len(ctx.needs_input_grad) - 2)


register_autograd(linear_op, linear_forward, _LinearCrossEntropy.apply)
