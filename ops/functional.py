"""The public functions: check, run the kernels or the reference, return what was asked for.

`layer_norm_fn` and `rms_norm_fn` have the interface of FlashAttention's Triton functions, argument for argument.
"""

import torch
from torch import Tensor

from . import checks, operators, reference
from .autograd import apply_eager
from .philox import draw_seed, seed_tensor
from .plan import Plan, plan_of
from .records import Inputs, Options, Outputs, outputs_of, present
from .reference import Norm
from .torch_state import is_eager

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

    Gradients of gradients are refused on the kernels. Under torch.func's derivatives (grad, jvp, hessian) the PyTorch reference
    runs, which has them all.

    Raises:
        ValueError, TypeError: norm, shape, dtype, device, dropout_p or seed not as above; before anything is launched.
    """
    norm = checks.as_norm(norm)
    branch_norm = _NONE if branch_norm is None else checks.as_norm(branch_norm, "branch_norm")
    operands = (
        x, residual, x1, weight, bias, weight1, bias1, branch_weight, branch_bias, rowscale, rowscale1, scalars, branch_scalars,
    )  # fmt: skip
    return _call(
        operands, norm, branch_norm, residual_scale, eps, dropout_p, zero_centered_weight, prenorm, residual_in_fp32,
        return_dropout_mask, return_statistics, out_dtype, out, residual_out, seed,
    )  # fmt: skip


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
    return _call(
        (x, residual, x1, weight, bias, weight1, bias1, None, None, rowscale, rowscale1, None, None),
        _RMSNORM if is_rms_norm else _LAYERNORM, _NONE, 1.0, eps, dropout_p, zero_centered_weight, prenorm,
        residual_in_fp32, return_dropout_mask, False, out_dtype, out, residual_out, seed,
    )  # fmt: skip


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
    return _call(
        (x, residual, x1, weight, bias, weight1, bias1, None, None, rowscale, rowscale1, None, None),
        _RMSNORM, _NONE, 1.0, eps, dropout_p, zero_centered_weight, prenorm,
        residual_in_fp32, return_dropout_mask, False, out_dtype, out, residual_out, seed,
    )  # fmt: skip


def _call(
    operands: tuple, norm: Norm, branch_norm: Norm, residual_scale: float, eps: float, dropout_p: float,
    zero_centered_weight: bool, prenorm: bool, residual_in_fp32: bool, return_dropout_mask: bool, return_statistics: bool,
    out_dtype: torch.dtype | None, out: Tensor | None, residual_out: Tensor | None, seed: Tensor | int | None,
) -> Tensor | tuple[Tensor | None, ...]:  # fmt: skip
    """operands: `records.OPERANDS`. Plain tuples, as records cost an eager call some µs."""
    if out_dtype is None and out is not None:
        out_dtype = getattr(out, "dtype", None)
    x = operands[0]
    request = (
        norm, branch_norm, residual_scale, eps, dropout_p, zero_centered_weight, prenorm, residual_out is not None,
        residual_in_fp32, return_dropout_mask, return_statistics, out_dtype,
    )  # fmt: skip
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

    y, r = outputs[0], outputs[1]
    if r is None:
        r = y if plan.y_is_r else x
    if not plan.returns_more:
        return (y, r) if plan.prenorm else y
    y1, mask, mask1, rms, peak, *_ = (*outputs[2:], None, None, None, None, None)
    if plan.returns_masks and not plan.drops:
        mask, mask1 = (None if t is None else torch.ones_like(t, dtype=torch.bool) for t in (x, operands[2]))
    masks = (mask, mask1) if plan.returns_masks else ()
    statistics = (rms, peak) if plan.returns_statistics else ()
    results = (y, *[y1] * plan.returns_y1, *[r] * plan.prenorm, *masks, *statistics)
    return results[0] if len(results) == 1 else results


def _run(inputs: tuple, plan: Plan, eager: bool) -> tuple:
    """Outputs of the fields of Inputs; r may be None where it is x itself."""
    if not plan.kernels:
        return reference.norm(Inputs._make(inputs), plan.inference)
    if eager:
        tensors = plan.present(inputs)
        if torch.is_grad_enabled():
            for t in tensors:  # any() takes 0.6 µs more
                if t.requires_grad:
                    return apply_eager(plan.trained, *tensors)
        return plan.run(tensors)
    given = present(inputs)
    options = plan.training if _trains(given) else plan.inference
    outputs = operators.norm(given, *operators.encode(Inputs, plan.names, options))
    return _named(plan, options, outputs)


def _into_buffers(inputs: tuple, plan: Plan, eager: bool, out: Tensor | None, residual_out: Tensor | None) -> tuple:
    """Outputs, with these buffers for y and r."""
    x, options = inputs[0], plan.inference
    checks.check_buffers(plan.name, out, residual_out, Inputs._make(inputs), options.out_dtype, options.residual_dtype, eager)
    buffers = {name: buffer for name, buffer in (("y", out), ("r", residual_out)) if buffer is not None}
    if plan.kernels and eager and not _trains([*plan.present(inputs), *buffers.values()]):
        options = options._replace(store_residual=plan.prenorm or residual_out is not None)
        written = plan.call(options)(plan.present(inputs), buffers)
        torch.autograd.graph.increment_version(buffers.values())
        return _named(plan, options, written)
    # Backward keeps tensors of its own, so what is later done to the buffers can't disturb it.
    outputs = Outputs(*_run(inputs, plan, eager))
    if plan.r_is_x and out is not None:  # which may be x
        outputs = outputs._replace(r=x.clone())
    if residual_out is not None:
        r = outputs.r if outputs.r is not None else outputs.y if plan.y_is_r else x
        outputs = outputs._replace(r=residual_out.copy_(r))
    return outputs if out is None else outputs._replace(y=out.copy_(outputs.y))


def _named(plan: Plan, options: Options, outputs: list[Tensor]) -> Outputs:
    names = [*outputs_of(plan.names, options)]
    if options.passes_residual:  # behind y
        names.insert(1, "r")
    return Outputs(**dict(zip(names, outputs, strict=True)))


def _trains(tensors: list[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
