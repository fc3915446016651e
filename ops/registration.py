"""The operators as torch.library knows them: schemas, shapes without data, kernels, autograd.

They take [M, N] tensors that `functional` has checked and choose no defaults. Outputs that were not asked for are empty
tensors, because a schema can't return None. Opaque to torch.compile, so that eager and compiled run the same kernels on
the same arguments and give the same bits.

`norm_forward` and `norm_backward` allocate what they return; `norm_forward_out` writes into buffers, for inference.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

T = TypeVar("T", Tensor, Tensor | None)

# Derived from the package's name, so that a copy of this folder in another tree registers operators of its own.
NAMESPACE = "prenorm_" + __package__.replace(".", "_")
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def operator(kernel: Callable) -> torch._ops.OpOverload:
    """Registers a function as the kernel of an operator of its name, which changes none of its arguments.

    The low-level registration, because a call through torch.library.custom_op costs the host 170 µs more with this many
    arguments (H200 machine, torch 2.11, forward with gradients: 239 µs).
    """
    name = kernel.__name__
    schema = torch.library.infer_schema(kernel, mutates_args=())
    LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def register_autograd(name: str, op: torch._ops.OpOverload, function: type[torch.autograd.Function]) -> None:
    """Routes calls with gradients through `function`, whose forward calls `op` below autograd; the others go straight on."""

    def autograd(*inputs):
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
            return function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    LIBRARY.impl(name, autograd, "Autograd")


@operator
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
    eps: float,
    dropout_p: float,
    zero_centered_weight: bool,
    is_rms_norm: bool,
    out_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    store_residual: bool,
    store_stats: bool,
    return_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, y1, r, stats, mask, mask1. stats: fp32 [1, M] rstd for RMSNorm, [2, M] rstd and mean for LayerNorm."""
    from . import launch  # imports Triton, which a machine without a GPU may lack

    outputs = y, y1, r, stats, mask, mask1 = _forward_outputs(
        x, x1, weight1, bias1, is_rms_norm, out_dtype, residual_dtype, store_residual, store_stats, return_mask
    )
    launch.norm_forward(
        _dense(x), _dense(residual), _dense(x1), _dense(weight), _dense(bias), _dense(weight1), _dense(bias1),
        _dense(rowscale), _dense(rowscale1), seed,
        y, _present(y1), _present(r), _present(stats), _present(mask), _present(mask1),
        eps=eps, dropout_p=dropout_p, zero_centered_weight=zero_centered_weight, is_rms_norm=is_rms_norm,
        residual_dtype=residual_dtype,
    )  # fmt: skip
    return outputs


@torch.library.register_fake(f"{NAMESPACE}::norm_forward", lib=LIBRARY)
def _(
    x, residual, x1, weight, bias, weight1, bias1, rowscale, rowscale1, seed, eps, dropout_p, zero_centered_weight,
    is_rms_norm, out_dtype, residual_dtype, store_residual, store_stats, return_mask,
):  # fmt: skip
    return _forward_outputs(
        x, x1, weight1, bias1, is_rms_norm, out_dtype, residual_dtype, store_residual, store_stats, return_mask
    )


def _forward_outputs(
    x, x1, weight1, bias1, is_rms_norm, out_dtype, residual_dtype, store_residual, store_stats, return_mask
):  # fmt: skip
    shape = x.shape
    y = x.new_empty(shape, dtype=out_dtype)
    y1 = x.new_empty(shape if weight1 is not None or bias1 is not None else 0, dtype=out_dtype)
    r = x.new_empty(shape if store_residual else 0, dtype=residual_dtype)
    stats = x.new_empty((1 if is_rms_norm else 2, shape[0]) if store_stats else 0, dtype=torch.float32)
    mask = x.new_empty(shape if return_mask else 0, dtype=torch.bool)
    mask1 = x.new_empty(shape if return_mask and x1 is not None else 0, dtype=torch.bool)
    return y, y1, r, stats, mask, mask1


