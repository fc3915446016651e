"""Fused prenorm operators: residual + dropout + LayerNorm / RMSNorm in one Triton kernel, forward and backward.

Depends on torch and triton only. Copy this folder into another project and import it under any name.
"""

from .backend import backend_for
from .functional import dropout_mask, layer_norm_fn, rms_norm_fn, seeded_dropout
from .linear import layer_norm_linear_fn
from .modules import LayerNorm, RMSNorm

__all__ = [
    "LayerNorm",
    "RMSNorm",
    "backend_for",
    "dropout_mask",
    "layer_norm_fn",
    "layer_norm_linear_fn",
    "rms_norm_fn",
    "seeded_dropout",
]
