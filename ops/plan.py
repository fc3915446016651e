"""What follows from a call's options, dtypes and widths: checked and worked out once, then remembered.

The number of rows is no part of it, so a batch of another length costs what the one before did.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import checks, operators
from .autograd import Training
from .checks import KERNEL_DTYPES, LAST_OF_X, REFERENCE_DTYPES, SHAPE_OF_X, check_operands, function_name
from .kernels import runs_kernels
from .records import OPERANDS, ROWSCALES, SCALARS, WEIGHTS, Inputs, Options, Outputs, dtypes_of, names_of, outputs_of, picker
from .reference import Norm
from .torch_state import PLAIN, differentiated_by_func

MOST = 4096  # plans that are remembered; the one that was not used for longest goes first
_plans: OrderedDict[tuple, "Plan"] = OrderedDict()
# Where they begin in `records.OPERANDS`.
_WEIGHTS, _ROWSCALES, _SCALARS = (OPERANDS.index(names[0]) for names in (WEIGHTS, ROWSCALES, SCALARS))
_STRIDED = torch.strided


def plan_of(operands: tuple, request: tuple) -> "Plan | None":
    """Of a call that nobody watches (`torch_state.is_eager`); None where a tensor is not plain.

    operands, request: `records.OPERANDS`, and the other arguments of Plan.

    Raises:
        ValueError, TypeError: as Plan.
    """
    key = _key(operands, request)
    if key is None:
        return None
    try:
        plan = _plans[key]
        _plans.move_to_end(key)
        return plan
    except KeyError:
        plan = Plan(operands, *request)
    except TypeError:  # an option has no hash: the checks have more to say
        return Plan(operands, *request)
    if plan.kernels:
        plan.prepare(operands)
    _plans[key] = plan
    while len(_plans) > MOST:
        _plans.popitem(last=False)
    return plan


def forget_plans() -> None:
    """After `kernels.INTERPRET` changed."""
    _plans.clear()


def _key(operands: tuple, request: tuple) -> tuple | None:
    """Of what is there, in one pass over the operands, as an eager call pays for each look at a tensor."""
    # A plain number is hashed faster than a Norm. Types, because 1.0 is equal to True, which the checks may accept.
    key: list[Any] = [+request[0], +request[1], *request[2:], *map(type, request)]
    rows = None
    for field, t in enumerate(operands):
        if t is not None:
            if type(t) not in PLAIN or t.layout is not _STRIDED or t.is_neg():  # `is_plain`, without a call
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


class Plan:
    # Of eager calls on kernels, see `prepare`.
    present: Callable[[tuple], tuple]  # of the fields of Inputs, those that are there
    call: Callable[[Options], Callable]  # `launch.forward_call` of other options
    run: Callable[[tuple], tuple]  # of the inputs that are there, the fields of Outputs, without what backward needs
    trained: Training

    def __init__(
        self, given: tuple, norm: Norm, branch_norm: Norm, residual_scale: float, eps: float, dropout_p: float,
        zero_centered_weight: bool, prenorm: bool, has_residual_out: bool, residual_in_fp32: bool, return_dropout_mask: bool,
        return_statistics: bool, out_dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        """given: `records.OPERANDS`; the others as of `norm_fn`.

        Raises:
            ValueError, TypeError: as `norm_fn` documents, for all but buffers and seed.
        """
        operands = Inputs._make((*given, None))
        x, residual, x1, rowscale, rowscale1 = operands.x, operands.residual, operands.x1, operands.rowscale, operands.rowscale1
        self.name = name = function_name(norm)  # of the public function, for messages
        # Whether the call goes through the kernels; else through `reference`.
        self.kernels = isinstance(x, Tensor) and runs_kernels(x.device) and not differentiated_by_func()
        dtypes = KERNEL_DTYPES if self.kernels else REFERENCE_DTYPES
        checks.check_input(name, x, dtypes)
        check_operands(name, x, dtypes, (x.shape[-1:],), LAST_OF_X, **{field: getattr(operands, field) for field in WEIGHTS})
        check_operands(name, x, dtypes, (x.shape,), SHAPE_OF_X, residual=residual, x1=x1)
        for field, kind in (("scalars", norm), ("branch_scalars", branch_norm)):
            why = f", the learned scalars of {kind.name}"
            check_operands(name, x, dtypes, ((kind.scalars,),), why, **{field: getattr(operands, field)})
        if rowscale is not None or rowscale1 is not None:
            rows, why = x.shape[:-1], ", one factor for each row of x {x}"
            check_operands(name, x, dtypes, (rows, (rows.numel(),)), why, rowscale=rowscale, rowscale1=rowscale1)
        if rowscale1 is not None and x1 is None:
            raise ValueError(f"{name}: rowscale1 was given without x1, which it scales; pass x1 or leave rowscale1 out")
        branch = branch_norm != Norm.none or operands.branch_weight is not None or operands.branch_bias is not None
        if branch and x1 is not None:
            raise ValueError(
                f"{name}: x1 was given with a norm of the branch x (branch_norm, branch_weight, branch_bias); leave one out"
            )
        residual_scale = checks.as_number(name, "residual_scale", residual_scale, "a finite number", math.isfinite)
        dropout_p = checks.as_dropout_p(name, "dropout_p", dropout_p)
        eps = checks.as_eps(name, eps)
        flags = checks.as_flags(
            name, prenorm=prenorm, zero_centered_weight=zero_centered_weight, residual_in_fp32=residual_in_fp32,
            return_dropout_mask=return_dropout_mask, return_statistics=return_statistics,
        )  # fmt: skip
        self.prenorm, zero_centered_weight, residual_in_fp32, self.returns_masks, self.returns_statistics = flags.values()
        if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype in dtypes):
            raise ValueError(f"{name}: out_dtype is {out_dtype}, accepted on {x.device}: {', '.join(map(str, dtypes))}")
        out_dtype = x.dtype if out_dtype is None else out_dtype

        residual_dtype = x.dtype
        if residual is not None:
            residual_dtype = residual.dtype
        elif residual_in_fp32:
            residual_dtype = torch.promote_types(x.dtype, torch.float32)
        self.drops = drops = dropout_p > 0.0
        adds = residual is not None or x1 is not None or drops or rowscale is not None or branch
        # Nothing is added to x or changed in it.
        self.r_is_x = not adds and residual_dtype == x.dtype
        # Without a norm, y is r, which is written once if it has one dtype, and read by backward for the gradient of a weight
        # only.
        without_norm = norm == Norm.none and operands.weight is None and operands.bias is None
        self.y_is_r = without_norm and not self.r_is_x and out_dtype == residual_dtype
        self.returns_y1 = operands.weight1 is not None or operands.bias1 is not None
        self.returns_more = self.returns_y1 or self.returns_masks or self.returns_statistics  # than y and r
        self.inference = Options(
            eps=eps,
            dropout_p=dropout_p,
            norm=int(norm),
            branch=branch,
            branch_norm=int(branch_norm),
            residual_scale=1.0 if residual is None else residual_scale,
            zero_centered_weight=zero_centered_weight,
            out_dtype=out_dtype,
            residual_dtype=residual_dtype,
            store_residual=(self.prenorm or has_residual_out) and not self.r_is_x and not self.y_is_r,
            statistics=0,
            branch_statistics=0,
            return_mask=self.returns_masks and drops,
            return_statistics=self.returns_statistics,
            passes_residual=False,
        )
        # Backward normalises r again; where nothing was added it finds the same numbers in x.
        reads_r = norm != Norm.none or operands.weight is not None or operands.weight1 is not None
        self.training = self.inference._replace(
            store_residual=self.inference.store_residual or (adds and reads_r),
            passes_residual=(self.prenorm or has_residual_out) and self.r_is_x and reads_r,
        )
        self.names = [*names_of(operands), *["seed"] * drops]  # of the inputs that are there

    def prepare(self, operands: tuple) -> None:
        """For eager calls on kernels with such operands."""
        x, names = operands[0], self.names
        self.present = picker(names, Inputs._fields)
        learned = [
            name for name, t in zip(OPERANDS, operands, strict=True) if name in ROWSCALES and name in names and t.requires_grad
        ]
        dtypes = Inputs._make((*dtypes_of(operands), torch.int64 if self.drops else None))

        def call(options: Options) -> Callable:
            return operators.launches().forward_call(options, x.shape[-1], x.device, dtypes)

        self.call, run = call, call(self.inference)
        fields = picker(Outputs._fields, [*outputs_of(names, self.inference)])
        self.run = lambda tensors: fields((*run(tensors), None))
        self.trained = Training(call, self.training, dtypes, learned)
