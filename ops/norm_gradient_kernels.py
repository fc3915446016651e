"""The terms of backward, block by block: x̂, g and the gradient through the norm. Names as in `forward_kernels`."""

import triton
import triton.language as tl

from .row_kernels import block_cols, block_count, inside


@triton.jit
def normalise(
    b_r, b_mean, b_rstd, first_col, N,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, IS_RMS: tl.constexpr,
):  # fmt: skip
    """x̂ = (r − mean) · rstd, zero in the columns past the row's end."""
    b_xhat = ()
    for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
        if IS_RMS:
            b = b_r[i] * b_rstd[:, None]
        else:
            b = (b_r[i] - b_mean[:, None]) * b_rstd[:, None]
            if not inside(i, BLOCK_N, TAIL_N, EVEN_N):
                # A mean that overflows there would make 0 · ∞ in the sums over columns.
                b = tl.where((block_cols(i, first_col, BLOCK_N, TAIL_N, VECTOR) < N)[None, :], b, 0.0)
        b_xhat += (b,)
    return b_xhat


@triton.jit
def weighted_sum(b_dy, b_weight, b_dy1, b_weight1, HAS_DY: tl.constexpr, HAS_DY1: tl.constexpr):
    """g = dy · weight + dy1 · weight1, of which at least one is there."""
    b_g = ()
    for i in tl.static_range(len(b_dy)):
        if HAS_DY and HAS_DY1:
            b = b_dy[i] * b_weight[i] + b_dy1[i] * b_weight1[i]
        elif HAS_DY:
            b = b_dy[i] * b_weight[i]
        else:
            b = b_dy1[i] * b_weight1[i]
        b_g += (b,)
    return b_g


@triton.jit
def add_norm_gradient(b_dz, b_g, b_base, b_slope, b_offset, b_rstd, HAS_DZ: tl.constexpr, IS_RMS: tl.constexpr):
    """dz + rstd · (g − x̂ · c1 − c2), as dz + rstd · (g + base · slope + offset).

    base is x̂, slope −c1 and offset, for LayerNorm alone, −c2. Or base is r − mean and slope −rstd · c1. Or base is r itself
    and offset −c2 − slope · mean.
    """
    b_sum = ()
    for i in tl.static_range(len(b_dz)):
        if HAS_DZ or IS_RMS:
            # Multiplied out this would be as many instructions, and three tiles would spill.
            b = b_g[i] + b_base[i] * b_slope[:, None]
            if not IS_RMS:
                b += b_offset[:, None]
            b = b_dz[i] + b * b_rstd[:, None]
        else:
            # Multiplied out, each product has its sum: an instruction less.
            b = b_base[i] * (b_slope * b_rstd)[:, None] + (b_offset * b_rstd)[:, None]
            b += b_g[i] * b_rstd[:, None]
        b_sum += (b,)
    return b_sum


@triton.jit
def add_rows(b_row, b_other):
    b_sum = ()
    for i in tl.static_range(len(b_row)):
        b_sum += (b_row[i] + (tl.sum(b_other[i], 0) if len(b_row[i].shape) == 1 else b_other[i]),)
    return b_sum


@triton.jit
def add_product(b_row, b_factor, b_other):
    b_sum = ()
    for i in tl.static_range(len(b_row)):
        b = b_factor[i] * b_other[i]
        b_sum += (b_row[i] + (tl.sum(b, 0) if len(b_row[i].shape) == 1 else b),)
    return b_sum
