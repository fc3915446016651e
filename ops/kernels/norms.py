"""What a norm is: its statistic, its normalisation and its derivative, for all tile shapes. A new norm is a branch in each.

    d  = r − mean(r) if the norm centres, else r          `deviation`
    x̂  = d · rstd,   rstd = f(Σ s(d) / N)                  `normalised`; `spread` is s, `inverse` is f
    x̂  = φ(α · r + s) of a norm that is pointwise          `slope` is φ′; α and s are where others have rstd and mean
    ∂  : dr = rstd · (g − t(x̂) · mean(g · x̂) − mean(g))    `norm_gradient`; `direction` is t; the last mean only if it centres

LayerNorm: Ba, Kiros & Hinton 2016; RMSNorm: Zhang & Sennrich 2019; Dynamic Tanh: arXiv:2503.10622; Derf: arXiv:2512.10938.
`reference.NORMS` has the same formulas in PyTorch.
"""

import triton
import triton.language as tl

from ..reference import Norm
from .rows import add_pairs, tanh

LAYERNORM = tl.constexpr(Norm.layernorm.value)
RMSNORM = tl.constexpr(Norm.rmsnorm.value)
DYT = tl.constexpr(Norm.dyt.value)
DERF = tl.constexpr(Norm.derf.value)
NONE = tl.constexpr(Norm.none.value)


@triton.constexpr_function
def centres(NORM):
    """Whether the norm subtracts the mean of a row."""
    return Norm(NORM).statistics == 2


@triton.constexpr_function
def statistics(NORM):
    """How many numbers of a row backward gets: rstd, and the mean if the norm centres."""
    return Norm(NORM).statistics


@triton.constexpr_function
def pointwise(NORM):
    """Whether x̂ of an element depends on that element alone. Then b_rstd and b_mean are α and s, the same for all rows."""
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
    tl.static_assert(NORM == LAYERNORM or NORM == RMSNORM, "unknown norm")
    return b_deviation * b_deviation


@triton.jit
def inverse(b_spread, N, eps, NORM: tl.constexpr):
    """rstd, fp32 [ROWS], from the sum of `spread` over the N columns."""
    tl.static_assert(NORM == LAYERNORM or NORM == RMSNORM, "unknown norm")
    return tl.rsqrt(b_spread * (1.0 / N) + eps)


@triton.jit
def load_scalars(p_scalars, NORM: tl.constexpr, ROWS: tl.constexpr):
    """α and s of a pointwise norm, fp32 [ROWS] twice; 1 and 0 where there are none."""
    b_alpha = tl.full([ROWS], 1.0, tl.float32)
    b_shift = tl.zeros([ROWS], tl.float32)
    if p_scalars is not None:
        b_alpha *= tl.load(p_scalars).to(tl.float32)
        if scalars(NORM) > 1:
            b_shift += tl.load(p_scalars + 1).to(tl.float32)
    return b_alpha, b_shift


@triton.jit
def normalised(b, b_mean, b_rstd, NORM: tl.constexpr):
    """x̂, fp32 [ROWS, width], of a block of the stream."""
    if NORM == NONE:
        b_xhat = b
    elif NORM == DYT:
        b_xhat = tanh(b * b_rstd[:, None])
    elif NORM == DERF:
        b_xhat = tl.erf(b * b_rstd[:, None] + b_mean[:, None])
    else:
        tl.static_assert(NORM == LAYERNORM or NORM == RMSNORM, "unknown norm")
        b_xhat = deviation(b, b_mean, NORM) * b_rstd[:, None]
    return b_xhat


@triton.jit
def slope(b, b_xhat, b_mean, b_rstd, NORM: tl.constexpr):
    """The derivative of a pointwise norm by α · r + s: fp32 [ROWS, width]."""
    tl.static_assert(NORM == DYT or NORM == DERF, "unknown norm")
    if NORM == DYT:
        b_slope = 1.0 - b_xhat * b_xhat
    else:
        b_argument = b * b_rstd[:, None] + b_mean[:, None]
        b_slope = 1.1283791670955126 * tl.exp(-b_argument * b_argument)  # 2/√π
    return b_slope


