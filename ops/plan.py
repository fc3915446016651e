"""What follows from a call's shapes, dtypes and options alone: whether it is right, and what is computed and kept.

Derived once for each combination: eager code calls with the same few ones again and again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import (
    KERNEL_DTYPES,
    REFERENCE_DTYPES,
    check_dropout_p,
    check_eps,
    check_flag,
    check_input,
    check_like_input,
    check_out_dtype,
    check_rowscale,
    check_seed,
    check_weight,
)
from .records import Options


class Plan(NamedTuple):
    name: str  # of the public function, for messages
    inference: Options
    training: Options  # the same, and keep what backward needs
    dtypes: tuple[torch.dtype | None, ...]  # of Inputs
    drops: bool
    returns_y1: bool
    r_is_x: bool  # nothing is added to x or changed in it


# Tensors as callers give them: the fields of Inputs, with an int or None where the seed may be one.
Given = tuple[Any, ...]
# The options as callers give them: eps, dropout_p, zero_centered_weight, is_rms_norm, whether the residual is kept (prenorm, or
# a buffer for it), residual_in_fp32, return_dropout_mask, out_dtype. Plain, as a named one costs each call 1 µs.
Request = tuple[Any, ...]

_KNOWN: dict[tuple, Plan] = {}
_MOST_KNOWN = 4096  # a stream of new shapes must not fill memory


def known_plan(given: Given, request: Request, kernels: bool) -> Plan:
    """make_plan, remembered by all that it looks at. `given` are plain tensors or None, but for the seed."""
    *tensors, seed = given
    key = (
        kernels,
        request,
        # 0.5 and Fraction(1, 2) are equal and hash alike; the checks accept one of them.
        type(request[0]),
        type(request[1]),
        (seed.shape, seed.dtype, seed.device) if isinstance(seed, Tensor) else type(seed),
        *[t if t is None else (t.shape, t.dtype, t.device) for t in tensors],
    )
    try:
        plan = _KNOWN.get(key)
    except TypeError:  # something unhashable, of which the checks have more to say
        return make_plan(given, request, kernels)
    if plan is None:
        plan = make_plan(given, request, kernels)
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = plan
    return plan


def make_plan(given: Given, request: Request, kernels: bool) -> Plan:
    """
    Raises:
        ValueError, TypeError: as `layer_norm_fn` documents, for all but the buffers.
    """
    x, residual, x1, weight, bias, weight1, bias1, rowscale, rowscale1, seed = given
    eps, dropout_p, zero_centered_weight, is_rms_norm, keeps_residual, residual_in_fp32, return_mask, out_dtype = request
    check_flag("layer_norm_fn", "is_rms_norm", is_rms_norm)
    name = "rms_norm_fn" if is_rms_norm else "layer_norm_fn"
    dtypes = KERNEL_DTYPES if kernels else REFERENCE_DTYPES
    check_input(name, x, dtypes)
    for argument, t in (("weight", weight), ("bias", bias), ("weight1", weight1), ("bias1", bias1)):
        check_weight(name, argument, t, x, dtypes)
    check_like_input(name, "residual", residual, x, dtypes)
    check_like_input(name, "x1", x1, x, dtypes)
    check_rowscale(name, "rowscale", rowscale, x, dtypes)
    check_rowscale(name, "rowscale1", rowscale1, x, dtypes)
    if rowscale1 is not None and x1 is None:
        raise ValueError(f"{name}: rowscale1 was given without x1, which it scales; pass x1 or leave rowscale1 out")
    check_dropout_p(name, "dropout_p", dropout_p)
    check_eps(name, eps)
    for argument, flag in (
        ("zero_centered_weight", zero_centered_weight),
        ("residual_in_fp32", residual_in_fp32),
        ("return_dropout_mask", return_mask),
    ):
        check_flag(name, argument, flag)
    check_seed(name, seed, x.device)
    check_out_dtype(name, out_dtype, x, dtypes)

    residual_dtype = x.dtype
    if residual is not None:
        residual_dtype = residual.dtype
    elif residual_in_fp32:
        residual_dtype = torch.promote_types(x.dtype, torch.float32)
    drops = dropout_p > 0.0
    adds = residual is not None or x1 is not None or drops or rowscale is not None
    r_is_x = not adds and residual_dtype == x.dtype
    inference = Options(
        float(eps),
        float(dropout_p),
        bool(zero_centered_weight),
        bool(is_rms_norm),
        x.dtype if out_dtype is None else out_dtype,
        residual_dtype,
        store_residual=bool(keeps_residual) and not r_is_x,
        store_stats=False,
        return_mask=bool(return_mask) and drops,
    )
    # Backward normalises r again; where nothing was added it finds the same numbers in x.
    training = inference._replace(store_residual=inference.store_residual or adds, store_stats=True)
    given_dtypes = (*[None if t is None else t.dtype for t in given[:-1]], torch.int64 if drops else None)
    return Plan(name, inference, training, given_dtypes, drops, weight1 is not None or bias1 is not None, r_is_x)
