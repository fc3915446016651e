"""Dropout → add → norm: the public functions, what follows from a call's options, gradients, launches.

`layer_norm_fn` and `rms_norm_fn` have the interface of FlashAttention's Triton functions, argument for argument.
"""

from collections.abc import Callable, Iterable
from operator import index, itemgetter
from typing import Any

import torch
from torch import Tensor

from . import checks, kit, reference
from .checks import LAST_OF_X, SHAPE_OF_X, check_operands, function_name
from .kit import names_of
from .philox import draw_seed, drop_threshold, keep_scale, seed_tensor
from .records import OPERANDS, ROWSCALES, SCALARS, WEIGHTS, BackwardInputs, Gradients, Inputs, Options, Outputs, outputs_of
from .reference import Norm
from .tiling import Tile, Work, backward_tile, forward_tile, most_registers
from .torch_state import PLAIN, is_eager

_LAYERNORM, _RMSNORM, _NONE = Norm.layernorm, Norm.rmsnorm, Norm.none  # an eager call pays for each look into an Enum


def norm_fn(
    norm: Norm | str,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    *,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    rowscale1: Tensor | None = None,
    scalars: Tensor | None = None,
    branch_norm: Norm | str | None = None,
    branch_weight: Tensor | None = None,
    branch_bias: Tensor | None = None,
    branch_scalars: Tensor | None = None,
    residual_scale: float = 1.0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    return_statistics: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    seed: Tensor | int | None = None,
) -> Tensor | tuple[Tensor | None, ...]:
    """Dropout → add → norm in one kernel.

        z = dropout(B(x) · rowscale[:, None]) + dropout(x1 · rowscale1[:, None]) + residual_scale · residual       in fp32
        r = z rounded to the residual dtype                                                     the new residual stream
        x̂ = (r − mean(r)) · rstd(r)  layernorm      r · rstd(r)  rmsnorm      r  none
            tanh(α · r)              dyt            erf(α · r + s)  derf
        y = x̂ · (weight + offset) + bias,   y1 = x̂ · (weight1 + offset) + bias1

    B is x itself or, with branch_norm, branch_weight or branch_bias, a norm of x with parameters of its own: the sandwich of
    Gemma 2 and 3 (r = r + N₁(f(N₂ r))), and with norm="none" that of OLMo 2 (r = r + N₁(f(r))). A branch_weight alone is
    LayerScale (arXiv:2103.17239).

    Args:
        norm: "layernorm" (Ba et al. 2016, biased variance), "rmsnorm" (Zhang & Sennrich 2019), "dyt" (Dynamic Tanh,
            arXiv:2503.10622), "derf" (arXiv:2512.10938) or "none".
        x: (..., N), bf16, fp16 or fp32 in any mix with the others; fp64 too where the PyTorch reference runs.
        weight, bias: (N,); None is 1 and 0.
        residual: shape of x; the residual stream so far, in its own dtype.
        x1: shape of x; a second branch added to the stream (parallel attention and MLP).
        weight1, bias1: (N,); a second affine map of the same x̂. The output y1 is there when either is given.
        eps: added to the variance or the mean square, of the branch too.
        dropout_p: in [0, 1), on x and on x1 with independent masks.
        rowscale, rowscale1: one factor for each row, x's leading shape or flat (M,); for stochastic depth.
        scalars: (1,), α of "dyt", or (2,), α and s of "derf"; None is 1 and 0. The other norms have none.
        branch_norm: like norm, of x alone and before the add; its rows are normalised as they are read, in fp32.
        branch_weight, branch_bias, branch_scalars: of that norm. With x1 there is no branch norm.
        residual_scale: a constant factor of the residual (DeepNorm, arXiv:2203.00555).
        prenorm: also return r.
        residual_in_fp32: keep r in fp32 where no residual says otherwise; else r has x's dtype.
        zero_centered_weight: offset is 1 instead of 0, for weight, weight1 and branch_weight.
        return_dropout_mask: also return the bool masks of what was kept, x's and x1's (None without x1).
        return_statistics: also return, of each row of r, the root mean square and the largest magnitude: fp32, x's leading
            shape, without a gradient. The kernel has the row in registers, so nothing is read for them.
        out_dtype: of y and y1; by default x's dtype, or that of `out`.
        out, residual_out: contiguous buffers of x's shape for y and r; written to and returned. Either may be all of x,
            residual or x1. Else they overlap neither each other nor an input, which torch.compile leaves to the caller.
        seed: fixes the masks: an int or a one-element int64 tensor on x's device. By default drawn from torch's generator.

    Returns:
        y [, y1] [, r] [, mask, mask1] [, rms, peak]: y alone, or a tuple in this order.

    With norm="none", no weight and one dtype, y and r are one tensor. Where nothing is added, r is x, or an alias of it if
    gradients are recorded: the gradients of y and r then meet in one kernel.

    Gradients of gradients are refused on the kernels. Under torch.func's transforms the PyTorch reference runs, which has them.

    Raises:
        ValueError, TypeError: norm, shape, dtype, device, dropout_p or seed not as above; before anything is launched.
    """
    norm = checks.as_norm(norm)
    branch_norm = _NONE if branch_norm is None else checks.as_norm(branch_norm, "branch_norm")
    operands = (
        x, residual, x1, weight, bias, weight1, bias1, branch_weight, branch_bias, rowscale, rowscale1, scalars, branch_scalars,
    )  # fmt: skip
    request = (
        norm, branch_norm, residual_scale, eps, dropout_p, zero_centered_weight, prenorm, residual_out is not None,
        residual_in_fp32, return_dropout_mask, return_statistics, out_dtype,
    )  # fmt: skip
    return _call(operands, request, out, residual_out, seed)


