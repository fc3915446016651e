"""The fused operators in models that exist: `norms` puts norms in place of the model's own, `blocks` rewrites prenorm blocks,
and `loss` replaces the loss of a transformers model."""

from .blocks import GPT2_BLOCK, LLAMA_BLOCK, fuse_prenorm_block
from .loss import replace_loss, restore_loss
from .norms import Pending, replace_norms, restore_norms
from .wiring import BlockLayout

__all__ = [
    "GPT2_BLOCK",
    "LLAMA_BLOCK",
    "BlockLayout",
    "Pending",
    "fuse_prenorm_block",
    "replace_loss",
    "replace_norms",
    "restore_loss",
    "restore_norms",
]