@operator
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
    dropout_p: float,
    zero_centered_weight: bool,
    is_rms_norm: bool,
    dz_dtype: torch.dtype | None,
    dx_dtype: torch.dtype | None,
    dx1_dtype: torch.dtype | None,
    wanted: list[bool],
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dz, dx, dx1 in the dtypes given; drowscale and drowscale1, fp32 [M], where x and x1 are given; and the wanted ones of
    dweight, dbias, dweight1, dbias1 as one [sum(wanted), N] tensor."""
    from . import launch

    outputs = dz, dx, dx1, drowscale, drowscale1, weight_gradients = _backward_outputs(
        r, x, x1, dz_dtype, dx_dtype, dx1_dtype, wanted, weight_dtype
    )
    launch.norm_backward(
        _dense(dy), _dense(dy1), _dense(dr), _dense(r), _dense(x), _dense(x1), _dense(weight), _dense(weight1),
        _dense(rowscale), _dense(rowscale1), stats, seed,
        _present(dz), _present(dx), _present(dx1), _present(drowscale), _present(drowscale1), weight_gradients, wanted,
        dropout_p=dropout_p, zero_centered_weight=zero_centered_weight, is_rms_norm=is_rms_norm,
    )  # fmt: skip
    return outputs


@torch.library.register_fake(f"{NAMESPACE}::norm_backward", lib=LIBRARY)
def _(
    dy, dy1, dr, r, x, x1, weight, weight1, rowscale, rowscale1, stats, seed, dropout_p, zero_centered_weight, is_rms_norm,
    dz_dtype, dx_dtype, dx1_dtype, wanted, weight_dtype,
):  # fmt: skip
    return _backward_outputs(r, x, x1, dz_dtype, dx_dtype, dx1_dtype, wanted, weight_dtype)


def _backward_outputs(r, x, x1, dz_dtype, dx_dtype, dx1_dtype, wanted, weight_dtype):
    m, n = r.shape
    dz, dx, dx1 = (
        r.new_empty((m, n) if dtype is not None else 0, dtype=dtype or r.dtype) for dtype in (dz_dtype, dx_dtype, dx1_dtype)
    )
    drowscale = r.new_empty(m if x is not None else 0, dtype=torch.float32)
    drowscale1 = r.new_empty(m if x1 is not None else 0, dtype=torch.float32)
    return dz, dx, dx1, drowscale, drowscale1, r.new_empty((sum(wanted), n), dtype=weight_dtype)


def _setup_context(ctx, inputs, output):
    x, residual, x1, weight, bias, weight1, bias1, rowscale, rowscale1, seed, *how = inputs
    _, dropout_p, zero_centered_weight, is_rms_norm, _, _, store_residual, *_ = how
    _, _, r, stats, mask, mask1 = output
    adds = residual is not None or x1 is not None or dropout_p > 0.0 or rowscale is not None
    # drowscale = Σ dropout(dz) · x is the only gradient that looks at x itself.
    needs_x = rowscale is not None and rowscale.requires_grad
    needs_x1 = rowscale1 is not None and rowscale1.requires_grad
    ctx.save_for_backward(
        r if adds else x, x if needs_x else None, x1 if needs_x1 else None, weight, weight1, rowscale, rowscale1, stats, seed
    )
    ctx.flags = (dropout_p, zero_centered_weight, is_rms_norm)
    inputs_with_gradients = (x, residual, x1, weight, bias, weight1, bias1, rowscale, rowscale1)
    ctx.dtypes = tuple(None if t is None else t.dtype for t in inputs_with_gradients)
    ctx.has_y1, ctx.has_r = weight1 is not None or bias1 is not None, store_residual
    ctx.mark_non_differentiable(stats, mask, mask1)
    # A residual output that nobody used has no gradient: it must not be made up as a tensor of zeros and read.
    ctx.set_materialize_grads(False)


@once_differentiable
def _backward(ctx, dy, dy1, dr, *_):
    r, x, x1, weight, weight1, rowscale, rowscale1, stats, seed = ctx.saved_tensors
    dropout_p, zero_centered_weight, is_rms_norm = ctx.flags
    x_dtype, residual_dtype, x1_dtype, *weight_dtypes, rowscale_dtype, rowscale1_dtype = ctx.dtypes
    needs_x, needs_residual, needs_x1, *needs_weights, needs_rowscale, needs_rowscale1 = ctx.needs_input_grad[:9]
    dy1, dr = dy1 if ctx.has_y1 else None, dr if ctx.has_r else None

    # Inputs that nothing scales share one gradient, dz, if they also share a dtype.
    plain_x = needs_x and dropout_p == 0.0 and rowscale is None
    plain_x1 = needs_x1 and dropout_p == 0.0 and rowscale1 is None
    dz_dtype = residual_dtype if needs_residual else x_dtype if plain_x else x1_dtype if plain_x1 else None
    x_takes_dz = plain_x and x_dtype == dz_dtype
    x1_takes_dz = plain_x1 and x1_dtype == dz_dtype
    upstream = (dy, dy, dy1, dy1)
    wanted = [needs and g is not None for needs, g in zip(needs_weights, upstream, strict=True)]
    wanted_dtypes = {dtype for dtype, want in zip(weight_dtypes, wanted, strict=True) if want}

    dz, dx, dx1, drowscale, drowscale1, weight_gradients = norm_backward(
        dy, dy1, dr, r, x, x1, weight, weight1, rowscale, rowscale1, stats, seed,
        dropout_p, zero_centered_weight, is_rms_norm,
        dz_dtype,
        x_dtype if needs_x and not x_takes_dz else None,
        x1_dtype if needs_x1 and not x1_takes_dz else None,
        wanted,
        wanted_dtypes.pop() if len(wanted_dtypes) == 1 else torch.float32,
    )  # fmt: skip
    rows = iter(weight_gradients.unbind(0))
    return (
        (dz if x_takes_dz else dx) if needs_x else None,
        dz if needs_residual else None,
        (dz if x1_takes_dz else dx1) if needs_x1 else None,
        *(next(rows).to(dtype) if want else None for want, dtype in zip(wanted, weight_dtypes, strict=True)),
        drowscale.to(rowscale_dtype) if needs_rowscale else None,
        drowscale1.to(rowscale1_dtype) if needs_rowscale1 else None,
        *(None,) * 10,
    )


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            output = norm_forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)  # type: ignore[assignment]


register_autograd("norm_forward", norm_forward, _Norm)


# By custom_op, which also tells autograd that the buffers have changed.
@torch.library.custom_op(f"{NAMESPACE}::norm_forward_out", mutates_args=("y", "r"))
def norm_forward_out(
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
    r: Tensor | None,
    eps: float,
    dropout_p: float,
    zero_centered_weight: bool,
    is_rms_norm: bool,
    residual_dtype: torch.dtype,
    return_mask: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As norm_forward without gradients, y and r (which may be the residual itself) filled in place: y1, mask, mask1."""
    from . import launch

    outputs = y1, mask, mask1 = _forward_out_outputs(x, x1, weight1, bias1, y, return_mask)
    launch.norm_forward(
        _dense(x), _dense(residual), _dense(x1), _dense(weight), _dense(bias), _dense(weight1), _dense(bias1),
        _dense(rowscale), _dense(rowscale1), seed,
        y, _present(y1), r, None, _present(mask), _present(mask1),
        eps=eps, dropout_p=dropout_p, zero_centered_weight=zero_centered_weight, is_rms_norm=is_rms_norm,
        residual_dtype=residual_dtype,
    )  # fmt: skip
    return outputs


