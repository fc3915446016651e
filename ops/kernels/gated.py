"""RMSNorm beside a gate, forward and backward, for rows of one group of columns each.

    norm first   y = x̂ · w · a(z),   x̂ = x · rstd(x)           a: silu or sigmoid
    gate first   y = ĥ · w,          ĥ = h · rstd(h),  h = x · a(z)

With h the norm's input (x itself where it comes first) and u the upstream gradient of ĥ · w (dy · a(z) there, else dy):

    g = u · w;   dh = rstd · (g − ĥ · mean(g · ĥ));   dw = Σ_rows u · ĥ
    norm first   dx = dh,          dz = dy · w · ĥ · a′(z)
    gate first   dx = dh · a(z),   dz = dh · x · a′(z)

Nothing of forward is kept but its inputs: backward finds rstd in the same reduction over a row as the mean. So forward moves
three elements and backward five. Of columns in several groups each program has one group, as if that were all of the row.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .activation import sigmoid
from .constants import Constants
from .norms import RMSNORM, inverse, norm_gradient, normalised
from .nvidia import widen
from .rows import (
    Place,
    add_pairs,
    block_cols,
    block_mask,
    block_of,
    blocks,
    load_weights,
    place,
    row_sum,
    times,
)
from .weight_gradients import add_stored_partials, store_partials, zero_sums


@dataclass(frozen=True)
class GatedVariant(Constants):
    """What a kernel is compiled for; the fields that `rows.Variant` has too mean the same."""

    N: int  # columns in a group
    GROUPS: int  # in a row
    NORM_FIRST: bool
    SIGMOID: bool  # the gate is σ(z); else z · σ(z)
    OFFSET: float
    ROWS: int
    BLOCK_N: int
    VECTOR: int
    X_STEP: int  # rows of x lie a multiple of so many elements apart
    Z_STEP: int
    TWO_LEVELS: bool  # rows lie at one distance within a token, and tokens at another
    LOOPED: bool = False
    AGAIN: bool = False  # backward keeps rows in their own dtype while it sums them up
    STAGES: int = 1
    EARLY_START: bool = False
    WANTED: tuple[bool] = (False,)  # whether the gradient of the weight is
    SLICES: int = 1  # always, for `rows.blocks`


class Pointers(NamedTuple):
    x: Any  # M rows, which lie as they are said to
    z: Any
    weight: Any  # [GROUPS · N]
    y: Any  # [M, GROUPS · N]


class BackwardPointers(NamedTuple):
    dy: Any  # [M, GROUPS · N]
    x: Any
    z: Any
    weight: Any
    dx: Any  # like dy
    dz: Any
    partials: Any  # fp32 [programs, N]


class Numbers(NamedTuple):
    M: tl.tensor  # rows
    eps: tl.tensor
    inner: tl.tensor  # rows of a token, where those and tokens have distances of their own
    x_steps: tl.tensor  # from a token to the next, and from a row
    x_row_steps: tl.tensor
    z_steps: tl.tensor
    z_row_steps: tl.tensor


@triton.jit(do_not_specialize=list(Numbers._fields))
def gated_norm_kernel(p, M, eps, inner, x_steps, x_row_steps, z_steps, z_row_steps, VARIANT: tl.constexpr):
    """A program for each tile of rows of each group."""
    n = Numbers(M, eps, inner, x_steps, x_row_steps, z_steps, z_row_steps)
    if VARIANT.EARLY_START:
        gdc_wait()  # for the kernel before; nothing may be read or written above
    at = place(tl.program_id(0) // VARIANT.GROUPS, 0, n.M, VARIANT)
    b_x, b_z = load_inputs(p, n, at, VARIANT)
    b_squares = row_sum(squares(b_x, b_z, VARIANT))
    if VARIANT.LOOPED:
        for first_col in tl.range(VARIANT.BLOCK_N, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
            b_more_x, b_more_z = load_inputs(p, n, Place(at.rows, at.m_row, first_col), VARIANT)
            b_squares += row_sum(squares(b_more_x, b_more_z, VARIANT))
    b_rstd = inverse(b_squares, VARIANT.N, n.eps, RMSNORM)
    store_y(p, b_x, b_z, b_rstd, at, VARIANT)
    if VARIANT.LOOPED:
        for first_col in tl.range(VARIANT.BLOCK_N, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
            here = Place(at.rows, at.m_row, first_col)
            b_more_x, b_more_z = load_inputs(p, n, here, VARIANT)
            store_y(p, b_more_x, b_more_z, b_rstd, here, VARIANT)


@triton.jit(do_not_specialize=[*Numbers._fields, "tiles"])
def gated_norm_backward_kernel(p, M, eps, inner, x_steps, x_row_steps, z_steps, z_row_steps, tiles, VARIANT: tl.constexpr):
    """Persistent programs, each striding over the tiles of its group, with a partial sum of dw each; see `weight_gradients`."""
    n = Numbers(M, eps, inner, x_steps, x_row_steps, z_steps, z_row_steps)
    if VARIANT.EARLY_START:
        gdc_launch_dependents()  # the sum over partials may take its place now: it reads nothing before its own wait
        gdc_wait()
    first = tl.program_id(0) // VARIANT.GROUPS
    programs = tl.num_programs(0) // VARIANT.GROUPS
    if VARIANT.LOOPED:
        for tile in tl.range(first, tiles, programs, num_stages=1):
            at = place(tile, 0, n.M, VARIANT)
            b_squares = tl.zeros([VARIANT.ROWS], tl.float32)
            b_products = b_squares
            for first_col in tl.range(0, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
                here = Place(at.rows, at.m_row, first_col)
                b_x, b_z = load_inputs(p, n, here, VARIANT)
                b_dy = load(p.dy + dense_rows(here, VARIANT), here, VARIANT)
                b_block_squares, b_block_products = row_sums(b_x, b_z, b_dy, weights(p, here, VARIANT), VARIANT)
                b_squares += b_block_squares
                b_products += b_block_products
            for first_col in tl.range(0, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
                here = Place(at.rows, at.m_row, first_col)
                b_x, b_z = load_inputs(p, n, here, VARIANT)
                b_dy = load(p.dy + dense_rows(here, VARIANT), here, VARIANT)
                b_sum = zero_sums(VARIANT.WANTED, 1, VARIANT.ROWS, VARIANT.BLOCK_N)
                b_sum = store_gradients(
                    p, n, b_sum, b_x, b_z, b_dy, weights(p, here, VARIANT), b_squares, b_products, here, VARIANT
                )
                store_partials(p, add_stored_partials(p, b_sum, tile != first, here, VARIANT), tl.program_id(0), here, VARIANT)
            tl.debug_barrier()  # a partial sum may be read back by another thread than wrote it
    else:
        b_weight = weights(p, place(0, 0, n.M, VARIANT), VARIANT)
        b_sums = zero_sums(VARIANT.WANTED, blocks(VARIANT), VARIANT.ROWS, VARIANT.BLOCK_N)
        for tile in tl.range(first, tiles, programs, num_stages=VARIANT.STAGES):
            at = place(tile, 0, n.M, VARIANT)
            b_x, b_z = load_inputs(p, n, at, VARIANT)
            b_dy = load(p.dy + dense_rows(at, VARIANT), at, VARIANT)
            b_squares, b_products = row_sums(b_x, b_z, b_dy, b_weight, VARIANT)
            b_sums = store_gradients(p, n, b_sums, b_x, b_z, b_dy, b_weight, b_squares, b_products, at, VARIANT)
        store_partials(p, b_sums, tl.program_id(0), place(0, 0, n.M, VARIANT), VARIANT)


@triton.jit
def load_inputs(p, n, at, VARIANT: tl.constexpr):
    """x and z, as `load` gives them."""
    outer = at.rows
    inner = tl.zeros([VARIANT.ROWS], tl.int64)
    if VARIANT.TWO_LEVELS:
        inner = at.rows % n.inner
        outer = at.rows // n.inner
    x = (outer * n.x_steps + inner * n.x_row_steps) * VARIANT.X_STEP + first_column(VARIANT)
    z = (outer * n.z_steps + inner * n.z_row_steps) * VARIANT.Z_STEP + first_column(VARIANT)
    return load(p.x + x[:, None], at, VARIANT), load(p.z + z[:, None], at, VARIANT)


@triton.jit
def first_column(VARIANT: tl.constexpr):
    """Of this program's group."""
    return tl.program_id(0) % VARIANT.GROUPS * VARIANT.N


