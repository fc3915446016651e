"""The records that a call hands from the public functions to the kernels. The operators take them flattened, in this order."""

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    x: Tensor  # (..., N)
    residual: Tensor | None  # shape of x
    x1: Tensor | None  # shape of x
    weight: Tensor | None  # (N,)
    bias: Tensor | None
    weight1: Tensor | None
    bias1: Tensor | None
    rowscale: Tensor | None  # M elements, one for each row of x
    rowscale1: Tensor | None
    seed: Tensor | None  # one int64 element; there where dropout_p > 0


class Options(NamedTuple):
    eps: float
    dropout_p: float
    norm: int  # a value of `reference.Norm`
    zero_centered_weight: bool
    out_dtype: torch.dtype  # of y and y1
    residual_dtype: torch.dtype  # of r
    store_residual: bool
    store_stats: bool
    return_mask: bool


class Outputs(NamedTuple):
    y: Tensor  # shape of x
    r: Tensor | None = None  # shape of x: the residual stream
    y1: Tensor | None = None  # shape of x; there where weight1 or bias1 is
    mask: Tensor | None = None  # bool, shape of x: what was kept of x
    mask1: Tensor | None = None  # and of x1
    stats: Tensor | None = None  # fp32, x's leading shape and 2: rstd and mean (0 where the norm does not centre)


class BackwardInputs(NamedTuple):
    dy: Tensor | None  # shape of r, as are dy1, dr, x and x1
    dy1: Tensor | None
    dr: Tensor | None
    r: Tensor
    x: Tensor | None  # there where drowscale is wanted
    x1: Tensor | None  # there where drowscale1 is
    weight: Tensor | None
    weight1: Tensor | None
    rowscale: Tensor | None
    rowscale1: Tensor | None
    stats: Tensor
    seed: Tensor | None


class BackwardOptions(NamedTuple):
    dropout_p: float
    norm: int
    zero_centered_weight: bool
    dz_dtype: torch.dtype | None  # None: not wanted
    dx_dtype: torch.dtype | None
    dx1_dtype: torch.dtype | None
    wanted: tuple[bool, ...]  # which of dweight, dbias, dweight1, dbias1
    weight_dtype: torch.dtype  # of those


class Gradients(NamedTuple):
    dz: Tensor | None  # shape of r; the gradient of every input that nothing scales
    dx: Tensor | None
    dx1: Tensor | None
    drowscale: Tensor | None  # fp32, x's leading shape
    drowscale1: Tensor | None
    # (N,) if one is wanted, else (wanted, N). One allocation and one kernel for all of them: the price is that the memory of a
    # layer's dweight is free only when its dbias is too.
    weights: Tensor | None


def empty_outputs(inputs: Inputs, options: Options, y: Tensor | None = None, r: Tensor | None = None) -> Outputs:
    """y, r: these instead of empty ones."""
    x = inputs.x
    return Outputs(
        _empty(x, options.out_dtype) if y is None else y,
        _empty(x, options.residual_dtype) if options.store_residual and r is None else r,
        _empty(x, options.out_dtype) if inputs.weight1 is not None or inputs.bias1 is not None else None,
        _empty(x, torch.bool) if options.return_mask else None,
        _empty(x, torch.bool) if options.return_mask and inputs.x1 is not None else None,
        x.new_empty((*x.shape[:-1], 2), dtype=torch.float32) if options.store_stats else None,
    )


def empty_gradients(inputs: BackwardInputs, options: BackwardOptions) -> Gradients:
    r, x, x1 = inputs.r, inputs.x, inputs.x1
    wanted, N = sum(options.wanted), r.shape[-1]
    return Gradients(
        None if options.dz_dtype is None else _empty(r, options.dz_dtype),
        None if options.dx_dtype is None else _empty(r, options.dx_dtype),
        None if options.dx1_dtype is None else _empty(r, options.dx1_dtype),
        None if x is None else x.new_empty(x.shape[:-1], dtype=torch.float32),
        None if x1 is None else x1.new_empty(x1.shape[:-1], dtype=torch.float32),
        r.new_empty(N if wanted == 1 else (wanted, N), dtype=options.weight_dtype) if wanted else None,
    )


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous. Of the ways to allocate, the one that costs the host least (1.4 µs against new_empty's 3.2)."""
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
