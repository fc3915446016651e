"""The gradients. One formula for both ways to the kernels: straight to `direct`, or through the operators."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import direct, registration
from .records import BackwardInputs, BackwardOptions, Inputs, Options, by_name
from .second_order import refuse_second_order


class Norm(torch.autograd.Function):
    """Outputs as functions of Inputs, whose dtypes are `dtypes`."""

    @staticmethod
    def forward(ctx, eager, options, dtypes, *tensors):
        inputs = Inputs(*tensors)
        outputs = direct.norm_forward(inputs, options) if eager else registration.forward_below_autograd(inputs, options)
        x, residual, x1, weight, _, weight1, _, rowscale, rowscale1, seed = inputs
        y, r, y1, mask, mask1, stats = outputs
        adds = residual is not None or x1 is not None or options.dropout_p > 0.0 or rowscale is not None
        # drowscale = Σ dropout(dz) · x is the only gradient that looks at x itself.
        needs_x = rowscale is not None and rowscale.requires_grad
        needs_x1 = rowscale1 is not None and rowscale1.requires_grad
        ctx.save_for_backward(
            r if adds else x, x if needs_x else None, x1 if needs_x1 else None,
            weight, weight1, rowscale, rowscale1, stats, seed,
        )  # fmt: skip
        ctx.options = options
        ctx.dtypes = dtypes
        # A residual output that nobody used has no gradient: it must not be made up as a tensor of zeros and read.
        ctx.set_materialize_grads(False)
        if eager:
            return (y, r) if y1 is None and mask is None else (y, r, y1, mask, mask1)  # each, None too, costs 0.5 µs
        ctx.mark_non_differentiable(*[t for t in (mask, mask1, stats) if t is not None])
        return outputs

    @staticmethod
    def backward(ctx, dy, dr, dy1=None, *_):
        if not torch.is_grad_enabled():
            return _backward(ctx, dy, dr, dy1)
        with torch.no_grad():
            gradients = _backward(ctx, dy, dr, dy1)
        return refuse_second_order("rms_norm_fn" if ctx.options.is_rms_norm else "layer_norm_fn", gradients)


# Function.apply's own Python unwraps functorch's arguments, 5 µs for this many. Where `is_eager`, there are none.
apply_eagerly = super(torch.autograd.Function, Norm).apply


def _backward(ctx, dy, dr, dy1) -> tuple:
    r, x, x1, weight, weight1, rowscale, rowscale1, stats, seed = ctx.saved_tensors
    options = ctx.options
    inputs = BackwardInputs(dy, dy1, dr, r, x, x1, weight, weight1, rowscale, rowscale1, stats, seed)
    eager = direct.is_eager(inputs)
    job = (_known_job if eager else _job)(options, ctx.dtypes, ctx.needs_input_grad, dy is not None, dy1 is not None)
    gradients: tuple = (direct.norm_backward if eager else registration.backward)(inputs, job.options)
    dz, dx, dx1, drowscale, drowscale1, weights = gradients

    dweights: list[Tensor | None] = [None, None, None, None]
    if job.casts:
        rows = (weights,) if len(job.casts) == 1 else weights.unbind(0)
        for row, (i, dtype) in zip(rows, job.casts, strict=True):
            dweights[i] = row if row.dtype == dtype else row.to(dtype)
    return (
        None,
        None,
        None,
        (dz if job.x_takes_dz else dx) if job.needs_x else None,
        dz if job.needs_residual else None,
        (dz if job.x1_takes_dz else dx1) if job.needs_x1 else None,
        *dweights,
        drowscale.to(rowscale.dtype).view(rowscale.shape) if job.needs_rowscale else None,
        drowscale1.to(rowscale1.dtype).view(rowscale1.shape) if job.needs_rowscale1 else None,
        None,
    )


class _Job(NamedTuple):
    """What backward computes, and which input gets which of its results."""

    options: BackwardOptions
    needs_x: bool
    needs_residual: bool
    needs_x1: bool
    needs_rowscale: bool
    needs_rowscale1: bool
    x_takes_dz: bool
    x1_takes_dz: bool
    casts: tuple[tuple[int, torch.dtype], ...]  # of each weight gradient: which of the four, and its weight's dtype


def _job(options: Options, dtypes: tuple, needs: tuple[bool, ...], has_dy: bool, has_dy1: bool) -> _Job:
    """dtypes: of Inputs; needs: as autograd counts the arguments of Norm.forward."""
    given, need = by_name(Inputs, dtypes), by_name(Inputs, needs[3:])
    dropped = options.dropout_p > 0.0
    # Inputs that nothing scales share one gradient, dz, if they also share a dtype.
    plain_x = need.x and not dropped and given.rowscale is None
    plain_x1 = need.x1 and not dropped and given.rowscale1 is None
    dz_dtype = given.residual if need.residual else given.x if plain_x else given.x1 if plain_x1 else None
    x_takes_dz = plain_x and given.x == dz_dtype
    x1_takes_dz = plain_x1 and given.x1 == dz_dtype
    wanted = (need.weight and has_dy, need.bias and has_dy, need.weight1 and has_dy1, need.bias1 and has_dy1)
    weight_dtypes = (given.weight, given.bias, given.weight1, given.bias1)
    casts = tuple((i, weight_dtypes[i]) for i in range(4) if wanted[i])
    shared = {dtype for _, dtype in casts}
    return _Job(
        BackwardOptions(
            options.dropout_p,
            options.zero_centered_weight,
            options.is_rms_norm,
            dz_dtype,
            given.x if need.x and not x_takes_dz else None,
            given.x1 if need.x1 and not x1_takes_dz else None,
            wanted,
            shared.pop() if len(shared) == 1 else torch.float32,
        ),
        need.x, need.residual, need.x1, need.rowscale, need.rowscale1, x_takes_dz, x1_takes_dz, casts,
    )  # fmt: skip


# Apart, because Dynamo, which traces backward for compiled autograd, takes no caches.
_known_job = lru_cache(maxsize=1024)(_job)


def _norm_with_gradients(*flat):
    inputs, options = registration.records(Inputs, Options, flat)
    dtypes = tuple([None if t is None else t.dtype for t in inputs])
    return registration.present(Norm.apply(False, options, dtypes, *inputs))


registration.register_autograd(registration.norm, registration.norm_forward, _norm_with_gradients)


class _Dropout(torch.autograd.Function):
    """Its own backward, since dx = dropout(dy) with the same mask."""

    @staticmethod
    def forward(ctx, x, seed, p, stream):
        ctx.save_for_backward(seed)
        ctx.p, ctx.stream = p, stream
        return registration.below_autograd(registration.dropout, x, seed, p, stream)

    @staticmethod
    def backward(ctx, dy):
        (seed,) = ctx.saved_tensors
        return registration.dropout(dy, seed, ctx.p, ctx.stream), None, None, None


registration.register_autograd(registration.dropout, registration.dropout, _Dropout.apply)
