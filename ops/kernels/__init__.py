"""The Triton kernels, and which devices run them.

Read `forward` first, then `backward`; `norms` has the formulas that both share.

Names: `p.` pointers, `n.` numbers, `VARIANT.` or `HOW.` constants of the compiled variant; `b_` a block in registers, `m_` a
mask. An absent pointer is None and a constant, so `if p.x1 is not None` costs nothing when the kernel runs. All arithmetic is
fp32.
"""

import os

import torch

# Triton reads this variable when a kernel is defined, so it is read once, like there.
INTERPRET = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def runs_kernels(device: torch.device) -> bool:
    """Whether tensors on `device` go through the kernels; all others take `reference`."""
    return device.type == "cuda" or (INTERPRET and device.type == "cpu")


def backend_for(device: torch.device | str) -> str:
    """For people to read: what runs the fused operators on `device`."""
    device = torch.device(device)
    if not runs_kernels(device):
        return "PyTorch reference"
    return "Triton interpreter" if device.type == "cpu" else "Triton kernels"
