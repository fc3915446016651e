"""The backward kernel of the norm."""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..records import BackwardInputs, Gradients
from ..reference import Norm
from .dropout import drop
from .exchange import collect, publish
from .norms import centres, load_stats, normalised, pointwise, row_sums, scalars, slope, through_norm
from .nvidia import widen
from .rows import (
    Place,
    block_mask,
    block_start,
    blocks,
    load_rows,
    load_scale,
    load_weight,
    load_weights,
    offsets,
    place,
    plus,
    prefetch_tile,
    scaled_residual,
    times,
    zero_outside,
)
from .weight_gradients import WeightGradients, add_products, add_stored_partials, store_partials, zero_sums

# The tensors, as the records have them; absent ones are None. partials: fp32 [groups of programs, weight gradients wanted, N];
# scalar_partials: fp32 [programs, scalars of the norm]; board: of split rows, see `exchange`.
_of_rows = [name for name in Gradients._fields if name not in WeightGradients._fields]
Pointers = namedtuple("Pointers", (*BackwardInputs._fields[:-1], *_of_rows, "partials", "scalar_partials", "board"))  # type: ignore[misc]


class Numbers(NamedTuple):
    M: tl.tensor  # rows
    tiles: tl.tensor
    threshold: tl.tensor  # of dropout: a draw below it is dropped
    scale: tl.tensor  # of what dropout keeps


# A new number of rows, probability or seed must compile nothing, see norm_forward_kernel.
@triton.jit(do_not_specialize=list(Numbers._fields), do_not_specialize_on_alignment=["p_seed"])
def norm_backward_kernel(p, p_seed, M, tiles, threshold, scale, VARIANT: tl.constexpr):
    """Persistent programs, each striding over tiles of VARIANT.ROWS rows. With g = dy · weight + dy1 · weight1:

        dz      = dr + the gradient of g through the norm                        `norms.norm_gradient`
        dx      = dropout(dz) · rowscale;   drowscale = Σ_cols dropout(dz) · x   likewise dx1, drowscale1
        dweight = Σ_rows dy · x̂;            dbias     = Σ_rows dy                likewise dweight1, dbias1

    Each program stores a partial sum of each weight gradient; finish_weight_gradients_kernel adds them in a fixed order.
    """
    n = Numbers(M, tiles, threshold, scale)
    if VARIANT.EARLY_START:
        gdc_launch_dependents()  # the sum over partials may take its place now: it reads nothing before its own wait
        gdc_wait()  # for the kernel before; nothing may be read or written above
    seed = 0
    if VARIANT.DROPOUT:
        seed = tl.load(p_seed)
    if VARIANT.SLICES > 1:
        split_rows(p, seed, n, VARIANT)
    elif VARIANT.LOOPED:
        looped_rows(p, seed, n, VARIANT)
    else:
        whole_rows(p, seed, n, VARIANT)


