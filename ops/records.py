"""The records that a call hands from the public functions to the kernels. All code takes their fields by name.

The operators take records flattened, in the order of their fields; `operators` makes the schemas from the annotations.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


class Inputs(NamedTuple):
    x: Tensor  # (..., N)
    residual: Tensor | None  # shape of x
    x1: Tensor | None  # shape of x
    weight: Tensor | None  # (N,), as are the other five
    bias: Tensor | None
    weight1: Tensor | None
    bias1: Tensor | None
    branch_weight: Tensor | None  # of the norm of x, as is branch_bias
    branch_bias: Tensor | None
    rowscale: Tensor | None  # M elements, one for each row of x
    rowscale1: Tensor | None
    scalars: Tensor | None  # (`Norm.scalars`,): learned numbers of the norm
    branch_scalars: Tensor | None
    seed: Tensor | None  # one int64 element; there where dropout_p > 0


class Options(NamedTuple):
    eps: float
    dropout_p: float
    norm: int  # a value of `reference.Norm`
    branch: bool  # x goes through a norm, or a weight and a bias, of its own
    branch_norm: int
    residual_scale: float
    zero_centered_weight: bool
    out_dtype: torch.dtype  # of y and y1
    residual_dtype: torch.dtype  # of r
    store_residual: bool
    statistics: int  # numbers of each row that are stored for backward: `Norm.statistics`, or 0
    branch_statistics: int
    return_mask: bool
    return_statistics: bool


class Outputs(NamedTuple):
    y: Tensor  # shape of x
    r: Tensor | None = None  # shape of x: the residual stream
    y1: Tensor | None = None  # shape of x; there where weight1 or bias1 is
    mask: Tensor | None = None  # bool, shape of x: what was kept of x
    mask1: Tensor | None = None  # and of x1
    rms: Tensor | None = None  # fp32, x's leading shape: root mean square of each row of r
    peak: Tensor | None = None  # likewise: largest magnitude
    stats: Tensor | None = None  # fp32, for each row `Norm.statistics` numbers: rstd, and the mean if the norm centres
    branch_stats: Tensor | None = None


class BackwardInputs(NamedTuple):
    """The gradients of the outputs, None where nobody used the output; then what forward left for backward."""

    dy: Tensor | None  # shape of r, as are dy1, dr, x and x1
    dy1: Tensor | None
    dr: Tensor | None
    r: Tensor  # x itself where nothing is added to it; y where nobody reads it
    x: Tensor | None  # there where drowscale may be wanted, or x has a norm of its own
    x1: Tensor | None  # there where drowscale1 may be
    weight: Tensor | None
    weight1: Tensor | None
    branch_weight: Tensor | None
    branch_bias: Tensor | None
    rowscale: Tensor | None
    rowscale1: Tensor | None
    scalars: Tensor | None
    branch_scalars: Tensor | None
    stats: Tensor | None
    branch_stats: Tensor | None
    seed: Tensor | None


class BackwardOptions(NamedTuple):
    dropout_p: float
    norm: int
    branch: bool
    branch_norm: int
    residual_scale: float
    zero_centered_weight: bool
    # Of each of Gradients, in the same order; None: not wanted.
    dz_dtype: torch.dtype | None
    dx_dtype: torch.dtype | None
    dx1_dtype: torch.dtype | None
    drowscale_dtype: torch.dtype | None
    drowscale1_dtype: torch.dtype | None
    dscalars_dtype: torch.dtype | None
    dbranch_scalars_dtype: torch.dtype | None
    dweight_dtype: torch.dtype | None
    dbias_dtype: torch.dtype | None
    dweight1_dtype: torch.dtype | None
    dbias1_dtype: torch.dtype | None
    dbranch_weight_dtype: torch.dtype | None
    dbranch_bias_dtype: torch.dtype | None


class Gradients(NamedTuple):
    """Each has the dtype that BackwardOptions says."""

    dz: Tensor | None  # shape of r; the gradient of the residual, and of every input that nothing scales
    dx: Tensor | None  # shape of r
    dx1: Tensor | None
    drowscale: Tensor | None  # shape of rowscale
    drowscale1: Tensor | None
    dscalars: Tensor | None  # shape of scalars
    dbranch_scalars: Tensor | None
    dweight: Tensor | None  # (N,)
    dbias: Tensor | None
    dweight1: Tensor | None
    dbias1: Tensor | None
    dbranch_weight: Tensor | None
    dbranch_bias: Tensor | None


# The inputs by their shapes: that of x, one element for each row of x, the scalars of a norm; those of WEIGHTS have (N,).
ROWS = ("x", "residual", "x1")
ROWSCALES = ("rowscale", "rowscale1")
SCALARS = ("scalars", "branch_scalars")
OPERANDS = Inputs._fields[:-1]  # all but the seed
WEIGHTS = tuple(name for name in OPERANDS if name not in (*ROWS, *ROWSCALES, *SCALARS))

# The gradients that have the shape of an input, and of which; the others have the shape (N,).
_SHAPED_LIKE = {f"d{name}": name for name in (*ROWS, *ROWSCALES, *SCALARS)} | dict.fromkeys(("dz", "dx", "dx1"), "r")
_LIKE = [None if name not in _SHAPED_LIKE else BackwardInputs._fields.index(_SHAPED_LIKE[name]) for name in Gradients._fields]


def dtypes_of(record: Inputs | BackwardInputs) -> tuple[torch.dtype | None, ...]:
    return tuple([None if t is None else t.dtype for t in record])


def empty_outputs(
    inputs: Inputs, options: Options, rows: int | None = None, y: Tensor | None = None, r: Tensor | None = None
) -> Outputs:
    """rows: of x, worked out if None; y, r: these instead of empty ones."""
    x = inputs.x
    if rows is None:
        rows = x.numel() // x.shape[-1]
    stats, branch_stats = options.statistics, options.branch_statistics
    return Outputs(
        _empty(x, options.out_dtype) if y is None else y,
        _empty(x, options.residual_dtype) if options.store_residual and r is None else r,
        _empty(x, options.out_dtype) if inputs.weight1 is not None or inputs.bias1 is not None else None,
        _empty(x, torch.bool) if options.return_mask else None,
        _empty(x, torch.bool) if options.return_mask and inputs.x1 is not None else None,
        x.new_empty(x.shape[:-1], dtype=torch.float32) if options.return_statistics else None,
        x.new_empty(x.shape[:-1], dtype=torch.float32) if options.return_statistics else None,
        x.new_empty(rows * stats, dtype=torch.float32) if stats else None,
        x.new_empty(rows * branch_stats, dtype=torch.float32) if branch_stats else None,
    )


Wanted = list[tuple[int, int | None, torch.dtype]]


def empty_gradients(inputs: BackwardInputs, wanted: Wanted) -> Gradients:
    r = inputs.r
    gradients: list[Tensor | None] = [None] * len(_LIKE)
    for place, like, dtype in wanted:
        gradients[place] = r.new_empty(r.shape[-1], dtype=dtype) if like is None else _empty(cast(Tensor, inputs[like]), dtype)
    return Gradients._make(gradients)


def wanted_by(options: BackwardOptions) -> Wanted:
    """Of each gradient that is wanted: its place, that of the input with its shape, and its dtype."""
    dtypes = cast(Any, options[-len(_LIKE) :])
    return [(place, like, dtype) for place, (like, dtype) in enumerate(zip(_LIKE, dtypes, strict=True)) if dtype is not None]


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous. Of the ways to allocate a tensor of two dimensions, the one that costs the host least."""
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
