"""Whether an arm's own dropout is dropout: the rate at which it drops, and whether its masks repeat.

A norm site of the arm's implementation gets ones, twice, on an empty stream: what is zero has been dropped. Under torch.compile
both calls are in one graph, as the sites of a compiled model are. Elements of independent masks are uncorrelated at any
distance, within a mask and between two. With n elements such a correlation is normal with deviation 1/√n. The largest over all
2n distances (found by a Fourier transform) must stay below what chance exceeds once in 1/LEVEL checks, and so must the
deviation of the rate.
"""

import math

import torch
from torch import Tensor

from ablation.arms import Arm
from ablation.records import Masks
from configs.schema import DropoutMasks, NormImpl, ResidualDtype
from model.norm import NormSite

ELEMENTS = 1 << 20  # of a mask, about
LEVEL = 1e-4


def check_masks(arm: Arm, compiled: bool) -> Masks | None:
    """The masks of the arm's implementation at the width, dtypes and dropout of its model. None: it has no dropout, or masks
    that seeds decide."""
    cfg, device = arm.cfg, arm.precision.device
    shared = cfg.norm.dropout_masks is DropoutMasks.shared and cfg.norm.impl is not NormImpl.fused
    if not cfg.model.dropout or arm.other or shared:
        return None
    width, fp32 = cfg.model.width, cfg.model.residual_dtype is ResidualDtype.fp32
    site = NormSite(width, cfg.norm, bias=cfg.model.bias, dropout=cfg.model.dropout, residual_in_fp32=fp32).to(device)
    x = torch.ones(1, max(2, ELEMENTS // width), width, device=device, dtype=arm.precision.dtype)
    stream = torch.zeros_like(x, dtype=torch.float32 if fp32 else x.dtype)

    def twice(x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        return site(x, stream)[1], site(x, stream)[1]

    with torch.no_grad(), arm.precision.autocast():
        first, second = (torch.compile(twice, fullgraph=True) if compiled else twice)(x, stream)
    return judge_masks(arm.name, cfg.model.dropout, first == 0, second == 0)


def judge_masks(arm: str, p: float, first: Tensor, second: Tensor) -> Masks:
    """Looks at two masks of one shape, True where something was dropped."""
    a, b = (mask.flatten().double().cpu() for mask in (first, second))
    n = a.numel()
    rate = float(torch.cat((a, b)).mean())
    transforms = [torch.fft.rfft(mask - mask.mean()) for mask in (a, b)]
    scale = max(float(a.var(correction=0) * b.var(correction=0)) ** 0.5 * n, 1e-30)
    within, between = (torch.fft.irfft(transforms[0].conj() * other, n) / scale for other in transforms)
    within[0] = 0  # an element is like itself
    found = torch.cat((within, between)).abs()
    at = int(found.argmax())
    most = math.sqrt(2 * math.log(2 * 2 * n / LEVEL)) / math.sqrt(n)
    # The fused kernel rounds p to a multiple of 2⁻¹⁶.
    off = abs(rate - p) - 2**-17
    holds = float(found[at]) < most and off < math.sqrt(2 * math.log(2 / LEVEL) * p * (1 - p) / (2 * n))
    lag = min(at % n, n - at % n)
    where = f"{lag:,} elements apart" if at < n else f"two calls, {lag:,} elements apart" if lag else "two calls"
    return Masks(arm, p, rate, n, where, float(found[at]), holds)
