"""The operator in plain PyTorch: what the kernels are tested against, and what tensors outside CUDA go through.

`norm.norm_fn` has the formulas. Differentiable, on any device; computes in fp32, or in fp64 where an input is fp64. Drops
the same elements as the kernels, bit for bit. It adds and normalises with the operations that an unfused model uses, so that on
the CPU, where nothing is fused, a model with the fused norms and one with PyTorch's go through the same numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .philox import keep_mask, keep_scale
from .records import Inputs, Norm, Options, Outputs


def layer_norm(r: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, _: None = None) -> Tensor:
    return F.layer_norm(r, r.shape[-1:], weight, bias, eps)


def rms_norm(r: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, _: None = None) -> Tensor:
    y = F.rms_norm(r, r.shape[-1:], weight, eps)
    return y if bias is None else y + bias


def dynamic_tanh(r: Tensor, weight: Tensor | None, bias: Tensor | None, _: float, alpha: Tensor | None = None) -> Tensor:
    """arXiv:2503.10622"""
    return affine(torch.tanh(r if alpha is None else alpha * r), weight, bias)


def dynamic_erf(r: Tensor, weight: Tensor | None, bias: Tensor | None, _: float, scalars: Tensor | None = None) -> Tensor:
    """arXiv:2512.10938"""
    return affine(torch.erf(r if scalars is None else scalars[0] * r + scalars[1]), weight, bias)


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


# Each takes r (..., N), weight and bias (N,) in r's dtype or None for 1 and 0, eps, and the learned scalars or None.
NORMS: dict[int, Callable[..., Tensor]] = {
    Norm.layernorm: layer_norm,
    Norm.rmsnorm: rms_norm,
    Norm.dyt: dynamic_tanh,
    Norm.derf: dynamic_erf,
    Norm.none: affine,
}


def norm(inputs: Inputs, options: Options) -> Outputs:
    """All but what is kept for backward, for checked inputs; r is there whether or not it is to be stored."""
    shape = inputs.x.shape
    compute = torch.float64 if any(t is not None and t.dtype == torch.float64 for t in inputs) else torch.float32

    def normalised(norm: int, t: Tensor, weight: Tensor | None, bias: Tensor | None, scalars: Tensor | None) -> Tensor:
        weight, bias, scalars = (None if p is None else p.to(compute) for p in (weight, bias, scalars))
        if weight is not None and options.zero_centered_weight:
            weight = weight + 1.0
        return NORMS[norm](t.to(compute), weight, bias, options.eps, scalars)

    x = inputs.x
    if options.branch:
        if inputs.rowscale is not None and not inputs.rowscale.requires_grad:
            x = torch.where(inputs.rowscale.reshape(*shape[:-1], 1) == 0.0, 0.0, x)
        x = normalised(options.branch_norm, x, inputs.branch_weight, inputs.branch_bias, inputs.branch_scalars)
    z, mask = _branch(x, inputs.rowscale, inputs.seed, options.dropout_p, 0, compute)
    mask1 = None
    if inputs.x1 is not None:
        z1, mask1 = _branch(inputs.x1, inputs.rowscale1, inputs.seed, options.dropout_p, 1, compute)
        z = z + z1
    if inputs.residual is not None:
        residual = inputs.residual.reshape(z.shape).to(compute)
        z = z + (residual if options.residual_scale == 1.0 else residual * options.residual_scale)
    r = z.to(options.residual_dtype)

    # Normalise what is stored: the statistics come from the rounded sum, as backward and every later reader see it.
    def normalise(weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return normalised(options.norm, r, weight, bias, inputs.scalars).to(options.out_dtype)

    y1 = None
    if inputs.weight1 is not None or inputs.bias1 is not None:
        y1 = normalise(inputs.weight1, inputs.bias1)
    others = [None if t is None else t.view(shape) for t in (r, y1, mask, mask1)]
    statistics = _magnitudes(r.detach().view(shape)) if options.return_statistics else (None, None)
    return Outputs(normalise(inputs.weight, inputs.bias).view(shape), *others, *statistics)


def _magnitudes(r: Tensor) -> tuple[Tensor, Tensor]:
    """Root mean square and largest magnitude of each row, fp32."""
    r = r.to(torch.promote_types(r.dtype, torch.float32))
    return r.square().mean(-1).sqrt().float(), r.abs().amax(-1).float()


def _branch(
    x: Tensor, rowscale: Tensor | None, seed: Tensor | None, p: float, stream: int, compute: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """dropout(x · rowscale), [M, N], and the mask."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).to(compute)
    return dropout(scale_rows(rows, None if rowscale is None else rowscale.reshape(-1)), p, seed, stream)


def scale_rows(x: Tensor, rowscale: Tensor | None) -> Tensor:
    return x if rowscale is None else _ScaleRows.apply(x, rowscale.to(x.dtype)[:, None])


class _ScaleRows(torch.autograd.Function):
    """x [M, N] · scale [M, 1]. A row with a scale of 0 counts as zeros, whatever it holds, and its gradient is zero; the scale
    has its gradient all the same."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, scale):
        return torch.where(scale == 0.0, 0.0, x * scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dz):
        x, scale = ctx.saved_tensors
        dx = _ScaleRows.apply(dz, scale) if ctx.needs_input_grad[0] else None
        return dx, (dz * x).sum(1, keepdim=True) if ctx.needs_input_grad[1] else None


def dropout(x: Tensor, p: float, seed: Tensor | None, stream: int) -> tuple[Tensor, Tensor | None]:
    """x [M, N] with its dropped elements zero and the others scaled up, and the mask of those kept."""
    if p == 0.0 or seed is None:
        return x, None
    mask = keep_mask(seed, x.shape[0], x.shape[1], p, stream)
    return torch.where(mask, x * keep_scale(p), 0.0), mask
