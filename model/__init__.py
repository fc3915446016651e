"""A GPT whose norm sites run either the fused op or PyTorch's norms, everything else being equal.

Read gpt.py first (the path from tokens to loss), then block.py (the reordered prenorm block), then norm.py (the switch).
"""

from model.gpt import GPT

__all__ = ["GPT"]