@triton.jit
def direction(b_xhat, NORM: tl.constexpr):
    """How the statistic grows with each element, relative to rstd: fp32 [ROWS, width]."""
    tl.static_assert(NORM == LAYERNORM or NORM == RMSNORM, "unknown norm")
    return b_xhat


@triton.jit
def norm_gradient(b_g, b, b_xhat, b_c1, b_c2, b_mean, b_rstd, NORM: tl.constexpr):
    """The gradient through the norm of b, fp32 [ROWS, width]; b_c1 = rstd · mean(g · x̂), b_c2 = rstd · mean(g)."""
    if NORM == NONE:
        b_gradient = b_g
    else:
        b_gradient = b_g * b_rstd[:, None]
        if centres(NORM):
            b_gradient -= b_c2[:, None]
        if pointwise(NORM):
            b_gradient *= slope(b, b_xhat, b_mean, b_rstd, NORM)
        else:
            b_gradient -= direction(b_xhat, NORM) * b_c1[:, None]
    return b_gradient


@triton.jit
def row_sums(b_g, b_xhat, NORM: tl.constexpr):
    """fp32 [ROWS] twice: the sums over the columns of all blocks of g · x̂ and of g (0 where the norm does not centre), in one
    reduction."""
    b_product = b_g[0] * b_xhat[0]
    b_sum = b_g[0]
    for i in tl.static_range(1, len(b_g)):
        b_product += b_g[i] * b_xhat[i]
        b_sum += b_g[i]
    b_c1 = tl.zeros([b_sum.shape[0]], tl.float32)
    b_c2 = b_c1
    if centres(NORM):
        b_c1, b_c2 = tl.reduce((b_product, b_sum), 1, add_pairs)
    elif not pointwise(NORM):
        b_c1 = tl.sum(b_product, 1)
    return b_c1, b_c2


@triton.jit
def through_norm(b_dr, b_g, b_r, b_xhat, b_c1, b_c2, b_mean, b_rstd, NORM: tl.constexpr, N: tl.constexpr):
    """dr + the gradient of g through the norm of N columns, in blocks; b_c1, b_c2: sums over the columns, as of `row_sums`."""
    b_dz = ()
    b_c1 *= b_rstd * (1.0 / N)
    b_c2 *= b_rstd * (1.0 / N)
    for i in tl.static_range(len(b_g)):
        b = norm_gradient(b_g[i], b_r[i], b_xhat[i], b_c1, b_c2, b_mean, b_rstd, NORM)
        if len(b_dr) > 0:
            b += b_dr[i]
        b_dz += (b,)
    return b_dz


@triton.jit
def store_stats(p_stats, b_rstd, b_mean, at, NORM: tl.constexpr):
    """rstd, and the mean where the norm centres: fp32 [M, statistics]."""
    if p_stats is not None:
        p_row = p_stats + at.rows * statistics(NORM)
        tl.store(p_row, b_rstd, mask=at.m_row)
        if centres(NORM):
            tl.store(p_row + 1, b_mean, mask=at.m_row)


@triton.jit
def load_stats(p_stats, p_scalars, at, NORM: tl.constexpr, ROWS: tl.constexpr):
    """rstd and mean, fp32 [ROWS]; the mean is 0 where the norm does not centre. α and s of a pointwise norm."""
    if pointwise(NORM):
        b_rstd, b_mean = load_scalars(p_scalars, NORM, ROWS)
    else:
        p_row = p_stats + at.rows * statistics(NORM)
        b_rstd = tl.load(p_row, mask=at.m_row, other=0.0)
        b_mean = tl.zeros([ROWS], tl.float32)
        if centres(NORM):
            b_mean = tl.load(p_row + 1, mask=at.m_row, other=0.0)
    return b_rstd, b_mean
