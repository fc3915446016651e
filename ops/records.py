"""The records that a call hands from the public functions to the kernels. All code takes their fields by name.

The operators take records flattened, in the order of their fields; `operators` makes the schemas from the annotations.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

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
    passes_residual: bool  # r is x: an alias of it is returned, whose gradient then comes into the same backward


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


class BackwardOptions(NamedTuple):
    forward: Options
    wanted: Gradients  # their dtypes


# The inputs by their shapes: that of x, one element for each row of x, the scalars of a norm; those of WEIGHTS have (N,).
ROWS = ("x", "residual", "x1")
ROWSCALES = ("rowscale", "rowscale1")
SCALARS = ("scalars", "branch_scalars")
OPERANDS = Inputs._fields[:-1]  # all but the seed
WEIGHTS = tuple(name for name in OPERANDS if name not in (*ROWS, *ROWSCALES, *SCALARS))

# The gradients that have the shape of an input, and of which; the others have the shape (N,).
_SHAPED_LIKE = {f"d{name}": name for name in (*ROWS, *ROWSCALES, *SCALARS)} | dict.fromkeys(("dz", "dx", "dx1"), "r")


def dtypes_of(record: Iterable[Tensor | None]) -> tuple[torch.dtype | None, ...]:
    return tuple([None if t is None else t.dtype for t in record])


# ---- of a record, only the tensors that are there are handed on, and the names of their fields ----------------------------


def present(record: Iterable[Tensor | None]) -> list[Tensor]:
    return [t for t in record if t is not None]


def names_of(record: Any) -> list[str]:
    """The fields of a record that are not None."""
    return [name for name, value in zip(record._fields, record, strict=True) if value is not None]


def fill(record: Any, names: Iterable[str], values: Iterable[Any]) -> Any:
    """A record of this class with these fields; the others are None."""
    return record(**dict.fromkeys(record._fields) | dict(zip(names, values, strict=True)))


def picker(names: Sequence[str | None], among: Sequence[str]) -> Callable[[tuple], tuple]:
    """A function of a tuple of what `among` names, with None behind it, that returns what has these names, in this order; None
    where `among` lacks the name."""
    places = [among.index(name) if name in among else len(among) for name in names]
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda values: (values[places[0]],)) if places else (lambda values: ())  # itemgetter of one place gives no tuple


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


def empty_outputs(
    x: Tensor, outputs: Iterable[tuple[torch.dtype, int | None]], rows: int, contiguous: bool = False
) -> list[Tensor]:
    """contiguous: x is known to be, which makes it cheaper."""
    plain = x.dtype if contiguous else None
    return [
        x.new_empty(rows * numbers if numbers else x.shape[:-1], dtype=dtype)
        if numbers is not None
        else torch.empty_like(x)
        if dtype is plain
        else _empty(x, dtype)
        for dtype, numbers in outputs
    ]


def shapes_of(wanted: Gradients, inputs: Sequence[str]) -> list[tuple[int | None, torch.dtype]]:
    """Of each gradient that is wanted, the place of the input with its shape, or None: (N,); and its dtype."""
    places = {name: inputs.index(like) for name, like in _SHAPED_LIKE.items() if like in inputs}
    return [(places.get(name), getattr(wanted, name)) for name in names_of(wanted)]


def empty_gradients(tensors: Sequence[Tensor], shapes: Iterable[tuple[int | None, torch.dtype]], N: int) -> list[Tensor]:
    """shapes: of `shapes_of`, for inputs of which these are there."""
    first = tensors[0]
    return [first.new_empty(N, dtype=dtype) if like is None else _empty(tensors[like], dtype) for like, dtype in shapes]


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous. Of the ways to allocate a tensor of two dimensions, the one that costs the host least."""
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
