"""The fused operators in models that exist. `whole` adopts a model in one call; `norms` puts norms in place of the model's own,
`blocks` lets them compute residual sums along, and `loss` replaces the loss of a transformers model."""

from .blocks import GPT2_BLOCK, LLAMA_BLOCK, BlockLayout, fuse_prenorm_block
from .lazy import Pending
from .loss import replace_loss, restore_loss
from .norms import replace_norms, restore_norms
from .whole import Adoption, adopt

__all__ = [
    "GPT2_BLOCK",
    "LLAMA_BLOCK",
    "Adoption",
    "BlockLayout",
    "Pending",
    "adopt",
    "fuse_prenorm_block",
    "replace_loss",
    "replace_norms",
    "restore_loss",
    "restore_norms",
]
