"""What follows from a call's options, dtypes and widths: checked and worked out once, then remembered.

The number of rows is no part of it, so a batch of another length costs what the one before did.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import operators
from .autograd import Training, scales_require_grad, training_of
from .checks import (
    KERNEL_DTYPES,
    REFERENCE_DTYPES,
    check_dropout_p,
    check_eps,
    check_flags,
    check_input,
    check_like_input,
    check_operands,
    check_residual_scale,
    check_weights,
    function_name,
)
from .kernels import runs_kernels
from .records import (
    OPERANDS,
    ROWSCALES,
    SCALARS,
    WEIGHTS,
    Inputs,
    Options,
    Outputs,
    dtypes_of,
    names_of,
    outputs_of,
    picker,
)
from .reference import Norm
from .torch_state import differentiated_by_func, is_plain


class Request(NamedTuple):
    """The options as callers give them."""

    norm: Norm
    branch_norm: Norm
    residual_scale: float
    eps: float
    dropout_p: float
    zero_centered_weight: bool
    keeps_residual: bool  # prenorm, or a buffer for it
    residual_in_fp32: bool
    return_dropout_mask: bool
    return_statistics: bool
    out_dtype: torch.dtype | None


class Plan(NamedTuple):
    name: str  # of the public function, for messages
    kernels: bool  # whether the call goes through the kernels; else through `reference`
    dtypes: tuple[torch.dtype | None, ...]  # of Inputs
    present: Callable[[tuple], tuple]  # of (*operands, seed), those that are there
    run: Callable[
        [tuple], tuple
    ]  # of them, the fields of Outputs in inference; this and `trained` are for eager calls on kernels
    trained: Training | None
    inference: Options
    training: Options  # the same, and keep what backward needs
    drops: bool
    returns_y1: bool
    returns_masks: bool
    returns_statistics: bool
    r_is_x: bool  # nothing is added to x or changed in it
    y_is_r: bool  # there is no norm, and y has the dtype of the stream


MOST = 4096  # plans that are remembered; the one that was not used for longest goes first
_plans: OrderedDict[tuple, Plan] = OrderedDict()


def plan_of(operands: tuple, request: tuple) -> Plan | None:
    """Of a call that nobody watches (`torch_state.is_eager`); None where a tensor is not plain.

    operands, request: `records.OPERANDS` and the fields of Request.

    Raises:
        ValueError, TypeError: as `make_plan`.
    """
    key = _key(operands, request)
    if key is None:
        return None
    try:
        plan = _plans[key]
        _plans.move_to_end(key)
        return plan
    except KeyError:
        plan = make_plan(operands, request)
    except TypeError:  # an option has no hash: the checks have more to say
        return make_plan(operands, request)
    if plan.kernels:
        x, inputs, call = operands[0], Inputs._make((*operands, None)), operators.launches().forward_call
        run, run_training = (call(options, x.shape[-1], x.device, plan.dtypes) for options in (plan.inference, plan.training))
        fields = picker(Outputs._fields, [output.name for output in outputs_of(inputs, plan.inference)])
        plan = plan._replace(
            run=lambda tensors: fields((*run(tensors), None)),
            trained=training_of(run_training, plan.training, plan.dtypes, scales_require_grad(inputs)),
        )
    _plans[key] = plan
    while len(_plans) > MOST:
        _plans.popitem(last=False)
    return plan


def _key(operands: tuple, request: tuple) -> tuple | None:
    """Of what is there, in one pass over the operands, as an eager call pays for each look at a tensor."""
    key: list[Any] = [request, *map(type, request)]  # 1.0 is equal to True, which the checks may accept
    rows = None
    for field, t in enumerate(operands):
        if t is not None:
            if not is_plain(t):
                return None
            shape: Any = t.shape
            if rows is None:  # x
                rows, shape = shape, shape[-1:]
            elif field < _WEIGHTS:
                shape = shape == rows
            elif _ROWSCALES <= field < _SCALARS:
                shape = shape == rows[:-1] or shape == (rows[:-1].numel(),), t.requires_grad
            key += field, t.dtype, t.device, shape
    return tuple(key)


# Where they begin in `records.OPERANDS`.
_WEIGHTS, _ROWSCALES, _SCALARS = (OPERANDS.index(names[0]) for names in (WEIGHTS, ROWSCALES, SCALARS))


def make_plan(given: tuple, wanted: tuple) -> Plan:
    """given, wanted: `records.OPERANDS` and the fields of Request.

    Raises:
        ValueError, TypeError: as `norm_fn` documents, for all but buffers and seed.
    """
    operands, request = Inputs._make((*given, None)), Request(*wanted)
    x, residual, x1, rowscale, rowscale1 = operands.x, operands.residual, operands.x1, operands.rowscale, operands.rowscale1
    name = function_name(request.norm)
    kernels = isinstance(x, Tensor) and runs_kernels(x.device) and not differentiated_by_func()
    dtypes = KERNEL_DTYPES if kernels else REFERENCE_DTYPES
    check_input(name, x, dtypes)
    check_weights(name, x, dtypes, **{field: getattr(operands, field) for field in WEIGHTS})
    check_like_input(name, x, dtypes, residual=residual, x1=x1)
    for field, kind in (("scalars", request.norm), ("branch_scalars", request.branch_norm)):
        scalars, words = (kind.scalars,), f"({kind.scalars},), the learned scalars of {kind.name}"
        check_operands(name, x, dtypes, (scalars,), lambda words=words: words, **{field: getattr(operands, field)})
    if rowscale is not None or rowscale1 is not None:
        rows, flat = x.shape[:-1], (x.shape[:-1].numel(),)
        check_operands(
            name, x, dtypes, (rows, flat), lambda: f"{tuple(rows)} or {flat}, one factor for each row of x {tuple(x.shape)}",
            rowscale=rowscale, rowscale1=rowscale1,
        )  # fmt: skip
    if rowscale1 is not None and x1 is None:
        raise ValueError(f"{name}: rowscale1 was given without x1, which it scales; pass x1 or leave rowscale1 out")
    branch = request.branch_norm != Norm.none or operands.branch_weight is not None or operands.branch_bias is not None
    if branch and x1 is not None:
        raise ValueError(
            f"{name}: x1 was given with a norm of the branch x (branch_norm, branch_weight, branch_bias); leave one out"
        )
    check_residual_scale(name, request.residual_scale)
    check_dropout_p(name, "dropout_p", request.dropout_p)
    check_eps(name, request.eps)
    check_flags(
        name, zero_centered_weight=request.zero_centered_weight, residual_in_fp32=request.residual_in_fp32,
        return_dropout_mask=request.return_dropout_mask, return_statistics=request.return_statistics,
    )  # fmt: skip
    out_dtype = request.out_dtype
    if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype in dtypes):
        raise ValueError(f"{name}: out_dtype is {out_dtype}, accepted on {x.device}: {', '.join(map(str, dtypes))}")

    residual_dtype = x.dtype
    if residual is not None:
        residual_dtype = residual.dtype
    elif request.residual_in_fp32:
        residual_dtype = torch.promote_types(x.dtype, torch.float32)
    drops = request.dropout_p > 0.0
    adds = residual is not None or x1 is not None or drops or rowscale is not None or branch
    r_is_x = not adds and residual_dtype == x.dtype
    inference = Options(
        eps=float(request.eps),
        dropout_p=float(request.dropout_p),
        norm=int(request.norm),
        branch=branch,
        branch_norm=int(request.branch_norm),
        residual_scale=1.0 if residual is None else float(request.residual_scale),
        zero_centered_weight=bool(request.zero_centered_weight),
        out_dtype=x.dtype if out_dtype is None else out_dtype,
        residual_dtype=residual_dtype,
        store_residual=bool(request.keeps_residual) and not r_is_x,
        statistics=0,
        branch_statistics=0,
        return_mask=bool(request.return_dropout_mask) and drops,
        return_statistics=bool(request.return_statistics),
    )
    # Without a norm, y is r, which is written once if it has one dtype, and read by backward for the gradient of a weight only.
    y_is_r = request.norm == Norm.none and operands.weight is None and operands.bias is None and not r_is_x
    reads_r = request.norm != Norm.none or operands.weight is not None or operands.weight1 is not None
    y_is_r = y_is_r and inference.out_dtype == residual_dtype
    if y_is_r:
        inference = inference._replace(store_residual=False)
    # Backward normalises r again; where nothing was added it finds the same numbers in x.
    training = inference._replace(
        store_residual=inference.store_residual or (adds and reads_r),
        statistics=request.norm.statistics,
        branch_statistics=request.branch_norm.statistics,
    )
    return Plan(
        name=name,
        kernels=kernels,
        dtypes=(*dtypes_of(operands)[:-1], torch.int64 if drops else None),
        present=picker([*names_of(operands), *["seed"] * drops], Inputs._fields),
        run=_only_eager,
        trained=None,
        inference=inference,
        training=training,
        drops=drops,
        returns_y1=operands.weight1 is not None or operands.bias1 is not None,
        returns_masks=bool(request.return_dropout_mask),
        returns_statistics=bool(request.return_statistics),
        r_is_x=r_is_x,
        y_is_r=y_is_r,
    )


def _only_eager(tensors: tuple) -> tuple:
    raise AssertionError("only plans of eager calls on kernels start them")


def forget() -> None:
    """Drops all plans; for tests."""
    _plans.clear()