def layer_norm_fn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    *,
    rowscale1: Tensor | None = None,
    seed: Tensor | int | None = None,
) -> Tensor | tuple[Tensor | None, ...]:
    """y = LayerNorm(dropout(x · rowscale) + dropout(x1 · rowscale1) + residual) in one kernel; `norm_fn` has the formula.

    The interface of FlashAttention's Triton function, with rowscale1 and seed beside it. Arguments, results and errors are
    those of `norm_fn`. is_rms_norm: compute RMSNorm. eps is 1e-6 here, 1e-5 in the module LayerNorm.
    """
    if is_rms_norm is not True and is_rms_norm is not False:
        is_rms_norm = checks.as_flags("layer_norm_fn", is_rms_norm=is_rms_norm)["is_rms_norm"]
    request = (
        _RMSNORM if is_rms_norm else _LAYERNORM, _NONE, 1.0, eps, dropout_p, zero_centered_weight, prenorm,
        residual_out is not None, residual_in_fp32, return_dropout_mask, False, out_dtype,
    )  # fmt: skip
    operands = (x, residual, x1, weight, bias, weight1, bias1, None, None, rowscale, rowscale1, None, None)
    return _call(operands, request, out, residual_out, seed)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    *,
    rowscale1: Tensor | None = None,
    seed: Tensor | int | None = None,
) -> Tensor | tuple[Tensor | None, ...]:
    """y = RMSNorm(dropout(x · rowscale) + dropout(x1 · rowscale1) + residual) in one kernel; `norm_fn` has the formula.

    The interface of FlashAttention's Triton function, with rowscale1 and seed beside it. Arguments, results and errors are
    those of `norm_fn`. eps is 1e-6 here, 1e-5 in the module RMSNorm.
    """
    request = (
        _RMSNORM, _NONE, 1.0, eps, dropout_p, zero_centered_weight, prenorm, residual_out is not None,
        residual_in_fp32, return_dropout_mask, False, out_dtype,
    )  # fmt: skip
    operands = (x, residual, x1, weight, bias, weight1, bias1, None, None, rowscale, rowscale1, None, None)
    return _call(operands, request, out, residual_out, seed)


