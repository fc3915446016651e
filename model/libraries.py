"""Norm sites of other libraries, which fuse a part of the site or all of it: norm.impl=flash_attn, liger, quack.

Each takes the tensors of a site and what it does, and returns what `model.sites.torch_site` returns. What a library has no
kernel for, PyTorch computes before it, as its users do. `configs.rules` refuses what a library can't do. The libraries are
imported at the first call.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from configs.schema import NormImpl
from model.sites import Affine, How, Inputs, Outputs
from ops import Norm


def flash_attn(inputs: Inputs, affine: Affine, how: How) -> Outputs:
    """FlashAttention's Triton norm: the whole site in one kernel, with dropout masks of its own."""
    found = _function("flash_attn.ops.triton.layer_norm", "layer_norm_fn")(
        inputs.x, affine.weight, affine.bias, residual=inputs.residual, x1=inputs.x1, weight1=affine.weight1,
        bias1=affine.bias1, eps=how.eps, dropout_p=how.dropout, rowscale=inputs.rowscale, prenorm=how.prenorm,
        residual_in_fp32=how.stream_dtype == torch.float32, is_rms_norm=how.kind == Norm.rmsnorm, out_dtype=how.out_dtype,
    )  # fmt: skip
    return tuple(found) if isinstance(found, list | tuple) else found


def liger(inputs: Inputs, affine: Affine, how: How) -> Outputs:
    """Liger-Kernel: add + RMSNorm in one kernel where x and the stream have one dtype, else its norm after PyTorch's add."""
    x, residual = inputs.x, inputs.residual
    if how.kind == Norm.rmsnorm and residual is not None and residual.dtype == x.dtype:
        apply = _function("liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction.apply")
        y, stream = apply(x, residual, affine.weight, how.eps)
    else:
        stream = (x if residual is None else residual + x).to(how.stream_dtype)
        if how.kind == Norm.rmsnorm:
            # not in place: it would write over dy, which autograd may still need
            apply = _function("liger_kernel.ops.rms_norm", "LigerRMSNormFunction.apply")
            y = apply(stream, affine.weight, how.eps, 0.0, "llama", False)
        else:
            assert affine.weight is not None  # configs.rules
            bias = torch.zeros_like(affine.weight) if affine.bias is None else affine.bias
            y = _function("liger_kernel.ops.layer_norm", "LigerLayerNormFunction.apply")(stream, affine.weight, bias, how.eps)
    y = y.to(how.out_dtype)
    return (y, stream) if how.prenorm else y


def quack(inputs: Inputs, affine: Affine, how: How) -> Outputs:
    """quack: add + RMSNorm in one CuTe kernel."""
    found = _function("quack", "rmsnorm")(
        inputs.x, affine.weight, residual=inputs.residual, out_dtype=how.out_dtype, residual_dtype=how.stream_dtype,
        eps=how.eps, prenorm=how.prenorm,
    )  # fmt: skip
    return tuple(found) if isinstance(found, list | tuple) else found


SITES: dict[NormImpl, Callable[[Inputs, Affine, How], Outputs]] = {
    NormImpl.flash_attn: flash_attn,
    NormImpl.liger: liger,
    NormImpl.quack: quack,
}


@cache
def _function(module: str, name: str) -> Callable[..., Any]:
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
