"""The public functions: check, run the kernels or the reference, return what was asked for.

`layer_norm_fn` and `rms_norm_fn` have the interface of FlashAttention's Triton functions, argument for argument.
"""

import torch
from torch import Tensor

from . import checks, operators, reference, sites
from .autograd import differentiated_by_func, is_eager
from .kernels import runs_kernels
from .philox import as_int64, draw_seed
from .records import Inputs, Outputs
from .reference import Norm


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
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    seed: Tensor | int | None = None,
) -> Tensor | tuple[Tensor | None, ...]:
    """Dropout → add → norm in one kernel.

        z = dropout(x · rowscale[:, None]) + dropout(x1 · rowscale1[:, None]) + residual          in fp32
        r = z rounded to the residual dtype                                                       the new residual stream
        x̂ = (r − mean(r)) · rstd(r)  (LayerNorm)  or  r · rstd(r)  (RMSNorm)
        y = x̂ · (weight + offset) + bias,   y1 = x̂ · (weight1 + offset) + bias1

    Args:
        norm: "layernorm" (Ba et al. 2016, biased variance) or "rmsnorm" (Zhang & Sennrich 2019).
        x: (..., N), bf16, fp16 or fp32 in any mix with the others; fp64 too where the PyTorch reference runs.
        weight, bias: (N,); None is 1 and 0.
        residual: shape of x; the residual stream so far, in its own dtype.
        x1: shape of x; a second branch added to the stream (parallel attention and MLP).
        weight1, bias1: (N,); a second affine map of the same x̂. The output y1 is there when either is given.
        eps: added to the variance.
        dropout_p: in [0, 1), on x and on x1 with independent masks.
        rowscale, rowscale1: one factor for each row, x's leading shape or flat (M,); for stochastic depth.
        prenorm: also return r.
        residual_in_fp32: keep r in fp32 where no residual says otherwise; else r has x's dtype.
        zero_centered_weight: offset is 1 instead of 0, for weight and weight1.
        return_dropout_mask: also return the bool masks of what was kept, x's and x1's (None without x1).
        out_dtype: of y and y1; by default x's dtype, or that of `out`.
        out, residual_out: buffers of x's shape for y and r; written to and returned. residual_out may be `residual` itself.
        seed: fixes the masks: an int or a one-element int64 tensor on x's device. By default drawn from torch's generator.

    Returns:
        y [, y1] [, r] [, mask, mask1]: y alone, or a tuple in this order.

    Gradients of gradients are refused on the kernels. Under torch.func's derivatives (grad, jvp, hessian) the PyTorch reference
    runs, which has them all.

    Raises:
        ValueError, TypeError: norm, shape, dtype, device, dropout_p or seed not as above; before anything is launched.
    """
    if type(norm) is not Norm:
        norm = checks.as_norm(norm)
    if out_dtype is None and out is not None:
        out_dtype = getattr(out, "dtype", None)
    tensors = (x, residual, x1, weight, bias, weight1, bias1, rowscale, rowscale1, seed)
    if prenorm is not True and prenorm is not False:
        checks.check_flags(checks.function_name(norm), prenorm=prenorm)
    request = (
        norm, eps, dropout_p, zero_centered_weight, prenorm or residual_out is not None, residual_in_fp32,
        return_dropout_mask, out_dtype,
    )  # fmt: skip
    ordinary = out is None and residual_out is None and return_dropout_mask is False and not torch.compiler.is_compiling()
    if ordinary and (found := sites.results(tensors, request)) is not None:
        return found

    kernels = isinstance(x, Tensor) and runs_kernels(x.device)
    eager = is_eager((*tensors[:9], seed if isinstance(seed, Tensor) else None, out, residual_out))
    if kernels and not eager and differentiated_by_func():
        kernels = False
    plan = checks.make_plan(tensors, request, kernels)
    if out is not None or residual_out is not None:
        checks.check_buffers(plan.name, out, residual_out, x, plan.inference.out_dtype, plan.inference.residual_dtype)

    if not plan.drops:
        seed = None
    elif seed is None:
        seed = draw_seed(x.device, eager)
    elif isinstance(seed, int):
        seed = _seed_tensor(seed, x.device)
    inputs = Inputs(*tensors[:9], seed)
    if kernels:
        outputs = _run_kernels(inputs, plan, prenorm, out, residual_out)
    else:
        outputs = _fill(out, residual_out, reference.norm(inputs, plan.inference), plan)

    if ordinary and eager and kernels:
        sites.prepare(tensors, request, plan)
    results: list = [outputs.y if out is None else out]
    if plan.returns_y1:
        results.append(outputs.y1)
    if prenorm:
        results.append(outputs.r if residual_out is None else residual_out)
    if return_dropout_mask:
        results += _masks(inputs, outputs, plan)
    return results[0] if len(results) == 1 else tuple(results)


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

    The interface of FlashAttention's Triton function, and rowscale1 and seed beside it.

    Args:
        x: (..., N), bf16, fp16 or fp32 (fp64 too where the PyTorch reference runs); what a sublayer gives.
        weight, bias: (N,), of any of these dtypes; None is 1 and 0.
        residual: shape of x; the residual stream so far, in its own dtype. None: the stream starts here.
        x1: shape of x; a second branch that is added. weight1, bias1: (N,); a second output y1 is there when either is given.
        eps: added to the variance: 1e-6 here, 1e-5 in the module LayerNorm.
        dropout_p: in [0, 1), on x and x1. seed: an int or a one-element int64 tensor on x's device, which fixes the masks;
            None: drawn from torch's generator.
        rowscale, rowscale1: one factor for each row of x and x1: x's leading shape, or flat (M,).
        prenorm: also return the new stream. residual_in_fp32: a stream that starts here is fp32; else it has x's dtype.
        zero_centered_weight: the weights are stored as their distance from 1. is_rms_norm: compute RMSNorm.
        return_dropout_mask: also return the bool masks of what was kept, of x and x1 (None without x1).
        out_dtype: of y and y1; None: x's. out, residual_out: buffers of x's shape, written to and returned.

    Returns:
        y [, y1] [, stream] [, mask, mask1]: y alone, or a tuple in this order, all of x's shape.

    Raises:
        ValueError, TypeError: a shape, dtype, device, dropout_p or seed not as above; before anything is launched.
    """
    if is_rms_norm is not True and is_rms_norm is not False:
        checks.check_flags("layer_norm_fn", is_rms_norm=is_rms_norm)
    return norm_fn(
        Norm.rmsnorm if is_rms_norm else Norm.layernorm, x, weight, bias, residual, x1, weight1, bias1,
        eps=eps, dropout_p=dropout_p, rowscale=rowscale, rowscale1=rowscale1, prenorm=prenorm,
        residual_in_fp32=residual_in_fp32, zero_centered_weight=zero_centered_weight,
        return_dropout_mask=return_dropout_mask, out_dtype=out_dtype, out=out, residual_out=residual_out, seed=seed,
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

    Args:
        x: (..., N), bf16, fp16 or fp32 (fp64 too where the PyTorch reference runs); what a sublayer gives.
        weight, bias: (N,), of any of these dtypes; None is 1 and 0.
        residual: shape of x; the residual stream so far, in its own dtype. None: the stream starts here.
        x1: shape of x; a second branch that is added. weight1, bias1: (N,); a second output y1 is there when either is given.
        eps: added to the mean square: 1e-6 here, 1e-5 in the module RMSNorm.
        dropout_p: in [0, 1), on x and x1. seed: an int or a one-element int64 tensor on x's device, which fixes the masks;
            None: drawn from torch's generator.
        rowscale, rowscale1: one factor for each row of x and x1: x's leading shape, or flat (M,).
        prenorm: also return the new stream. residual_in_fp32: a stream that starts here is fp32; else it has x's dtype.
        zero_centered_weight: the weights are stored as their distance from 1.
        return_dropout_mask: also return the bool masks of what was kept, of x and x1 (None without x1).
        out_dtype: of y and y1; None: x's. out, residual_out: buffers of x's shape, written to and returned.

    Returns:
        y [, y1] [, stream] [, mask, mask1]: y alone, or a tuple in this order, all of x's shape.

    Raises:
        ValueError, TypeError: a shape, dtype, device, dropout_p or seed not as above; before anything is launched.
    """
    return norm_fn(
        Norm.rmsnorm, x, weight, bias, residual, x1, weight1, bias1,
        eps=eps, dropout_p=dropout_p, rowscale=rowscale, rowscale1=rowscale1, prenorm=prenorm,
        residual_in_fp32=residual_in_fp32, zero_centered_weight=zero_centered_weight,
        return_dropout_mask=return_dropout_mask, out_dtype=out_dtype, out=out, residual_out=residual_out, seed=seed,
    )  # fmt: skip