def _call(
    operands: tuple, request: tuple, out: Tensor | None, residual_out: Tensor | None, seed: Tensor | int | None
) -> Tensor | tuple[Tensor | None, ...]:
    """operands: `records.OPERANDS`; request: the other arguments of Plan. Tuples, as records cost an eager call some µs."""
    if out is not None and request[-1] is None:
        request = (*request[:-1], getattr(out, "dtype", None))
    x = operands[0]
    plan = plan_of(operands, request) if is_eager((out, residual_out, None if isinstance(seed, int) else seed)) else None
    eager = plan is not None
    if plan is None:
        plan = Plan(operands, *request)
    if seed is not None:
        checks.check_seed(plan.name, seed, x.device)
    if not plan.drops:
        seed = None
    elif seed is None:
        seed = draw_seed(x.device, eager)
    elif isinstance(seed, int):
        seed = seed_tensor(seed, x.device)
    inputs = (*operands, seed)
    if out is None and residual_out is None:
        outputs = _run(inputs, plan, eager)
    else:
        outputs = _into_buffers(inputs, plan, eager, out, residual_out)

    if plan.prenorm and outputs[1] is None:
        outputs = (outputs[0], outputs[0] if plan.y_is_r else x, *outputs[2:])
    if plan.returns_masks and not plan.drops:
        masks = [None if t is None else torch.ones_like(t, dtype=torch.bool) for t in (x, operands[2])]
        outputs = (*outputs[:3], *masks, *outputs[5:])
    return plan.results(outputs)


def _run(inputs: tuple, plan: "Plan", eager: bool) -> tuple:
    """Outputs of Inputs; r may be None where it is x itself."""
    if not plan.kernels:
        return reference.norm(Inputs._make(inputs), plan.options)
    if eager:
        return plan.trained(inputs) if torch.is_grad_enabled() and plan.trained is not None else plan.run(inputs)
    # torch.compile loses the gradient of a view of x that an operator gives, if a view of that is an output of its graph.
    is_alias = plan.r_is_x and torch.compiler.is_compiling()
    return NORM.dispatch(inputs, plan.recorded if _trains(inputs) and not is_alias else plan.options)


def _into_buffers(inputs: tuple, plan: "Plan", eager: bool, out: Tensor | None, residual_out: Tensor | None) -> tuple:
    """Outputs, with these buffers for y and r."""
    x, options = inputs[0], plan.options
    checks.check_buffers(plan.name, out, residual_out, Inputs._make(inputs), options.out_dtype, options.residual_dtype, eager)
    if plan.kernels and eager and not _trains((*inputs, out, residual_out)):
        options = options._replace(store_residual=plan.prenorm or residual_out is not None)
        buffers = {name: buffer for name, buffer in (("y", out), ("r", residual_out)) if buffer is not None}
        key = plan, options.store_residual, *buffers
        run = kit.recall(key) or kit.remember(key, NORM.start(Inputs._make(inputs), options, [*buffers]))
        outputs = run(inputs, buffers.values())
        torch.autograd.graph.increment_version(buffers.values())
        return outputs
    # Backward keeps tensors of its own, so what is later done to the buffers can't disturb it.
    outputs = Outputs._make(_run(inputs, plan, eager))
    if plan.r_is_x and out is not None:  # which may be x
        outputs = outputs._replace(r=x.clone())
    if residual_out is not None:
        r = outputs.r if outputs.r is not None else outputs.y if plan.y_is_r else x
        outputs = outputs._replace(r=residual_out.copy_(r))
    return outputs if out is None else outputs._replace(y=out.copy_(outputs.y))


