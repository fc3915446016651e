"""The public functions: check, view as rows, run the kernels or the reference, restore the shape.

A superset of the interface of FlashAttention's Triton `layer_norm_fn`, argument for argument.
"""

import torch
from torch import Tensor

from . import reference, registration
from .backend import runs_kernels
from .checks import (
    KERNEL_DTYPES,
    REFERENCE_DTYPES,
    check_dropout_p,
    check_eps,
    check_input,
    check_like_input,
    check_rowscale,
    check_seed,
    check_stream,
    check_weight,
)


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
    """Dropout → add → norm in one kernel.

        z = dropout(x · rowscale[:, None]) + dropout(x1 · rowscale1[:, None]) + residual          in fp32
        r = z rounded to the residual dtype                                                       the new residual stream
        x̂ = (r − mean(r)) · rstd(r)  (LayerNorm)  or  r · rstd(r)  (RMSNorm)
        y = x̂ · (weight + offset) + bias,   y1 = x̂ · (weight1 + offset) + bias1

    Args:
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
        is_rms_norm: RMSNorm (Zhang & Sennrich 2019) instead of LayerNorm (Ba et al. 2016, biased variance).
        return_dropout_mask: also return the bool masks of what was kept, x's and x1's (None without x1).
        out_dtype: of y and y1; by default x's dtype, or that of `out`.
        out, residual_out: buffers of x's shape for y and r; written to and returned. residual_out may be `residual` itself.
        seed: fixes the masks: an int or a one-element int64 tensor on x's device. By default drawn from torch's generator.

    Returns:
        y [, y1] [, r] [, mask, mask1]: y alone, or a tuple in this order.

    Raises:
        ValueError, TypeError: shape, dtype, device, dropout_p or seed not as above; raised before anything is launched.
    """
    name = "rms_norm_fn" if is_rms_norm else "layer_norm_fn"
    kernels = runs_kernels(x.device) if isinstance(x, Tensor) else False
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
    check_seed(name, seed, x.device)
    residual_dtype = _residual_dtype(x, residual, residual_in_fp32)
    out_dtype = _out_dtype(name, x, out, out_dtype, dtypes)
    _check_buffer(name, "out", out, x, out_dtype)
    _check_buffer(name, "residual_out", residual_out, x, residual_dtype)
    if out is not None and out is residual_out:
        raise ValueError(f"{name}: out and residual_out are the same tensor; they hold y and the residual stream, pass two")

    shape = x.shape
    x = x.reshape(-1, shape[-1])
    residual, x1 = (None if t is None else t.reshape(-1, shape[-1]) for t in (residual, x1))
    rowscale, rowscale1 = (None if t is None else t.reshape(-1) for t in (rowscale, rowscale1))
    seed = _seed_tensor(seed, x.device) if dropout_p > 0.0 else None

    run = _run_kernels if kernels else _run_reference
    y, y1, r, mask, mask1 = run(
        (x, residual, x1, weight, bias, weight1, bias1, rowscale, rowscale1, seed),
        eps=eps,
        dropout_p=dropout_p,
        zero_centered_weight=zero_centered_weight,
        is_rms_norm=is_rms_norm,
        out_dtype=out_dtype,
        residual_dtype=residual_dtype,
        prenorm=prenorm,
        return_mask=return_dropout_mask,
        out=out,
        residual_out=residual_out,
    )

    results = [out if out is not None else y.view(shape)]
    if y1 is not None:
        results.append(y1.view(shape))
    if prenorm:
        results.append(residual_out if residual_out is not None else r.reshape(shape))
    if return_dropout_mask:
        results += [None if t is None else t.view(shape) for t in (mask, mask1)]
    return results[0] if len(results) == 1 else tuple(results)


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
    """`layer_norm_fn` with is_rms_norm=True."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
        zero_centered_weight, True, return_dropout_mask, out_dtype, out, residual_out, rowscale1=rowscale1, seed=seed,
    )  # fmt: skip


def seeded_dropout(x: Tensor, p: float, seed: Tensor | int, stream: int = 0) -> Tensor:
    """Dropout of x (..., N) that drops what `layer_norm_fn` drops of x (stream 0) or of x1 (stream 1) with the same seed.

    No mask is stored: backward regenerates it from the seed.

    Args:
        p: in [0, 1).
        seed: an int or a one-element int64 tensor on x's device.
    """
    name = "seeded_dropout"
    kernels = runs_kernels(x.device) if isinstance(x, Tensor) else False
    check_input(name, x, KERNEL_DTYPES if kernels else REFERENCE_DTYPES)
    check_dropout_p(name, "p", p)
    check_seed(name, seed, x.device, required=True)
    check_stream(name, stream)
    if p == 0.0:
        return x
    rows = x.reshape(-1, x.shape[-1])
    seed = _seed_tensor(seed, x.device)
    if kernels:
        return registration.dropout(rows, seed, p, stream).view(x.shape)
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
    device = torch.device(device or (seed.device if isinstance(seed, Tensor) else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    check_dropout_p("dropout_mask", "p", p)
    check_seed("dropout_mask", seed, device, required=True)
    check_stream("dropout_mask", stream)
    if rows < 0 or cols < 1:
        raise ValueError(f"dropout_mask: rows must be ≥ 0 and cols ≥ 1, got {rows} and {cols}")
    seed = _seed_tensor(seed, device)
    if runs_kernels(device):
        return registration.dropout_mask(seed, rows, cols, p, stream)
    return reference.keep_mask(seed, rows, cols, p, stream)


def _run_kernels(tensors, *, prenorm, return_mask, out, residual_out, **how):
    x, residual, x1, _, _, weight1, bias1, rowscale, _, seed = tensors
    adds = residual is not None or x1 is not None or seed is not None or rowscale is not None
    differs = adds or how["residual_dtype"] != x.dtype
    keeps_mask = return_mask and seed is not None
    training = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*tensors, out, residual_out))

    if training or (out is None and residual_out is None):
        y, y1, r, _, mask, mask1 = registration.norm_forward(
            *tensors, **how,
            # Backward normalises r again; without anything added it finds the same numbers in x.
            store_residual=(adds and training) or (differs and (prenorm or residual_out is not None)),
            store_stats=training, return_mask=keeps_mask,
        )  # fmt: skip
        # Backward keeps the operator's own tensors, so what is later done to the buffers can't disturb it.
        r = _fill(out, residual_out, y, r if differs else x, r_is_x=not differs)
    else:
        out_dtype = how.pop("out_dtype")
        y = out.view(x.shape) if out is not None else x.new_empty(x.shape, dtype=out_dtype)
        r = None
        if prenorm or residual_out is not None:
            r = residual_out.view(x.shape) if residual_out is not None else x.new_empty(x.shape, dtype=how["residual_dtype"])
        y1, mask, mask1 = registration.norm_forward_out(*tensors, y, r, **how, return_mask=keeps_mask)
    has_y1 = weight1 is not None or bias1 is not None
    return y, y1 if has_y1 else None, r, *_all_kept(x, x1, mask, mask1, return_mask, keeps_mask)


def _run_reference(tensors, *, prenorm, return_mask, out, residual_out, **how):
    x, residual, x1, _, _, _, _, rowscale, _, seed = tensors
    y, y1, r, mask, mask1 = reference.norm(*tensors, **how)
    adds = residual is not None or x1 is not None or seed is not None or rowscale is not None
    r = _fill(out, residual_out, y, r, r_is_x=not adds and r.dtype == x.dtype)
    return y, y1, r, *_all_kept(x, x1, mask, mask1, return_mask, mask is not None)


def _fill(out: Tensor | None, residual_out: Tensor | None, y: Tensor, r: Tensor, r_is_x: bool) -> Tensor:
    """Copies the results into the caller's buffers; r, safe from what is written to `out`, which may be x itself."""
    if residual_out is not None:
        residual_out.copy_(r.view(residual_out.shape))
    if out is not None:
        if r_is_x:
            r = r.clone()
        out.copy_(y.view(out.shape))
    return r


