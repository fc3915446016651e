"""What a norm is: its statistic, its normalisation and its derivative, for all tile shapes. A new norm is a branch in each.

    d  = r − mean(r) if the norm centres, else r          `deviation`
    x̂  = d · rstd,   rstd = f(Σ s(d) / N)                  `normalised`; `spread` is s, `inverse` is f
    x̂  = tanh(α · r) of a norm that is pointwise           α, the same for all rows, is where rstd is for the others
    ∂  : dr = rstd · (g − t(x̂) · mean(g · x̂) − mean(g))    `norm_gradient`; `direction` is t; the last mean only if it centres

LayerNorm: Ba, Kiros & Hinton 2016; RMSNorm: Zhang & Sennrich 2019; Dynamic Tanh: arXiv:2503.10622. `reference.NORMS` has the
same formulas in PyTorch.
"""

import triton
import triton.language as tl

from ..reference import Norm

LAYERNORM = tl.constexpr(Norm.layernorm.value)
RMSNORM = tl.constexpr(Norm.rmsnorm.value)
DYT = tl.constexpr(Norm.dyt.value)


@triton.constexpr_function
def centres(NORM):
    """Whether the norm subtracts the mean of a row."""
    return Norm(NORM).centres


@triton.constexpr_function
def statistics(NORM):
    """How many numbers of a row backward gets: rstd, and the mean if the norm centres."""
    return Norm(NORM).statistics


@triton.constexpr_function
def pointwise(NORM):
    """Whether x̂ of an element depends on that element alone. Then b_rstd is the factor α of all rows."""
    return Norm(NORM).statistics == 0


@triton.constexpr_function
def scalars(NORM):
    """How many learned numbers the norm has."""
    return Norm(NORM).scalars


@triton.jit
def deviation(b, b_mean, NORM: tl.constexpr):
    """What the statistic is taken of, fp32 [ROWS, width]; b_mean is unused where the norm does not centre."""
    if centres(NORM):
        b = b - b_mean[:, None]
    return b


@triton.jit
def spread(b_deviation, NORM: tl.constexpr):
    """The terms of the statistic, fp32 [ROWS, width]."""
    tl.static_assert(NORM == LAYERNORM or NORM == RMSNORM or pointwise(NORM), "unknown norm")
    return b_deviation * b_deviation


@triton.jit
def inverse(b_spread, N, eps, NORM: tl.constexpr):
    """rstd, fp32 [ROWS], from the sum of `spread` over the N columns."""
    return tl.rsqrt(b_spread * (1.0 / N) + eps)


@triton.jit
def statistic(p, b_spread, b_mean, eps, VARIANT: tl.constexpr):
    """rstd and mean, fp32 [ROWS], from the sum of `spread` over the columns and the mean."""
    if pointwise(VARIANT.NORM):
        b_rstd = load_factor(p.scalars, VARIANT)
    else:
        b_rstd = inverse(b_spread, VARIANT.N, eps, VARIANT.NORM)
    return b_rstd, b_mean


@triton.jit
def load_factor(p_scalars, VARIANT: tl.constexpr):
    """α of a pointwise norm, fp32 [ROWS]."""
    b_factor = tl.full([VARIANT.ROWS], 1.0, tl.float32)
    if p_scalars is not None:
        b_factor *= tl.load(p_scalars).to(tl.float32)
    return b_factor


@triton.jit
def normalised(b, b_mean, b_rstd, NORM: tl.constexpr):
    """x̂, fp32 [ROWS, width], of a block of the stream."""
    b_xhat = deviation(b, b_mean, NORM) * b_rstd[:, None]
    if NORM == DYT:
        b_xhat = tanh(b_xhat)
    return b_xhat


@triton.jit
def tanh(b):
    """To 3e-7 of itself everywhere: 1 − 2 / (e²ᵇ + 1) loses digits near zero, where the Taylor series does not."""
    b_square = b * b
    b_series = b + b * b_square * (-1 / 3 + b_square * (2 / 15 + b_square * (-17 / 315 + b_square * (62 / 2835))))
    b_far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(b)) + 1.0)
    return tl.where(tl.abs(b) < 0.25, b_series, tl.where(b < 0.0, -b_far, b_far))


@triton.jit
def slope(b_xhat, NORM: tl.constexpr):
    """The derivative of a pointwise norm, by α · r: fp32 [ROWS, width]."""
    tl.static_assert(NORM == DYT, "unknown norm")
    return 1.0 - b_xhat * b_xhat


@triton.jit
def direction(b_xhat, NORM: tl.constexpr):
    """How the statistic grows with each element, relative to rstd: fp32 [ROWS, width]."""
    tl.static_assert(NORM == LAYERNORM or NORM == RMSNORM, "unknown norm")
    return b_xhat


@triton.jit
def norm_gradient(b_g, b, b_xhat, b_c1, b_c2, b_mean, b_rstd, NORM: tl.constexpr):
    """The gradient through the norm of b, fp32 [ROWS, width]; b_c1 = rstd · mean(g · x̂), b_c2 = rstd · mean(g)."""
    b_gradient = b_g * b_rstd[:, None]
    if centres(NORM):
        b_gradient -= b_c2[:, None]
    if pointwise(NORM):
        b_gradient *= slope(b_xhat, NORM)
    else:
        b_gradient -= direction(b_xhat, NORM) * b_c1[:, None]
    return b_gradient


@triton.jit
def store_stats(p, b_rstd, b_mean, at, VARIANT: tl.constexpr):
    """rstd, and the mean where the norm centres: fp32 [M, statistics]."""
    if p.stats is not None:
        p_row = p.stats + at.rows * statistics(VARIANT.NORM)
        tl.store(p_row, b_rstd, mask=at.m_row)
        if centres(VARIANT.NORM):
            tl.store(p_row + 1, b_mean, mask=at.m_row)


@triton.jit
def load_stats(p, at, VARIANT: tl.constexpr):
    """rstd and mean, fp32 [ROWS]; the mean is 0 where the norm does not centre."""
    b_mean = tl.zeros([VARIANT.ROWS], tl.float32)
    if pointwise(VARIANT.NORM):
        b_rstd = load_factor(p.scalars, VARIANT)
    else:
        p_row = p.stats + at.rows * statistics(VARIANT.NORM)
        b_rstd = tl.load(p_row, mask=at.m_row, other=0.0)
        if centres(VARIANT.NORM):
            b_mean = tl.load(p_row + 1, mask=at.m_row, other=0.0)
    return b_rstd, b_mean
