"""The Triton kernels. Read `forward` first, then `backward`; `norms` has the formulas that both share.

Names: `p.` pointers, `n.` numbers, `HOW.` constants of the compiled variant (`rows.Variant`); `b_` a block in registers, `m_` a
mask. An absent pointer is None and a constant, so `if p.x1 is not None` costs nothing when the kernel runs. All arithmetic is
fp32.
"""
