"""A GPT whose norm sites run the fused op or PyTorch's norms. All else is equal.

Read gpt.py first (from tokens to loss), then block.py (the prenorm block), then norm.py (the choice of the norm).
"""

from model.gpt import GPT

__all__ = ["GPT"]