@triton.jit
def whole_rows(p, seed, n, VARIANT: tl.constexpr):
    """Rows that stay in registers from their load to their gradients. The weights and their gradients stay from row to row."""
    at = place(0, 0, n.M, VARIANT)
    b_weight = load_weights(p.weight, at, VARIANT, VARIANT.OFFSET)
    b_weight1 = load_weights(p.weight1, at, VARIANT, VARIANT.OFFSET)
    b_branch_weight = load_weights(p.branch_weight, at, VARIANT, VARIANT.OFFSET)
    b_sums = zero_sums(VARIANT.WANTED, blocks(VARIANT), VARIANT.ROWS, VARIANT.BLOCK_N)
    b_scalar_sums = zero_scalar_sums(p.dscalars, VARIANT.NORM, VARIANT)
    b_branch_scalar_sums = zero_scalar_sums(p.dbranch_scalars, VARIANT.BRANCH_NORM, VARIANT)
    for tile in tl.range(tl.program_id(0), n.tiles, tl.num_programs(0), num_stages=VARIANT.STAGES):
        if VARIANT.PREFETCH:
            prefetch_inputs(p, tile + (VARIANT.STAGES - 1) * tl.num_programs(0), n.M, VARIANT)
        at = place(tile, 0, n.M, VARIANT)
        b_dz = load_rows(p.dr, at, VARIANT)
        if p.dy is not None or p.dy1 is not None:
            b_r = load_rows(p.r, at, VARIANT)
            b_dy = load_rows(p.dy, at, VARIANT)
            b_dy1 = load_rows(p.dy1, at, VARIANT)
            b_rstd, b_mean = load_stats(p.stats, p.scalars, at, VARIANT.NORM, VARIANT.ROWS)
            b_xhat = normalised_rows(b_r, b_mean, b_rstd, at, VARIANT.NORM, VARIANT)
            b_sums = add_products(add_products(b_sums, 0, b_dy, b_xhat), 2, b_dy1, b_xhat)
            b_g = weighted(b_dy, b_weight, b_dy1, b_weight1, VARIANT)
            b_scalar_sums = add_scalar_products(b_scalar_sums, b_g, b_r, b_xhat, b_mean, b_rstd, VARIANT.NORM, VARIANT)
            b_c1, b_c2 = row_sums(b_g, b_xhat, VARIANT.NORM)
            b_dz = through_norm(b_dz, b_g, b_r, b_xhat, b_c1, b_c2, b_mean, b_rstd, VARIANT.NORM, VARIANT.N)
        b_ds, b_ds1 = store_input_gradients(p, seed, n, b_dz, at, VARIANT)
        if VARIANT.BRANCH:
            b_x = load_rows(p.x, at, VARIANT)
            b_rstd, b_mean = load_stats(p.branch_stats, p.branch_scalars, at, VARIANT.BRANCH_NORM, VARIANT.ROWS)
            b_db, b_xhat, b_x, b_ds = branch_upstream(p, seed, n, b_dz, b_x, b_mean, b_rstd, at, VARIANT)
            b_sums = add_products(b_sums, 4, b_db, b_xhat)
            b_g = weighted(b_db, b_branch_weight, (), (), VARIANT)
            b_branch_scalar_sums = add_scalar_products(
                b_branch_scalar_sums, b_g, b_x, b_xhat, b_mean, b_rstd, VARIANT.BRANCH_NORM, VARIANT
            )
            b_c1, b_c2 = row_sums(b_g, b_xhat, VARIANT.BRANCH_NORM)
            store_through_branch(p, b_g, b_x, b_xhat, b_c1, b_c2, b_mean, b_rstd, at, VARIANT)
        store_rowscale_gradients(p, b_ds, b_ds1, at)
    store_partials(p, b_sums, tl.program_id(0), place(0, 0, n.M, VARIANT), VARIANT)
    store_scalar_sums(p, b_scalar_sums, b_branch_scalar_sums)


