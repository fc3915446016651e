"""The records that a call hands from the public functions to the kernels.

The operators take tensors flattened, in this order, and options `packed`. Named tuples, because they flatten with a star and
their hash and comparison, which look up launches, run in C.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, get_type_hints

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
    zero_centered_weight: bool
    is_rms_norm: bool
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
    stats: Tensor | None = None  # fp32, x's leading shape and 1, rstd for RMSNorm, or 2, rstd and mean for LayerNorm


class BackwardInputs(NamedTuple):
    dy: Tensor | None  # shape of r, as are dy1, dr, x and x1
    dy1: Tensor | None
    dr: Tensor | None
    r: Tensor
    x: Tensor | None  # there where drowscale is asked for
    x1: Tensor | None  # there where drowscale1 is
    weight: Tensor | None
    weight1: Tensor | None
    rowscale: Tensor | None
    rowscale1: Tensor | None
    stats: Tensor
    seed: Tensor | None


class BackwardOptions(NamedTuple):
    dropout_p: float
    zero_centered_weight: bool
    is_rms_norm: bool
    dz_dtype: torch.dtype | None  # None: not asked for
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
    # (N,) if one is wanted, else (wanted, N). One allocation and one kernel for all of them: the price is that the memory of
    # a layer's dweight is free only when its dbias is too.
    weights: Tensor | None


def by_name(record: type, values: Iterable) -> Any:
    """Something for each tensor of a record (its dtype, its stride, whether it needs a gradient) under the tensor's name."""
    return record(*values)


def packed(options: Options | BackwardOptions) -> tuple:
    """The options as operators take them: each float, then all else as "name=value ...".

    Each argument costs each call time. Floats stay apart because graph capture with dynamic shapes may hold them as symbols,
    which have no text.
    """
    fields = list(zip(options._fields, options, strict=True))
    floats = [value for name, value in fields if name in _FLOATS]
    return *floats, " ".join([f"{name}={_text(value)}" for name, value in fields if name not in _FLOATS])


_FLOATS = ("eps", "dropout_p")


def _text(value: Any) -> str:
    return ",".join([str(v) for v in value]) if isinstance(value, tuple) else str(value)


How = TypeVar("How", Options, BackwardOptions)


@lru_cache(maxsize=1024)
def unpacked(record: type[How], *packed: Any) -> How:
    """The options that were `packed`; remembered, as a model packs the same few again and again."""
    *floats, text = packed
    values = dict(pair.split("=") for pair in text.split(" "))
    types = get_type_hints(record)
    return record(*floats, **{name: _READ[types[name]](value) for name, value in values.items()})


def _flag(text: str) -> bool:
    return text == "True"


def _dtype(text: str) -> torch.dtype | None:
    return None if text == "None" else getattr(torch, text.removeprefix("torch."))


_READ: dict[Any, Callable[[str], Any]] = {
    bool: _flag,
    tuple[bool, ...]: lambda text: tuple(map(_flag, text.split(","))),
    torch.dtype: _dtype,
    torch.dtype | None: _dtype,
}
