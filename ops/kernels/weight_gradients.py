"""The gradients of weights and biases: sums over all rows.

Each program of backward keeps the sums of its own rows in registers and stores them at its end, as a partial sum. A small
kernel adds up the partial sums of all programs in a fixed order, so that the same inputs give the same bits.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .rows import as_mask, block_cols


class WeightGradients(NamedTuple):
    partials: tl.tensor  # fp32 [groups of programs, gradients wanted, N]
    dweight: tl.tensor  # [N], as are the others; None where not wanted
    dbias: tl.tensor
    dweight1: tl.tensor
    dbias1: tl.tensor
    dbranch_weight: tl.tensor
    dbranch_bias: tl.tensor


# Sums are a tuple of six tuples of blocks, in the order of `rows.Weights`; an empty tuple where the gradient is not wanted.
# Without names, as loops of Triton 3.6 carry none.
@triton.jit
def zero_sums(WANTED: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """fp32 blocks [ROWS, WIDTH]; the rows of a tile are added up at the end."""
    b_sums = ()
    for j in tl.static_range(wanted_of(WANTED)):
        b_row = ()
        if WANTED[j]:
            for _ in tl.static_range(BLOCKS):
                b_row += (tl.zeros([ROWS, WIDTH], tl.float32),)
        b_sums += (b_row,)
    return b_sums


@triton.jit
def add_products(b_sums, FIRST: tl.constexpr, b_dy, b_xhat):
    """b_sums, with dy · x̂ added to that of number FIRST, a weight, and dy to the next, its bias."""
    b_new = ()
    for j in tl.static_range(len(b_sums)):
        b_row = ()
        for i in tl.static_range(len(b_sums[j])):
            b = b_sums[j][i]
            if j == FIRST:
                b += b_dy[i] * b_xhat[i]
            if j == FIRST + 1:
                b += b_dy[i]
            b_row += (b,)
        b_new += (b_row,)
    return b_new


@triton.jit
def store_partials(p, b_sums, group, at, VARIANT: tl.constexpr, FIRST: tl.constexpr = 0, LAST: tl.constexpr = 5):
    """Stores the sums FIRST to LAST over the rows of a tile as the partial sums of a group of programs."""
    for j in tl.static_range(FIRST, min(LAST + 1, len(b_sums))):
        for i in tl.static_range(len(b_sums[j])):
            cols = block_cols(i, at, VARIANT)
            tl.store(partial_sum(p, group, j, VARIANT) + cols, tl.sum(b_sums[j][i], 0), mask=cols < VARIANT.N)


@triton.jit
def add_stored_partials(p, b_sums, stored, at, VARIANT: tl.constexpr):
    """b_sums and what this program stored before, if it has; in the first of its rows. For rows of one block."""
    cols = block_cols(0, at, VARIANT)[None, :]
    m = (tl.arange(0, VARIANT.ROWS) == 0)[:, None] & (cols < VARIANT.N) & as_mask(stored)
    b_new = ()
    for j in tl.static_range(len(b_sums)):
        b_row = ()
        for i in tl.static_range(len(b_sums[j])):
            p_sum = partial_sum(p, tl.program_id(0), j, VARIANT) + cols
            b_row += (b_sums[j][i] + tl.load(p_sum, mask=m, other=0.0),)
        b_new += (b_row,)
    return b_new


@triton.jit
def partial_sum(p, group, j: tl.constexpr, VARIANT: tl.constexpr):
    """Where a group of programs keeps its sum of weight gradient j."""
    before = group.to(tl.int64) * wanted_before(6, VARIANT.WANTED) + wanted_before(j, VARIANT.WANTED)
    return p.partials + before * VARIANT.N


@triton.constexpr_function
def wanted_of(WANTED):
    """How many weight gradients there may be."""
    return len(WANTED)


@triton.constexpr_function
def wanted_before(j, WANTED):
    """How many of the weight gradients before j are wanted."""
    return sum(WANTED[:j])


@triton.jit(do_not_specialize=["groups"])
def finish_weight_gradients_kernel(
    p, groups, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, EARLY_START: tl.constexpr
):
    """p: WeightGradients. Adds up the partial sums; a program for each block of columns of each gradient that is wanted."""
    if EARLY_START:
        gdc_wait()
    WANTED: tl.constexpr = (
        p.dweight is not None, p.dbias is not None, p.dweight1 is not None, p.dbias1 is not None,
        p.dbranch_weight is not None, p.dbranch_bias is not None,
    )  # fmt: skip
    column_blocks = tl.cdiv(N, BLOCK_N)
    which = tl.program_id(0) // column_blocks
    cols = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b = sum_partials(p.partials, 0, groups, wanted_before(6, WANTED), which, cols, N, BLOCK_P)
    for j in tl.static_range(6):
        if WANTED[j]:  # a constant, unlike `which`
            if which == wanted_before(j, WANTED):
                tl.store(p[j + 1] + cols, b, mask=cols < N)


@triton.jit
def sum_partials(
    p_partials, first, count, EACH: tl.constexpr, which, cols, N: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """fp32, for each of `cols`: the sum, in a fixed order, of number `which` of the EACH partial sums [N] that each of `count`
    programs has stored, from program `first` on."""
    b_sum = tl.zeros([BLOCK_P, cols.shape[0]], tl.float32)
    for start in tl.range(0, count, BLOCK_P):
        o = start + tl.arange(0, BLOCK_P)
        m = (o < count)[:, None] & (cols < N)[None, :]
        p_sums = p_partials + ((first + o).to(tl.int64)[:, None] * EACH + which) * N
        b_sum += tl.load(p_sums + cols[None, :], mask=m, other=0.0)
    return tl.sum(b_sum, 0)