@norm_forward_out.register_fake
def _(
    x, residual, x1, weight, bias, weight1, bias1, rowscale, rowscale1, seed, y, r, eps, dropout_p, zero_centered_weight,
    is_rms_norm, residual_dtype, return_mask,
):  # fmt: skip
    return _forward_out_outputs(x, x1, weight1, bias1, y, return_mask)


def _forward_out_outputs(x, x1, weight1, bias1, y, return_mask):
    y1 = x.new_empty(x.shape if weight1 is not None or bias1 is not None else 0, dtype=y.dtype)
    mask = x.new_empty(x.shape if return_mask else 0, dtype=torch.bool)
    mask1 = x.new_empty(x.shape if return_mask and x1 is not None else 0, dtype=torch.bool)
    return y1, mask, mask1


@operator
def dropout(x: Tensor, seed: Tensor, p: float, stream: int) -> Tensor:
    """dropout(x) for x [M, N]; its own backward, since dx = dropout(dy) with the same mask."""
    from . import launch

    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch.dropout(_dense(x), y, seed, p, stream)
    return y


@torch.library.register_fake(f"{NAMESPACE}::dropout", lib=LIBRARY)
def _(x, seed, p, stream):
    return x.new_empty(x.shape)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seed, p, stream):
        ctx.save_for_backward(seed)
        ctx.p, ctx.stream = p, stream
        with torch._C._AutoDispatchBelowAutograd():
            return dropout(x, seed, p, stream)

    @staticmethod
    def backward(ctx, dy):
        (seed,) = ctx.saved_tensors
        return dropout(dy, seed, ctx.p, ctx.stream), None, None, None


register_autograd("dropout", dropout, _Dropout)


@operator
def dropout_mask(seed: Tensor, rows: int, cols: int, p: float, stream: int) -> Tensor:
    """Bool [rows, cols], True where kept, on the seed's device."""
    from . import launch

    mask = torch.empty((rows, cols), dtype=torch.bool, device=seed.device)
    launch.dropout(None, mask, seed, p, stream)
    return mask


@torch.library.register_fake(f"{NAMESPACE}::dropout_mask", lib=LIBRARY)
def _(seed, rows, cols, p, stream):
    return seed.new_empty((rows, cols), dtype=torch.bool)


def _dense(t: T) -> T:
    """Rows may lie apart, the elements of a row (or of a weight) may not."""
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


def _present(t: Tensor) -> Tensor | None:
    return t if t.numel() else None