@triton.jit
def looped_rows(p, seed, n, VARIANT: tl.constexpr):
    """Rows that are read twice, a block at a time: once for their sums, once for their gradients. They are read a third time
    where the norm of the branch has sums, as these follow from dz.

    The partial sums of weight gradients are kept in memory, where each tile adds its own.
    """
    b_scalar_sums = zero_scalar_sums(p.dscalars, VARIANT.NORM, VARIANT)
    b_branch_scalar_sums = zero_scalar_sums(p.dbranch_scalars, VARIANT.BRANCH_NORM, VARIANT)
    for tile in tl.range(tl.program_id(0), n.tiles, tl.num_programs(0), num_stages=1):
        at = place(tile, 0, n.M, VARIANT)
        b_c1 = tl.zeros([VARIANT.ROWS], tl.float32)
        b_c2 = tl.zeros([VARIANT.ROWS], tl.float32)
        b_ds = tl.zeros([VARIANT.ROWS], tl.float32)
        b_ds1 = tl.zeros([VARIANT.ROWS], tl.float32)
        b_rstd = b_c1
        b_mean = b_c1
        b_rstd_x = b_c1
        b_mean_x = b_c1
        b_branch_c1 = b_c1
        b_branch_c2 = b_c1
        if VARIANT.BRANCH:
            b_rstd_x, b_mean_x = load_stats(p.branch_stats, p.branch_scalars, at, VARIANT.BRANCH_NORM, VARIANT.ROWS)
        if p.dy is not None or p.dy1 is not None:
            b_rstd, b_mean = load_stats(p.stats, p.scalars, at, VARIANT.NORM, VARIANT.ROWS)
            if not pointwise(VARIANT.NORM):
                for first_col in tl.range(0, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
                    here = Place(at.rows, at.m_row, first_col)
                    b_g, _, b_xhat, _, _ = load_upstream(p, b_mean, b_rstd, here, VARIANT)
                    b_block_c1, b_block_c2 = row_sums(b_g, b_xhat, VARIANT.NORM)
                    b_c1 += b_block_c1
                    b_c2 += b_block_c2
        for first_col in tl.range(0, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
            here = Place(at.rows, at.m_row, first_col)
            b_dz = load_rows(p.dr, here, VARIANT)
            if p.dy is not None or p.dy1 is not None:
                b_g, b_r, b_xhat, b_dy, b_dy1 = load_upstream(p, b_mean, b_rstd, here, VARIANT)
                b_sums = add_products(
                    add_products(zero_sums(VARIANT.WANTED, blocks(VARIANT), VARIANT.ROWS, VARIANT.BLOCK_N), 0, b_dy, b_xhat),
                    2,
                    b_dy1,
                    b_xhat,
                )
                b_sums = add_stored_partials(p, b_sums, tile != tl.program_id(0), here, VARIANT)
                store_partials(p, b_sums, tl.program_id(0), here, VARIANT, 0, 3)
                b_scalar_sums = add_scalar_products(b_scalar_sums, b_g, b_r, b_xhat, b_mean, b_rstd, VARIANT.NORM, VARIANT)
                b_dz = through_norm(b_dz, b_g, b_r, b_xhat, b_c1, b_c2, b_mean, b_rstd, VARIANT.NORM, VARIANT.N)
            b_block_ds, b_block_ds1 = store_input_gradients(p, seed, n, b_dz, here, VARIANT)
            if VARIANT.BRANCH:
                b_x = load_rows(p.x, here, VARIANT)
                b_db, b_xhat, b_x, b_block_ds = branch_upstream(p, seed, n, b_dz, b_x, b_mean_x, b_rstd_x, here, VARIANT)
                b_sums = add_products(
                    zero_sums(VARIANT.WANTED, blocks(VARIANT), VARIANT.ROWS, VARIANT.BLOCK_N), 4, b_db, b_xhat
                )
                b_sums = add_stored_partials(p, b_sums, tile != tl.program_id(0), here, VARIANT)
                store_partials(p, b_sums, tl.program_id(0), here, VARIANT, 4, 5)
                b_g = weighted(b_db, load_weights(p.branch_weight, here, VARIANT, VARIANT.OFFSET), (), (), VARIANT)
                b_branch_scalar_sums = add_scalar_products(
                    b_branch_scalar_sums, b_g, b_x, b_xhat, b_mean_x, b_rstd_x, VARIANT.BRANCH_NORM, VARIANT
                )
                if pointwise(VARIANT.BRANCH_NORM):
                    store_through_branch(p, b_g, b_x, b_xhat, b_branch_c1, b_branch_c2, b_mean_x, b_rstd_x, here, VARIANT)
                else:
                    b_block_c1, b_block_c2 = row_sums(b_g, b_xhat, VARIANT.BRANCH_NORM)
                    b_branch_c1 += b_block_c1
                    b_branch_c2 += b_block_c2
            b_ds += b_block_ds
            b_ds1 += b_block_ds1
        if VARIANT.BRANCH and not pointwise(VARIANT.BRANCH_NORM) and p.dx is not None:
            for first_col in tl.range(0, VARIANT.N, VARIANT.BLOCK_N, num_stages=1):
                here = Place(at.rows, at.m_row, first_col)
                b_dz = load_rows(p.dr, here, VARIANT)
                if p.dy is not None or p.dy1 is not None:
                    b_g, b_r, b_xhat, _, _ = load_upstream(p, b_mean, b_rstd, here, VARIANT)
                    b_dz = through_norm(b_dz, b_g, b_r, b_xhat, b_c1, b_c2, b_mean, b_rstd, VARIANT.NORM, VARIANT.N)
                b_x = load_rows(p.x, here, VARIANT)
                b_db, b_xhat, b_x, _ = branch_upstream(p, seed, n, b_dz, b_x, b_mean_x, b_rstd_x, here, VARIANT)
                b_g = weighted(b_db, load_weights(p.branch_weight, here, VARIANT, VARIANT.OFFSET), (), (), VARIANT)
                store_through_branch(p, b_g, b_x, b_xhat, b_branch_c1, b_branch_c2, b_mean_x, b_rstd_x, here, VARIANT)
        store_rowscale_gradients(p, b_ds, b_ds1, at)
        # A partial sum may be read back by another thread than wrote it.
        tl.debug_barrier()
    store_scalar_sums(p, b_scalar_sums, b_branch_scalar_sums)


@triton.jit
def split_rows(p, seed, n, VARIANT: tl.constexpr):
    """Rows that a group of VARIANT.SLICES programs share, a block each; they exchange the two sums of a row, see `exchange`.

    A row is finished one turn late, when the sums of all have arrived. Until then its r and dy wait in registers.
    """
    tl.static_assert(VARIANT.ROWS == 1)
    tl.static_assert(p.dy1 is None and p.x is None and p.x1 is None, "no sums but those of one norm are exchanged")
    slice_id = tl.program_id(0) % VARIANT.SLICES
    group = tl.program_id(0) // VARIANT.SLICES
    groups = tl.num_programs(0) // VARIANT.SLICES
    first_col = slice_id * VARIANT.BLOCK_N
    at = place(group, first_col, n.M, VARIANT)
    b_weight = load_weights(p.weight, at, VARIANT, VARIANT.OFFSET)
    b_sums = zero_sums(VARIANT.WANTED, blocks(VARIANT), VARIANT.ROWS, VARIANT.BLOCK_N)
    b_waiting_r = tl.zeros([1, VARIANT.BLOCK_N], p.r.dtype.element_ty)
    b_waiting_dy = tl.zeros([1, VARIANT.BLOCK_N], p.dy.dtype.element_ty)
    # Rows before the first and behind the last are masked.
    for turn in tl.range(0, tl.cdiv(n.tiles - group, groups) + 1, num_stages=VARIANT.STAGES):
        at = place(group + turn * groups, first_col, n.M, VARIANT)
        before = place(group + (turn - 1) * groups, first_col, n.M, VARIANT)
        if VARIANT.PREFETCH:
            prefetch_slice(p, group + (turn + VARIANT.STAGES - 1) * groups, groups, first_col, n.M, VARIANT)
        b_r = load_rows(p.r, at, VARIANT)
        b_dy = load_rows(p.dy, at, VARIANT)
        b_rstd, b_mean = load_stats(p.stats, p.scalars, at, VARIANT.NORM, VARIANT.ROWS)
        b_xhat = normalised_rows(b_r, b_mean, b_rstd, at, VARIANT.NORM, VARIANT)
        b_sums = add_products(b_sums, 0, b_dy, b_xhat)
        b_c1, b_c2 = row_sums(weighted(b_dy, b_weight, (), (), VARIANT), b_xhat, VARIANT.NORM)
        publish(p.board, group, turn, slice_id, b_c1, b_c2, VARIANT)

        b_r_before = (widen(b_waiting_r),)
        b_dy_before = (widen(b_waiting_dy),)
        b_waiting_r = b_r[0].to(p.r.dtype.element_ty)
        b_waiting_dy = b_dy[0].to(p.dy.dtype.element_ty)
        b_dz = load_rows(p.dr, before, VARIANT)
        b_rstd, b_mean = load_stats(p.stats, p.scalars, before, VARIANT.NORM, VARIANT.ROWS)
        b_c1, b_c2 = collect(p.board, group, turn - 1, VARIANT)
        b_g = weighted(b_dy_before, b_weight, (), (), VARIANT)
        b_xhat = normalised_rows(b_r_before, b_mean, b_rstd, before, VARIANT.NORM, VARIANT)
        b_dz = through_norm(b_dz, b_g, b_r_before, b_xhat, b_c1, b_c2, b_mean, b_rstd, VARIANT.NORM, VARIANT.N)
        store_input_gradients(p, seed, n, b_dz, before, VARIANT)
    store_partials(p, b_sums, group, place(0, first_col, n.M, VARIANT), VARIANT)


@triton.jit
def load_upstream(p, b_mean, b_rstd, at, VARIANT: tl.constexpr):
    """g, r, x̂, dy and dy1 of a block."""
    b_r = load_rows(p.r, at, VARIANT)
    b_xhat = normalised_rows(b_r, b_mean, b_rstd, at, VARIANT.NORM, VARIANT)
    b_dy = load_rows(p.dy, at, VARIANT)
    b_dy1 = load_rows(p.dy1, at, VARIANT)
    b_weight = load_weights(p.weight, at, VARIANT, VARIANT.OFFSET)
    b_weight1 = load_weights(p.weight1, at, VARIANT, VARIANT.OFFSET)
    return weighted(b_dy, b_weight, b_dy1, b_weight1, VARIANT), b_r, b_xhat, b_dy, b_dy1


@triton.jit
def normalised_rows(b_r, b_mean, b_rstd, at, NORM: tl.constexpr, VARIANT: tl.constexpr):
    """x̂, zero past the row's end."""
    b_xhat = ()
    for i in tl.static_range(blocks(VARIANT)):
        b = normalised(b_r[i], b_mean, b_rstd, NORM)
        if centres(NORM):
            b = zero_outside(b, i, at, VARIANT)
        b_xhat += (b,)
    return b_xhat


@triton.jit
def weighted(b_dy, b_weight, b_dy1, b_weight1, VARIANT: tl.constexpr):
    """g = dy · weight + dy1 · weight1; one of dy and dy1 may be an empty tuple."""
    b_g = ()
    for i in tl.static_range(blocks(VARIANT)):
        if len(b_dy) == 0:
            b = scaled(b_dy1, b_weight1, i)
        else:
            b = scaled(b_dy, b_weight, i)
            if len(b_dy1) > 0:
                b += scaled(b_dy1, b_weight1, i)
        b_g += (b,)
    return b_g


@triton.jit
def scaled(b_row, b_weight, i: tl.constexpr):
    b = b_row[i]
    if len(b_weight) > 0:
        b = b * b_weight[i]
    return b


@triton.jit
def zero_scalar_sums(p_dscalars, NORM: tl.constexpr, VARIANT: tl.constexpr):
    """A block fp32 [ROWS, BLOCK_N] for each scalar of the norm; an empty tuple where their gradient is not wanted."""
    b_scalar_sums = ()
    if p_dscalars is not None:
        for _ in tl.static_range(scalars(NORM)):
            b_scalar_sums += (tl.zeros([VARIANT.ROWS, VARIANT.BLOCK_N], tl.float32),)
    return b_scalar_sums


@triton.jit
def add_scalar_products(b_scalar_sums, b_g, b_r, b_xhat, b_mean, b_rstd, NORM: tl.constexpr, VARIANT: tl.constexpr):
    """b_scalar_sums and g · slope · r, the gradient of α, and g · slope, that of s."""
    b_new = b_scalar_sums
    if len(b_scalar_sums) > 0:
        b_alpha = b_scalar_sums[0]
        b_shift = ()
        if len(b_scalar_sums) > 1:
            b_shift = (b_scalar_sums[1],)
        for i in tl.static_range(blocks(VARIANT)):
            b = b_g[i] * slope(b_r[i], b_xhat[i], b_mean, b_rstd, NORM)
            b_alpha += b * b_r[i]
            if len(b_shift) > 0:
                b_shift = (b_shift[0] + b,)
        b_new = (b_alpha,) + b_shift  # noqa: RUF005
    return b_new


@triton.jit
def store_scalar_sums(p, b_scalar_sums, b_branch_scalar_sums):
    BEFORE: tl.constexpr = len(b_scalar_sums)
    ALL: tl.constexpr = BEFORE + len(b_branch_scalar_sums)
    for j in tl.static_range(ALL):
        p_sum = p.scalar_partials + tl.program_id(0) * ALL + j
        b_sum = b_scalar_sums[j] if j < BEFORE else b_branch_scalar_sums[j - BEFORE]
        tl.store(p_sum, tl.sum(tl.sum(b_sum, 1), 0))


@triton.jit
def store_input_gradients(p, seed, n, b_dz, at, VARIANT: tl.constexpr):
    """Stores dz, dx, dx1 where wanted, but not dx of a branch with a norm; returns these columns' part of drowscale and
    drowscale1, fp32 [ROWS]."""
    if p.dz is not None:
        for i in tl.static_range(blocks(VARIANT)):
            tl.store(p.dz + offsets(i, at, VARIANT), scaled_residual(b_dz[i], VARIANT), mask=block_mask(i, at, VARIANT))
    b_ds = tl.zeros([VARIANT.ROWS], tl.float32)
    if not VARIANT.BRANCH:
        b_ds = store_branch_gradient(p.dx, p.drowscale, p.x, p.rowscale, seed, n, b_dz, at, VARIANT, 0)
    b_ds1 = store_branch_gradient(p.dx1, p.drowscale1, p.x1, p.rowscale1, seed, n, b_dz, at, VARIANT, 1)
    return b_ds, b_ds1


@triton.jit
def store_branch_gradient(p_dx, p_drowscale, p_x, p_rowscale, seed, n, b_dz, at, VARIANT: tl.constexpr, STREAM: tl.constexpr):
    """dx = dropout(dz) · rowscale; returns the sum of dropout(dz) · x over these columns."""
    b_ds = tl.zeros([VARIANT.ROWS], tl.float32)
    if p_dx is not None or p_drowscale is not None:
        b_scale = load_scale(p_rowscale, at)
        for i in tl.static_range(blocks(VARIANT)):
            m = block_mask(i, at, VARIANT)
            b = b_dz[i]
            if VARIANT.DROPOUT:
                b = drop(b, seed, None, at, block_start(i, at, VARIANT), m, n, STREAM, VARIANT)
            if p_drowscale is not None:
                b_ds += tl.sum(b * tl.load(p_x + offsets(i, at, VARIANT), mask=m, other=0.0).to(tl.float32), 1)
            if b_scale is not None:
                b = tl.where((b_scale != 0.0)[:, None], b * b_scale[:, None], 0.0)
            if p_dx is not None:
                tl.store(p_dx + offsets(i, at, VARIANT), b, mask=m)
    return b_ds


@triton.jit
def branch_upstream(p, seed, n, b_dz, b_x, b_mean, b_rstd, at, VARIANT: tl.constexpr):
    """Of the branch norm: the gradient of its output, dropout(dz) · rowscale; its x̂ and x; these columns' part of drowscale.

    Of a row whose scale is 0 x and x̂ are 0, whatever it holds.
    """
    b_scale = load_scale(p.rowscale, at)
    b_xhat = normalised_rows(b_x, b_mean, b_rstd, at, VARIANT.BRANCH_NORM, VARIANT)
    b_ds = tl.zeros([VARIANT.ROWS], tl.float32)
    b_db = ()
    b_kept = ()
    b_x_kept = ()
    for i in tl.static_range(blocks(VARIANT)):
        b = zero_outside(b_dz[i], i, at, VARIANT)
        b_hat = b_xhat[i]
        b_read = b_x[i]
        if VARIANT.DROPOUT:
            b = drop(b, seed, None, at, block_start(i, at, VARIANT), block_mask(i, at, VARIANT), n, 0, VARIANT)
        if p.drowscale is not None:
            weight = load_weight(p.branch_weight, i, at, VARIANT, VARIANT.OFFSET)
            b_ds += tl.sum(b * plus(times(b_hat, weight), load_weight(p.branch_bias, i, at, VARIANT)), 1)
        if b_scale is not None:
            b = tl.where((b_scale != 0.0)[:, None], b * b_scale[:, None], 0.0)
            b_hat = tl.where((b_scale != 0.0)[:, None], b_hat, 0.0)
            b_read = tl.where((b_scale != 0.0)[:, None], b_read, 0.0)
        b_db += (b,)
        b_kept += (b_hat,)
        b_x_kept += (b_read,)
    return b_db, b_kept, b_x_kept, b_ds


@triton.jit
def store_through_branch(p, b_g, b_x, b_xhat, b_c1, b_c2, b_mean, b_rstd, at, VARIANT: tl.constexpr):
    """Stores dx, the gradient of g through the branch norm."""
    if p.dx is not None:
        b_scale = load_scale(p.rowscale, at)
        b_dx = through_norm((), b_g, b_x, b_xhat, b_c1, b_c2, b_mean, b_rstd, VARIANT.BRANCH_NORM, VARIANT.N)
        for i in tl.static_range(blocks(VARIANT)):
            b = b_dx[i]
            if b_scale is not None:
                b = tl.where((b_scale != 0.0)[:, None], b, 0.0)
            tl.store(p.dx + offsets(i, at, VARIANT), b, mask=block_mask(i, at, VARIANT))


@triton.jit
def store_rowscale_gradients(p, b_ds, b_ds1, at):
    if p.drowscale is not None:
        tl.store(p.drowscale + at.rows, b_ds, mask=at.m_row)
    if p.drowscale1 is not None:
        tl.store(p.drowscale1 + at.rows, b_ds1, mask=at.m_row)


@triton.jit
def prefetch_inputs(p, tile, M, VARIANT: tl.constexpr):
    """Brings the rows of a tile into L2."""
    prefetch_tile(p.dr, tile, 0, VARIANT.N, M, VARIANT)
    if p.dy is not None or p.dy1 is not None:
        if reads_r(VARIANT.NORM, VARIANT.WANTED):
            prefetch_tile(p.r, tile, 0, VARIANT.N, M, VARIANT)
        prefetch_tile(p.dy, tile, 0, VARIANT.N, M, VARIANT)
        prefetch_tile(p.dy1, tile, 0, VARIANT.N, M, VARIANT)
    if VARIANT.BRANCH:
        prefetch_tile(p.x, tile, 0, VARIANT.N, M, VARIANT)


@triton.constexpr_function
def reads_r(NORM, WANTED):
    """Whether a gradient depends on r: without a norm, that of a weight alone does."""
    return Norm(NORM) != Norm.none or WANTED.weight or WANTED.weight1


@triton.jit
def prefetch_slice(p, tile, groups, first_col, M, VARIANT: tl.constexpr):
    """Brings this program's columns of a row into L2, and of dr those of the row before, which is finished beside it."""
    columns = tl.minimum(VARIANT.N - first_col, VARIANT.BLOCK_N)
    prefetch_tile(p.r, tile, first_col, columns, M, VARIANT)
    prefetch_tile(p.dy, tile, first_col, columns, M, VARIANT)
    prefetch_tile(p.dr, tile - groups, first_col, columns, M, VARIANT)
