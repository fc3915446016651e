"""Adopting the norms in somebody else's model. From the root of the checkout: python -m examples.nanogpt_block"""