def _trains(tensors: Iterable[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# ---- what follows from a call's options, dtypes and widths -------------------------------------------------------------------
# Checked and worked out once, then remembered. The number of rows is no part of it, so a batch of another length costs what the
# one before did.

# Where they begin in `records.OPERANDS`.
_WEIGHTS, _ROWSCALES, _SCALARS = (OPERANDS.index(names[0]) for names in (WEIGHTS, ROWSCALES, SCALARS))
_STRIDED = torch.strided


def plan_of(operands: tuple, request: tuple) -> "Plan | None":
    """Of a call that nobody watches (`torch_state.is_eager`); None where a tensor is not plain or does not fit the others.

    operands, request: `records.OPERANDS`, and the other arguments of Plan.

    Raises:
        ValueError, TypeError: as Plan.
    """
    key = _key(operands, request)
    if key is None:
        return None
    try:
        found = kit.recall(key)
    except TypeError:  # an option has no hash: the checks have more to say
        return Plan(operands, *request)
    return found or kit.remember(key, Plan(operands, *(*request, True)))


def _key(operands: tuple, request: tuple) -> tuple | None:
    """Of what is there, in one pass over the operands, as an eager call pays for each look at a tensor."""
    key: list[Any] = [+request[0], +request[1], *request[2:]]  # a plain number is hashed faster than a Norm
    _, _, scale, eps, p, zero_centered, prenorm, _, fp32, masks, statistics, _ = request
    if not (
        type(scale) is type(eps) is type(p) is float
        and type(zero_centered) is type(prenorm) is type(fp32) is type(masks) is type(statistics) is bool
    ):
        key += map(type, request)  # 1.0 is equal to True, which the checks may accept
    rows: Any = None
    for field, t in enumerate(operands):
        if t is not None:
            if type(t) not in PLAIN or t.layout is not _STRIDED or t.is_neg():  # not plain, see `is_eager`
                return None
            shape, dtype = t.shape, t.dtype
            if rows is None:  # x
                rows, width, device = shape, shape[-1:], t.device
                key += dtype, t.requires_grad, width, device
                continue
            if t.device != device:
                return None
            if field < _WEIGHTS:
                if shape != rows:
                    return None
            elif field < _ROWSCALES:
                if shape != width:
                    return None
            elif field >= _SCALARS:
                dtype = dtype, shape
            elif shape != rows[:-1] and shape != (rows[:-1].numel(),):
                return None
            key += field, dtype, t.requires_grad
    return tuple(key)


class Plan:
    # Of eager calls on kernels.
    run: kit.Run  # without a gradient
    trained: kit.Call | None = None

    def __init__(
        self, given: tuple, norm: Norm, branch_norm: Norm, residual_scale: float, eps: float, dropout_p: float,
        zero_centered_weight: bool, prenorm: bool, has_residual_out: bool, residual_in_fp32: bool, return_dropout_mask: bool,
        return_statistics: bool, out_dtype: torch.dtype | None, eager: bool = False,
    ) -> None:  # fmt: skip
        """given: `records.OPERANDS`; the others as of `norm_fn`.

        Raises:
            ValueError, TypeError: as `norm_fn` documents, for all but buffers and seed.
        """
        operands = Inputs._make((*given, None))
        x, residual, x1, rowscale, rowscale1 = operands.x, operands.residual, operands.x1, operands.rowscale, operands.rowscale1
        self.name = name = function_name(norm)  # of the public function, for messages
        # Whether the call goes through the kernels; else through `reference`.
        self.kernels, dtypes = checks.check_input(name, x)
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
        residual_scale = checks.as_number(name, "residual_scale", residual_scale, "a finite number", checks.is_finite)
        dropout_p = checks.as_dropout_p(name, "dropout_p", dropout_p)
        eps = checks.as_eps(name, eps)
        flags = checks.as_flags(
            name, prenorm=prenorm, zero_centered_weight=zero_centered_weight, residual_in_fp32=residual_in_fp32,
            return_dropout_mask=return_dropout_mask, return_statistics=return_statistics,
        )  # fmt: skip
        self.prenorm, zero_centered_weight, residual_in_fp32, self.returns_masks, return_statistics = flags.values()
        out_dtype = checks.as_out_dtype(name, out_dtype, x, dtypes)

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
        returns_y1 = operands.weight1 is not None or operands.bias1 is not None
        results = ["y", *["y1"] * returns_y1, *["r"] * self.prenorm]
        results += [*["mask", "mask1"] * self.returns_masks, *["rms", "peak"] * return_statistics]
        self.results = kit.picker(results, Outputs._fields) if len(results) > 1 else itemgetter(0)
        self.options = Options(
            eps=eps,
            dropout_p=dropout_p,
            norm=norm,
            branch=branch,
            branch_norm=branch_norm,
            residual_scale=1.0 if residual is None else residual_scale,
            zero_centered_weight=zero_centered_weight,
            out_dtype=out_dtype,
            residual_dtype=residual_dtype,
            store_residual=(self.prenorm or has_residual_out) and not self.r_is_x and not self.y_is_r,
            return_mask=self.returns_masks and drops,
            return_statistics=return_statistics,
        )
        # Where r is x, its gradient comes into the same backward by an alias of x that is returned for it.
        self.recorded = self.options
        if (self.prenorm or has_residual_out) and self.r_is_x and _reads_r(norm, operands):
            self.recorded = self.options._replace(store_residual=True)
        if eager and self.kernels:
            i = operands._replace(seed=torch.empty(1, dtype=torch.int64) if drops else None)
            self.run, needs = NORM.start(i, self.options), tuple([t is not None and t.requires_grad for t in i])
            if True in needs:
                self.trained = kit.Call(NORM, self.recorded, i, needs)


def _reads_r(norm: Norm, of: Any) -> bool:
    """Whether backward looks at r; of: Inputs or Weights, in whatever way some are absent."""
    return norm != Norm.none or of.weight is not None or of.weight1 is not None


# ---- operator ----------------------------------------------------------------------------------------------------------------


class FusedNorm(kit.Op):
    name, Inputs, Options, Outputs, Backward, Gradients = "norm", Inputs, Options, Outputs, BackwardInputs, Gradients

    def function(self, given, o):
        return function_name(o.norm)

    def written(self, given, o):
        return [*outputs_of(given, o)]

    def outputs(self, i, o):
        outputs = outputs_of(names_of(i), o)
        return kit.fill(Outputs, outputs, empty_outputs(i.x, outputs.values(), i.x.numel() // i.x.shape[-1]))

    def gradients(self, b, o, wanted):
        return Gradients._make(_gradients(wanted)(b._replace(r=_of_rows(b))))

    def view(self, given, o):
        return (lambda i, outputs: (outputs[0], i[0].detach(), *outputs[2:])) if o.passes_residual else None

    def training(self, of, o, needs):
        """Backward normalises r again; where nothing was added it finds the same numbers in x."""
        adds, reads_r = _adds(of, o), _reads_r(o.norm, of)
        r_is_x = not adds and o.residual_dtype == of.x
        return o._replace(
            store_residual=not r_is_x and (o.store_residual or (adds and reads_r)),
            passes_residual=r_is_x and o.store_residual,
            statistics=o.norm.statistics,
            branch_statistics=o.branch_norm.statistics,
        )

    def kept(self, of, o, needs):
        learned = dict(zip(Inputs._fields, needs, strict=True))
        return super().kept(of, o, needs) | {
            # Whoever has a sum that backward doesn't read may change it in place.
            "r": None if not _reads_r(o.norm, of) else "r" if _adds(of, o) else "x",
            # Without a norm of its own, x has a part in one gradient alone: drowscale = Σ dropout(dz) · x.
            "x": "x" if o.branch or learned["rowscale"] else None,
            "x1": "x1" if learned["rowscale1"] else None,
        }

    def wanted(self, of, o, needs, given):
        has_dy = "dy" in given
        needed = [name for name, need in zip(Inputs._fields, needs, strict=True) if need]
        sources = {name: f"d{name}" for name in Inputs._fields}
        # The residual and the inputs that nothing scales share one gradient, dz, if they also share a dtype.
        changed = o.dropout_p > 0.0 or o.branch or o.residual_scale != 1.0
        scaled = {"x": changed or of.rowscale is not None, "x1": changed or of.rowscale1 is not None, "residual": False}
        sharing = [name for name in ("residual", "x", "x1") if name in needed and not scaled[name]]
        # Without a norm of r, one upstream gradient alone is dz. The residual takes it as it is: nothing is written for it.
        without_norm = o.norm == Norm.none and of.weight is None and of.bias is None
        alone = without_norm and "dy1" not in given and has_dy != ("dr" in given) and o.residual_scale == 1.0
        if "residual" in sharing and alone and of.residual == (o.out_dtype if has_dy else o.residual_dtype):
            sources["residual"] = "dy" if has_dy else "dr"
            sharing.remove("residual")
        wanted: dict[str, Any] = dict.fromkeys(Gradients._fields)
        for shares in sharing:
            if wanted["dz"] in (None, getattr(of, shares)):
                wanted["dz"], sources[shares] = getattr(of, shares), "dz"
        reached = dict.fromkeys(("weight", "bias"), has_dy) | dict.fromkeys(("weight1", "bias1"), "dy1" in given)
        for name in needed:
            if sources[name] in wanted and sources[name] != "dz" and reached.get(name, True):
                wanted[f"d{name}"] = getattr(of, name)
        return Gradients(**wanted), sources

    def start(self, i, o, buffers=()):
        """buffers: the outputs that are brought to each call, contiguous; r may be the residual itself."""
        kernels, N, device = kit.kernels("forward"), i.x.shape[-1], i.x.device
        rows = (i.x, i.residual, i.x1)
        weights = [getattr(i, name) for name in WEIGHTS]
        work = Work(
            vector=vector_of(*rows, o.out_dtype, o.residual_dtype),
            row_bytes=bytes_of(*rows),
            weights=sum(weight is not None for weight in weights),
            weight_bytes=bytes_of(*weights),
            drops=o.dropout_p > 0,
        )
        facts = kit.device_facts(device)
        tile, early = forward_tile(N, work, facts), facts.since_sm_90
        variant = _variant(N, o, work, tile, STREAM_DTYPE=kit.triton_dtype(o.residual_dtype), EARLY_START=early)
        numbers = (o.eps, *_dropout_numbers(o), tile.prefetch_programs, variant)
        launch = kit.Launcher(kernels.norm_forward_kernel, kernels.Pointers, device, early=True, num_warps=tile.warps)
        rows_of_tile = tile.rows
        made = {name: kind for name, kind in outputs_of(names_of(i), o).items() if name not in buffers}
        complete, kinds = kit.picker(Outputs._fields, [*made, *buffers]), [*made.values()]

        def run(i, brought=()):
            x = i[0]
            M = x.numel() // N
            written = complete((*empty_outputs(x, kinds, M), *brought, None))
            launch(-(-M // rows_of_tile), (*i[:-1], *written), i[-1], M, *numbers)
            return written

        return run

    def start_backward(self, b, o, wanted):
        kernels, r = kit.kernels("backward"), _of_rows(b)
        norm, branch_norm, N, device = o.norm, o.branch_norm, r.shape[-1], r.device
        learned = kit.kernels("rows").Weights(*[getattr(wanted, f"d{name}") is not None for name in WEIGHTS])
        reads_r = bool(norm != Norm.none or learned.weight or learned.weight1)
        rows = (b.dy, b.dy1, b.dr, r if reads_r else None, b.x, b.x1)
        written = (wanted.dz, wanted.dx, wanted.dx1)
        work = Work(
            vector=vector_of(*rows, *written),
            row_bytes=bytes_of(*rows),
            weights=(1 + norm.has_bias) * reads_r * (1 if b.dy1 is None else 2) + (1 + branch_norm.has_bias) * o.branch,
            written_bytes=bytes_of(*written),
            branch=o.branch,
            # The sums over a row that its programs would exchange are those of one norm with a statistic.
            splittable=b.dy is not None and b.dy1 is None and b.x is None and b.x1 is None and norm.statistics > 0,
        )
        facts = kit.device_facts(device)
        tile = backward_tile(N, work, facts)
        split = tile.slices > 1
        early = facts.since_sm_90 and not split  # a cooperative launch cannot be early
        variant = _variant(N, o, work, tile, STREAM_DTYPE=None, EARLY_START=early, WANTED=learned)
        launch = kit.Launcher(
            kernels.norm_backward_kernel, kernels.Pointers, device, early=not split, num_warps=tile.warps,
            launch_cooperative_grid=split or None, maxnreg=most_registers(tile) if split else None,
        )  # fmt: skip
        most_groups = facts.multiprocessors * tile.programs_per_sm // tile.slices
        sums = sum(learned)
        finish = finishing(device, N, sums, most_groups)
        scalars = norm.scalars * (wanted.dscalars is not None)
        scalars += branch_norm.scalars * (wanted.dbranch_scalars is not None)

        numbers = (*_dropout_numbers(o), variant)
        rows_of_tile, slices, sums_N = tile.rows, tile.slices, sums * N
        exchange = kit.kernels("exchange")
        board_words = index(exchange.RING) * exchange.turn_words(slices)
        gradients = _gradients(wanted)

        def run(b):
            r = b[3]
            if r is None:  # which nobody reads
                r = next(t for t in b if t is not None)
                b = (*b[:3], r, *b[4:])
            M, written = r.numel() // N, gradients(b)
            if M == 0:
                return kit.zeroed(written)
            tiles = -(-M // rows_of_tile)
            groups = min(tiles, most_groups)
            partials = r.new_empty(groups * sums_N, dtype=torch.float32) if sums else None
            scalar_partials = r.new_empty(groups, scalars, dtype=torch.float32) if scalars else None
            board = torch.full((groups * board_words,), -1, dtype=torch.int64, device=device) if split else None
            tensors = (*b[:-1], *written[:7], partials, scalar_partials, board)
            launch(groups * slices, tensors, b[-1], M, tiles, *numbers)
            if sums:
                finish(groups, (partials, *written[7:]))
            if scalar_partials is not None:
                totals = scalar_partials.sum(0)
                for scalar, part in ((written[5], totals[: norm.scalars]), (written[6], totals[-branch_norm.scalars :])):
                    if scalar is not None:
                        scalar.copy_(part)
            return written

        return run


NORM = FusedNorm()

# Of the gradients whose shape is not that of a weight, the field of BackwardInputs that has it.
_LIKE = {"dz": "r", "dx": "r", "dx1": "r"} | {f"d{name}": name for name in (*ROWSCALES, *SCALARS)}


def _adds(of: Any, o: Options) -> bool:
    """Whether anything is added to x or changed in it."""
    others = of.residual, of.x1, of.rowscale
    return o.branch or o.dropout_p > 0.0 or any(t is not None for t in others)


def empty_outputs(x: Tensor, kinds: Iterable[tuple[torch.dtype, int | None]], rows: int) -> list[Tensor]:
    """kinds: of `records.outputs_of`."""
    return [
        empty_as(x, dtype) if numbers is None else x.new_empty(rows * numbers if numbers else x.shape[:-1], dtype=dtype)
        for dtype, numbers in kinds
    ]


def empty_as(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous. Of the ways to allocate a tensor of two dimensions, those that cost the host least."""
    if like.dtype is dtype and like.is_contiguous():
        return torch.empty_like(like)
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def _of_rows(b: BackwardInputs) -> Tensor:
    """A tensor of r's shape; r itself where backward reads it."""
    return next(t for t in (b.r, *b) if t is not None)


def _gradients(wanted: Gradients) -> kit.Run:
    """A function of BackwardInputs with a tensor for r, which allocates them."""
    names = names_of(wanted)
    kinds = [(BackwardInputs._fields.index(_LIKE[name]) if name in _LIKE else None, getattr(wanted, name)) for name in names]
    complete = kit.picker(Gradients._fields, names)

    def allocated(b: tuple) -> tuple:
        r = b[3]
        N = r.shape[-1]
        found = [r.new_empty(N, dtype=dtype) if like is None else empty_as(b[like], dtype) for like, dtype in kinds]
        return complete((*found, None))

    return allocated


def finishing(device: torch.device, N: int, sums: int, most_groups: int) -> Callable[[int, tuple], None]:
    """A function of how many groups of programs there are, and of the fields of `weight_gradients.WeightGradients`: it adds up
    the partial sums of `sums` gradients of N columns."""
    kernels, early = kit.kernels("weight_gradients"), kit.device_facts(device).since_sm_90
    # As many partial sums at once as there are on a large batch: with fewer, a small kernel waits for memory several times.
    block_p = min(512, 1 << (max(1, most_groups) - 1).bit_length())
    block_n = max(8, min(256, 4096 // block_p))
    launch = kit.Launcher(kernels.finish_weight_gradients_kernel, kernels.WeightGradients, device, early=True, num_warps=4)
    blocks = sums * -(-N // block_n)
    return lambda groups, tensors: launch(blocks, tensors, groups, N, block_p, block_n, early)


def _dropout_numbers(o: Options) -> tuple[int, float]:
    return drop_threshold(o.dropout_p), keep_scale(o.dropout_p)


def of_tile(tile: Tile) -> dict[str, Any]:
    """What a Variant has of it."""
    fields = ("rows", "block_n", "looped", "slices", "stages", "early_weights", "prefetch")
    return {name.upper(): getattr(tile, name) for name in fields}


def _variant(N: int, o: Options, work: Work, tile: Tile, **more: Any) -> Any:
    return kit.kernels("rows").Variant(
        N,
        NORM=int(o.norm),
        BRANCH=o.branch,
        BRANCH_NORM=int(o.branch_norm),
        RESIDUAL_SCALE=o.residual_scale,
        DROPOUT=o.dropout_p > 0.0,
        OFFSET=float(o.zero_centered_weight),
        VECTOR=work.vector,
        **of_tile(tile),
        **more,
    )


def vector_of(*of: Any) -> int:
    """Elements in 16 bytes of the widest; of: tensors or dtypes."""
    return 16 // max(t.itemsize for t in of if t is not None)


def bytes_of(*of: Any) -> int:
    return sum(t.itemsize for t in of if t is not None)