@triton.jit
def dense_rows(at, VARIANT: tl.constexpr):
    """int64 [ROWS, 1]: where the group begins in rows that lie next to each other."""
    return at.rows[:, None] * (VARIANT.GROUPS * VARIANT.N) + first_column(VARIANT)


@triton.jit
def load(p_rows, at, VARIANT: tl.constexpr):
    """Blocks in their own dtype, zero where masked, of rows that begin at these pointers."""
    b_row = ()
    for i in tl.static_range(blocks(VARIANT)):
        p_block = p_rows + block_cols(i, at, VARIANT)[None, :]
        b_row += (tl.load(p_block, mask=block_mask(i, at, VARIANT), other=0.0),)
    return b_row


@triton.jit
def weights(p, at, VARIANT: tl.constexpr):
    """Those of the group, as of `rows.load_weights`."""
    p_weight = p.weight
    if p_weight is not None:
        p_weight += first_column(VARIANT)
    return load_weights(p_weight, at, VARIANT, VARIANT.OFFSET)


@triton.jit
def gate(b_z, VARIANT: tl.constexpr):
    """a(z) and a′(z), fp32."""
    b_gate = sigmoid(b_z)
    b_slope = b_gate - b_gate * b_gate
    if not VARIANT.SIGMOID:
        b_slope = b_gate + b_z * b_slope
        b_gate = b_z * b_gate
    return b_gate, b_slope


