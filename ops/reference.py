"""The operator in plain PyTorch: what the kernels are tested against, and what tensors outside CUDA go through.

Differentiable, any device, any float dtype; computes in fp32, or in fp64 where an input is fp64. Drops the same elements as
the kernels, bit for bit. It adds and normalises with the operations that an unfused model uses, so that on the CPU, where
nothing is fused, a model with the fused norms and one with PyTorch's go through the same numbers.

    z = dropout(x · rowscale[:, None]) + dropout(x1 · rowscale1[:, None]) + residual
    r = z rounded to the residual dtype
    x̂ = (r − mean(r)) / √(var(r) + eps)      LayerNorm, biased variance
    x̂ = r / √(mean(r²) + eps)                RMSNorm
    y = x̂ · (weight + offset) + bias,        offset = 1 where weights are zero-centred
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .philox import keep_mask, keep_scale


def norm(
    x: Tensor,
    residual: Tensor | None,
    x1: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    rowscale: Tensor | None,
    rowscale1: Tensor | None,
    seed: Tensor | None,
    *,
    eps: float,
    dropout_p: float,
    zero_centered_weight: bool,
    is_rms_norm: bool,
    out_dtype: torch.dtype,
    residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """y, y1, r, mask, mask1 for x [M, N]; what was not asked for is None. Arguments as checked by `functional`."""
    tensors = (x, residual, x1, weight, bias, weight1, bias1, rowscale, rowscale1)
    double = any(t is not None and t.dtype == torch.float64 for t in tensors)
    compute = torch.float64 if double else torch.float32

    z, mask = dropout(scale_rows(x.to(compute), rowscale), dropout_p, seed, stream=0)
    mask1 = None
    if x1 is not None:
        z1, mask1 = dropout(scale_rows(x1.to(compute), rowscale1), dropout_p, seed, stream=1)
        z = z + z1
    if residual is not None:
        z = z + residual.to(compute)
    r = z.to(residual_dtype)

    # Normalise what is stored: the statistics come from the rounded sum, as backward and every later reader see it.
    def normalise(weight: Tensor | None, bias: Tensor | None) -> Tensor:
        weight, bias = (None if t is None else t.to(compute) for t in (weight, bias))
        if weight is not None and zero_centered_weight:
            weight = weight + 1.0
        if not is_rms_norm:
            return F.layer_norm(r.to(compute), r.shape[-1:], weight, bias, eps).to(out_dtype)
        y = F.rms_norm(r.to(compute), r.shape[-1:], weight, eps)
        return (y if bias is None else y + bias).to(out_dtype)

    y1 = normalise(weight1, bias1) if weight1 is not None or bias1 is not None else None
    return normalise(weight, bias), y1, r, mask, mask1


def scale_rows(x: Tensor, rowscale: Tensor | None) -> Tensor:
    return x if rowscale is None else x * rowscale.to(x.dtype)[:, None]


def dropout(x: Tensor, p: float, seed: Tensor | None, stream: int) -> tuple[Tensor, Tensor | None]:
    """x [M, N] with its dropped elements zero and the others scaled up, and the mask of those kept."""
    if p == 0.0 or seed is None:
        return x, None
    mask = keep_mask(seed, x.shape[0], x.shape[1], p, stream)
    return torch.where(mask, x * keep_scale(p), 0.0), mask
