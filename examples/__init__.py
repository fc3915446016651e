"""Adopting the norms in somebody else's model. For example: python examples/nanogpt_block.py"""