@triton.jit
def before_norm(b_x, b_gate, VARIANT: tl.constexpr):
    """h"""
    return b_x if VARIANT.NORM_FIRST else b_x * b_gate


@triton.jit
def behind_norm(b, b_gate, VARIANT: tl.constexpr):
    """y of ĥ · w, and u of dy."""
    return b * b_gate if VARIANT.NORM_FIRST else b


@triton.jit
def squares(b_x, b_z, VARIANT: tl.constexpr):
    b_squares = ()
    for i in tl.static_range(blocks(VARIANT)):
        b_gate, _ = gate(widen(b_z[i]), VARIANT)
        b_h = before_norm(widen(b_x[i]), b_gate, VARIANT)
        b_squares += (b_h * b_h,)
    return b_squares


@triton.jit
def store_y(p, b_x, b_z, b_rstd, at, VARIANT: tl.constexpr):
    b_weight = weights(p, at, VARIANT)
    for i in tl.static_range(blocks(VARIANT)):
        b_gate, _ = gate(widen(b_z[i]), VARIANT)
        b_hat = normalised(before_norm(widen(b_x[i]), b_gate, VARIANT), b_rstd, b_rstd, RMSNORM)
        b_y = behind_norm(times(b_hat, block_of(b_weight, i)), b_gate, VARIANT)
        o = dense_rows(at, VARIANT) + block_cols(i, at, VARIANT)[None, :]
        tl.store(p.y + o, b_y, mask=block_mask(i, at, VARIANT))


@triton.jit
def row_sums(b_x, b_z, b_dy, b_weight, VARIANT: tl.constexpr):
    """fp32 [ROWS] twice: the sums over the columns of h² and of g · h, in one reduction."""
    b_squares = tl.zeros([VARIANT.ROWS, VARIANT.BLOCK_N], tl.float32)
    b_products = b_squares
    for i in tl.static_range(blocks(VARIANT)):
        b_gate, _ = gate(widen(b_z[i]), VARIANT)
        b_h = before_norm(widen(b_x[i]), b_gate, VARIANT)
        b_squares += b_h * b_h
        b_products += times(behind_norm(widen(b_dy[i]), b_gate, VARIANT), block_of(b_weight, i)) * b_h
    return tl.reduce((b_squares, b_products), 1, add_pairs)


@triton.jit
def again(b, b_rstd, VARIANT: tl.constexpr):
    """A block in fp32. With AGAIN it waits for rstd, as else the compiler keeps in fp32 what it has found before."""
    if VARIANT.AGAIN:
        BITS: tl.constexpr = tl.int32 if b.dtype.primitive_bitwidth == 32 else tl.int16
        b_zero = (b_rstd.to(tl.uint32, bitcast=True) >> 31).to(BITS)  # the sign, which no compiler knows
        b = (b.to(BITS, bitcast=True) ^ b_zero[:, None]).to(b.dtype, bitcast=True)
    return widen(b)


@triton.jit
def store_gradients(p, n, b_sums, b_x, b_z, b_dy, b_weight, b_squares, b_products, at, VARIANT: tl.constexpr):
    """Stores dx and dz where wanted; returns b_sums with the rows' part of dw."""
    b_rstd = tl.where(at.m_row, inverse(b_squares, VARIANT.N, n.eps, RMSNORM), 0.0)  # without eps, that of no row is no number
    b_c1 = b_products * b_rstd * b_rstd * (1.0 / VARIANT.N)
    b_weight_sums = ()
    for i in tl.static_range(blocks(VARIANT)):
        b_gate, b_slope = gate(again(b_z[i], b_rstd, VARIANT), VARIANT)
        b_x_i = again(b_x[i], b_rstd, VARIANT)
        b_dy_i = again(b_dy[i], b_rstd, VARIANT)
        b_h = before_norm(b_x_i, b_gate, VARIANT)
        b_hat = normalised(b_h, b_rstd, b_rstd, RMSNORM)
        b_u = behind_norm(b_dy_i, b_gate, VARIANT)
        b_dh = norm_gradient(times(b_u, block_of(b_weight, i)), b_h, b_hat, b_c1, b_c1, b_rstd, b_rstd, RMSNORM)
        o = dense_rows(at, VARIANT) + block_cols(i, at, VARIANT)[None, :]
        m = block_mask(i, at, VARIANT)
        if p.dx is not None:
            tl.store(p.dx + o, b_dh if VARIANT.NORM_FIRST else b_dh * b_gate, mask=m)
        if p.dz is not None:
            b_dgate = times(b_dy_i, block_of(b_weight, i)) * b_hat if VARIANT.NORM_FIRST else b_dh * b_x_i
            tl.store(p.dz + o, b_dgate * b_slope, mask=m)
        if VARIANT.WANTED[0]:
            b_weight_sums += (b_sums[0][i] + b_u * b_hat,)
    return (b_weight_sums,)
