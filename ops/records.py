"""The records that a call of the norm hands from the public functions to the kernels. All code takes their fields by name."""

from collections.abc import Collection
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Norm(IntEnum):
    """The kinds of norm. A new one is a member here with all that is asked of it, a formula below and its branches in
    `kernels/norms.py`."""

    statistics: int  # numbers of a row that backward gets: rstd, and the mean if the norm centres; a pointwise norm has none
    scalars: int  # learned numbers that it has beside its weight and bias
    has_bias: bool  # mostly, which is for the choice of a tile

    def __new__(cls, value: int, *facts: Any) -> "Norm":  # one argument in the eyes of who looks a norm up
        norm = int.__new__(cls, value)
        norm._value_ = value
        norm.statistics, norm.scalars, norm.has_bias = facts
        return norm

    layernorm = 0, 2, 0, True
    rmsnorm = 1, 1, 0, False
    dyt = 2, 0, 1, True
    derf = 3, 0, 2, True
    none = 4, 0, 0, False


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
    norm: Norm
    branch: bool  # x goes through a norm, or a weight and a bias, of its own
    branch_norm: Norm
    residual_scale: float
    zero_centered_weight: bool
    out_dtype: torch.dtype  # of y and y1
    residual_dtype: torch.dtype  # of r
    store_residual: bool
    return_mask: bool
    return_statistics: bool
    # Of a forward that has a backward:
    statistics: int = 0  # numbers of each row that are stored: `Norm.statistics`, or 0
    branch_statistics: int = 0
    passes_residual: bool = False  # r is x: an alias of it is returned, whose gradient then comes into the same backward


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
    r: Tensor  # x itself where nothing is added to it; an upstream gradient, for its shape, where nobody reads it
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


class Gradients(NamedTuple):
    """The tensors, or where they are asked for their dtypes; None: not wanted."""

    dz: torch.dtype | None  # shape of r; the gradient of the residual, and of every input that nothing scales
    dx: torch.dtype | None  # shape of r
    dx1: torch.dtype | None
    drowscale: torch.dtype | None  # shape of rowscale
    drowscale1: torch.dtype | None
    dscalars: torch.dtype | None  # shape of scalars
    dbranch_scalars: torch.dtype | None
    dweight: torch.dtype | None  # (N,), as are the others
    dbias: torch.dtype | None
    dweight1: torch.dtype | None
    dbias1: torch.dtype | None
    dbranch_weight: torch.dtype | None
    dbranch_bias: torch.dtype | None


# The inputs by their shapes: that of x, one element for each row of x, the scalars of a norm; those of WEIGHTS have (N,).
ROWS = ("x", "residual", "x1")
ROWSCALES = ("rowscale", "rowscale1")
SCALARS = ("scalars", "branch_scalars")
OPERANDS = Inputs._fields[:-1]  # all but the seed
WEIGHTS = tuple(name for name in OPERANDS if name not in (*ROWS, *ROWSCALES, *SCALARS))

# ---- what the kernels write ------------------------------------------------------------------------------------------------


def outputs_of(inputs: Collection[str], options: Options) -> dict[str, tuple[torch.dtype, int | None]]:
    """Of those that are written, in the order of Outputs, the dtype and how many numbers a row has: None is as many as x, 0 is
    one, in x's leading shape, and more lie flat. inputs: the names of those that there are."""
    y1, masks, fp32 = "weight1" in inputs or "bias1" in inputs, options.return_mask, torch.float32
    asked = {
        "y": (True, options.out_dtype, None),
        "r": (options.store_residual, options.residual_dtype, None),
        "y1": (y1, options.out_dtype, None),
        "mask": (masks, torch.bool, None),
        "mask1": (masks and "x1" in inputs, torch.bool, None),
        "rms": (options.return_statistics, fp32, 0),
        "peak": (options.return_statistics, fp32, 0),
        "stats": (options.statistics, fp32, options.statistics),
        "branch_stats": (options.branch_statistics, fp32, options.branch_statistics),
    }
    return {name: (dtype, numbers) for name, (is_asked, dtype, numbers) in asked.items() if is_asked}
