"""Fused prenorm operators: residual + dropout + LayerNorm / RMSNorm in one Triton kernel, forward and backward.

Depends on torch and triton only. Copy this folder into another project and import it under any name.
"""

from typing import TYPE_CHECKING, Any

from .activation import gated_activation_fn
from .dropout import dropout_mask, seeded_dropout
from .gated import GatedRMSNorm, gated_rms_norm_fn
from .kernels import backend_for
from .linear import layer_norm_linear_fn
from .loss import cross_entropy_fn, linear_cross_entropy_fn
from .modulated import ModulatedNorm, modulated_norm_fn
from .modules import LayerNorm, RMSNorm
from .norm import layer_norm_fn, norm_fn, rms_norm_fn
from .reference import Norm
from .rotary import rotary_qk_fn, rotary_qkv_fn
from .softmax import log_softmax_fn, softmax_fn

if TYPE_CHECKING:
    from .adopting import (
        Adoption,
        adopt,
        fuse_prenorm_block,
        replace_loss,
        replace_mlps,
        replace_norms,
        replace_rotary,
        restore_loss,
        restore_mlps,
        restore_norms,
        restore_rotary,
    )  # fmt: skip

__version__ = "0.1.0"

__all__ = [
    "Adoption",
    "GatedRMSNorm",
    "LayerNorm",
    "ModulatedNorm",
    "Norm",
    "RMSNorm",
    "adopt",
    "backend_for",
    "cross_entropy_fn",
    "dropout_mask",
    "fuse_prenorm_block",
    "gated_activation_fn",
    "gated_rms_norm_fn",
    "layer_norm_fn",
    "layer_norm_linear_fn",
    "linear_cross_entropy_fn",
    "log_softmax_fn",
    "modulated_norm_fn",
    "norm_fn",
    "replace_loss",
    "replace_mlps",
    "replace_norms",
    "replace_rotary",
    "restore_loss",
    "restore_mlps",
    "restore_norms",
    "restore_rotary",
    "rms_norm_fn",
    "rotary_qk_fn",
    "rotary_qkv_fn",
    "seeded_dropout",
    "softmax_fn",
]


def __getattr__(name: str) -> Any:
    """`adopt` and what belongs to it, imported when it is first asked for: training runs none of that code."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import adopting

    return getattr(adopting, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
