"""The fused operators in models that exist. `whole` adopts a model in one call, or one stack of blocks; `norms` puts norms in
place of the model's own, `rotary` the rotary positions of attention, `mlp` the activation of gated MLPs, and `loss` the loss of
a transformers model."""

from .loss import replace_loss, restore_loss
from .mlp import replace_mlps, restore_mlps
from .norms import replace_norms, restore_norms
from .rotary import replace_rotary, restore_rotary
from .whole import Adoption, adopt, fuse_prenorm_block

__all__ = [
    "Adoption",
    "adopt",
    "fuse_prenorm_block",
    "replace_loss",
    "replace_mlps",
    "replace_norms",
    "replace_rotary",
    "restore_loss",
    "restore_mlps",
    "restore_norms",
    "restore_rotary",
]