def seeded_dropout(x: Tensor, p: float, seed: Tensor | int, stream: int = 0) -> Tensor:
    """Dropout of x (..., N) that drops what `layer_norm_fn` drops of x (stream 0) or of x1 (stream 1) with the same seed.

    No mask is stored: backward regenerates it from the seed.

    Args:
        p: in [0, 1).
        seed: an int or a one-element int64 tensor on x's device.
    """
    name = "seeded_dropout"
    kernels = isinstance(x, Tensor) and runs_kernels(x.device) and not differentiated_by_func()
    checks.check_input(name, x, checks.KERNEL_DTYPES if kernels else checks.REFERENCE_DTYPES)
    checks.check_mask(name, p, seed, stream, x.device)
    if p == 0.0:
        return x
    rows = x.reshape(-1, x.shape[-1])
    seed = _seed_tensor(seed, x.device)
    if kernels:
        return operators.dropout(rows, seed, p, stream).view(x.shape)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return reference.dropout(rows.to(compute), p, seed, stream)[0].to(x.dtype).view(x.shape)


def dropout_mask(
    seed: Tensor | int, rows: int, cols: int, p: float, stream: int = 0, device: torch.device | str | None = None
) -> Tensor:
    """Bool [rows, cols], True where `layer_norm_fn` with this seed keeps an element of x (stream 0) or of x1 (stream 1).

    Args:
        p: in [0, 1).
        device: where the mask is made; by default the seed's, or the CPU for an int.
    """
    if device is None:
        device = seed.device if isinstance(seed, Tensor) else "cpu"
    device = checks.as_device("dropout_mask", device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    checks.check_mask("dropout_mask", p, seed, stream, device)
    checks.check_size("dropout_mask", "rows", rows, 0)
    checks.check_size("dropout_mask", "cols", cols, 1)
    seed = _seed_tensor(seed, device)
    if runs_kernels(device):
        return operators.dropout_mask(seed, rows, cols, p, stream)
    return reference.keep_mask(seed, rows, cols, p, stream)


def _run_kernels(inputs: Inputs, plan: checks.Plan, prenorm: bool, out: Tensor | None, residual_out: Tensor | None) -> Outputs:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*inputs, out, residual_out)):
        outputs = operators.norm_of(inputs, plan.training)
    elif out is None and residual_out is None:
        outputs = operators.norm_of(inputs, plan.inference)
    else:
        options = plan.inference._replace(store_residual=prenorm)
        return operators.norm_into(inputs, options, out, residual_out)
    # Backward keeps the operator's own tensors, so what is later done to the buffers can't disturb it.
    return _fill(out, residual_out, outputs._replace(r=inputs.x) if plan.r_is_x else outputs, plan)


