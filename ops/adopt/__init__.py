"""The fused norms in models that exist: `norms` puts them in place of the model's own, `blocks` rewrites prenorm blocks."""

from .blocks import GPT2_BLOCK, LLAMA_BLOCK, fuse_prenorm_block
from .norms import Pending, replace_norms, restore_norms
from .wiring import BlockLayout

__all__ = ["GPT2_BLOCK", "LLAMA_BLOCK", "BlockLayout", "Pending", "fuse_prenorm_block", "replace_norms", "restore_norms"]