def _all_kept(x, x1, mask, mask1, return_mask, dropped):
    """The masks as the caller gets them; without dropout all was kept."""
    if not return_mask:
        return None, None
    if not dropped:
        mask, mask1 = (None if t is None else torch.ones(t.shape, dtype=torch.bool, device=t.device) for t in (x, x1))
    return mask, mask1 if x1 is not None else None


def _residual_dtype(x: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> torch.dtype:
    if residual is not None:
        return residual.dtype
    return torch.promote_types(x.dtype, torch.float32) if residual_in_fp32 else x.dtype


def _out_dtype(name, x, out, out_dtype, dtypes):
    if out_dtype is None:
        return x.dtype if out is None else out.dtype
    if out_dtype not in dtypes:
        raise ValueError(f"{name}: out_dtype is {out_dtype}, accepted on {x.device}: {', '.join(map(str, dtypes))}")
    return out_dtype


def _check_buffer(name, argument, buffer, x, dtype):
    if buffer is None:
        return
    check_like_input(name, argument, buffer, x, (dtype,))
    if not buffer.is_contiguous():
        raise ValueError(
            f"{name}: {argument} must be contiguous, got strides {buffer.stride()} for shape {tuple(buffer.shape)}"
        )
    if buffer.is_leaf and buffer.requires_grad:
        raise ValueError(
            f"{name}: {argument} is a leaf that requires a gradient and can't be overwritten; pass {argument}.detach()"
        )


def _seed_tensor(seed: Tensor | int | None, device: torch.device) -> Tensor:
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, int):
        if not -(2**63) <= seed < 2**63:
            seed = (seed + 2**63) % 2**64 - 2**63  # any 64-bit number is a seed
        return torch.full((1,), seed, dtype=torch.int64, device=device)
    return seed