def _fill(out: Tensor | None, residual_out: Tensor | None, outputs: Outputs, plan: checks.Plan) -> Outputs:
    """Copies the results into the caller's buffers; r is made safe from what is written to `out`, which may be x itself."""
    if residual_out is not None and outputs.r is not None:
        residual_out.copy_(outputs.r)
    if out is not None:
        if plan.r_is_x and outputs.r is not None:
            outputs = outputs._replace(r=outputs.r.clone())
        out.copy_(outputs.y)
    return outputs


def _masks(inputs: Inputs, outputs: Outputs, plan: checks.Plan) -> tuple[Tensor | None, Tensor | None]:
    """The masks as the caller gets them: without dropout all was kept."""
    mask, mask1 = outputs.mask, outputs.mask1
    if not plan.drops:
        mask, mask1 = (None if t is None else torch.ones_like(t, dtype=torch.bool) for t in (inputs.x, inputs.x1))
    return mask, mask1 if inputs.x1 is not None else None


def _seed_tensor(seed: Tensor | int, device: torch.device) -> Tensor:
    if isinstance(seed, int):
        if not -(2**63) <= seed < 2**63:
            seed = as_int64(seed)  # any 64-bit number is a seed
        return torch.full((1,), seed, dtype=torch.int64, device=device)
    return seed
