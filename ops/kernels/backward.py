"""The backward kernel of the norm, and the small kernel that adds up its partial sums of weight gradients."""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .dropout import drop
from .norms import centres, deviation, norm_gradient
from .nvidia import add_pairs, collect, narrow, pack, publish, unpack, zero_pack
from .rows import (
    Place,
    block_cols,
    block_mask,
    block_start,
    blocks,
    load_rows,
    load_scale,
    load_stats,
    load_weights,
    offsets,
    place,
    prefetch_tile,
    zero_outside,
)


class Pointers(NamedTuple):
    """Tensors of M rows of N, but for the weights [N] and what is said; absent ones are None."""

    dy: tl.tensor
    dy1: tl.tensor
    dr: tl.tensor  # gradient of the residual stream as an output
    r: tl.tensor
    x: tl.tensor  # there where drowscale is wanted
    x1: tl.tensor
    weight: tl.tensor
    weight1: tl.tensor
    rowscale: tl.tensor  # [M]
    rowscale1: tl.tensor
    stats: tl.tensor  # fp32 [M, 2]: rstd and mean
    dz: tl.tensor  # the gradient of every input that nothing scales
    dx: tl.tensor
    dx1: tl.tensor
    drowscale: tl.tensor  # fp32 [M]
    drowscale1: tl.tensor
    partials: tl.tensor  # fp32 [groups of programs, weight gradients wanted, N]
    board: tl.tensor  # of split rows, see `nvidia`


class Sums(NamedTuple):
    partials: tl.tensor  # fp32 [groups of programs, WIDTH]
    weights: tl.tensor  # [WIDTH]: the sum over groups


class Numbers(NamedTuple):
    M: tl.tensor  # rows
    tiles: tl.tensor
    threshold: tl.tensor  # of dropout: a draw below it is dropped
    scale: tl.tensor  # of what dropout keeps


# A new number of rows, probability or seed must compile nothing, see norm_forward_kernel.
@triton.jit(do_not_specialize=list(Numbers._fields), do_not_specialize_on_alignment=["p_seed"])
def norm_backward_kernel(p, p_seed, stride, M, tiles, threshold, scale, HOW: tl.constexpr):
    """Persistent programs, each striding over tiles of HOW.ROWS rows. With g = dy · weight + dy1 · weight1:

        dz      = dr + the gradient of g through the norm                        `norms.norm_gradient`
        dx      = dropout(dz) · rowscale;   drowscale = Σ_cols dropout(dz) · x   likewise dx1, drowscale1
        dweight = Σ_rows dy · x̂;            dbias     = Σ_rows dy                likewise dweight1, dbias1

    Each program stores a partial sum of each weight gradient; finish_weight_gradients_kernel adds them in a fixed order.
    """
    n = Numbers(M, tiles, threshold, scale)
    if HOW.EARLY_START:
        gdc_launch_dependents()  # the sum over partials may take its place now: it reads nothing before its own wait
        gdc_wait()  # for the kernel before; nothing may be read or written above
    seed = 0
    if HOW.DROPOUT:
        seed = tl.load(p_seed)
    if HOW.SLICES > 1:
        split_rows(p, seed, stride, n, HOW)
    elif HOW.LOOPED:
        looped_rows(p, seed, stride, n, HOW)
    else:
        whole_rows(p, seed, stride, n, HOW)


@triton.jit
def whole_rows(p, seed, stride, n, HOW: tl.constexpr):
    """Rows that stay in registers from their load to their gradients. The weights and their gradients stay from row to row."""
    at = place(0, 0, n.M, HOW)
    b_weight = load_weights(p.weight, at, HOW, HOW.OFFSET)
    b_weight1 = load_weights(p.weight1, at, HOW, HOW.OFFSET)
    b_sums = zero_sums(HOW)
    for tile in tl.range(tl.program_id(0), n.tiles, tl.num_programs(0), num_stages=HOW.STAGES):
        if HOW.PREFETCH:
            prefetch_inputs(p, stride, tile + (HOW.STAGES - 1) * tl.num_programs(0), n.M, HOW)
        at = place(tile, 0, n.M, HOW)
        b_dz = load_rows(p.dr, at, stride.dr, HOW)
        if p.dy is not None or p.dy1 is not None:
            b_r = load_rows(p.r, at, stride.r, HOW)
            b_dy = load_rows(p.dy, at, stride.dy, HOW)
            b_dy1 = load_rows(p.dy1, at, stride.dy1, HOW)
            b_rstd, b_mean = load_stats(p.stats, at)
            b_xhat = normalised(b_r, b_mean, b_rstd, at, HOW)
            b_sums = add_weight_gradients(b_sums, b_dy, b_dy1, b_xhat, HOW)
            b_g = weighted(b_dy, b_weight, b_dy1, b_weight1, HOW)
            b_c1, b_c2 = row_sums(b_g, b_xhat, HOW)
            b_dz = through_norm(b_dz, b_g, b_xhat, b_c1, b_c2, b_rstd, HOW)
        b_ds, b_ds1 = store_input_gradients(p, seed, stride, n, b_dz, at, HOW)
        store_rowscale_gradients(p, b_ds, b_ds1, at)
    store_partials(p, b_sums, tl.program_id(0), place(0, 0, n.M, HOW), HOW)


@triton.jit
def looped_rows(p, seed, stride, n, HOW: tl.constexpr):
    """Rows that are read twice, a block at a time: once for their sums, once for their gradients.

    The partial sums of weight gradients are kept in memory, where each tile adds its own.
    """
    for tile in tl.range(tl.program_id(0), n.tiles, tl.num_programs(0), num_stages=1):
        at = place(tile, 0, n.M, HOW)
        b_c1 = tl.zeros([HOW.ROWS], tl.float32)
        b_c2 = tl.zeros([HOW.ROWS], tl.float32)
        b_ds = tl.zeros([HOW.ROWS], tl.float32)
        b_ds1 = tl.zeros([HOW.ROWS], tl.float32)
        if p.dy is not None or p.dy1 is not None:
            b_rstd, b_mean = load_stats(p.stats, at)
            for first_col in tl.range(0, HOW.N, HOW.BLOCK_N, num_stages=1):
                here = Place(at.rows, at.m_row, first_col)
                b_g, b_xhat, _, _ = load_upstream(p, stride, b_mean, b_rstd, here, HOW)
                b_block_c1, b_block_c2 = row_sums(b_g, b_xhat, HOW)
                b_c1 += b_block_c1
                b_c2 += b_block_c2
        for first_col in tl.range(0, HOW.N, HOW.BLOCK_N, num_stages=1):
            here = Place(at.rows, at.m_row, first_col)
            b_dz = load_rows(p.dr, here, stride.dr, HOW)
            if p.dy is not None or p.dy1 is not None:
                b_g, b_xhat, b_dy, b_dy1 = load_upstream(p, stride, b_mean, b_rstd, here, HOW)
                b_sums = add_weight_gradients(zero_sums(HOW), b_dy, b_dy1, b_xhat, HOW)
                b_sums = add_stored_partials(p, b_sums, tile != tl.program_id(0), here, HOW)
                store_partials(p, b_sums, tl.program_id(0), here, HOW)
                b_dz = through_norm(b_dz, b_g, b_xhat, b_c1, b_c2, b_rstd, HOW)
            b_block_ds, b_block_ds1 = store_input_gradients(p, seed, stride, n, b_dz, here, HOW)
            b_ds += b_block_ds
            b_ds1 += b_block_ds1
        store_rowscale_gradients(p, b_ds, b_ds1, at)
        # A partial sum may be read back by another thread than wrote it.
        tl.debug_barrier()


@triton.jit
def split_rows(p, seed, stride, n, HOW: tl.constexpr):
    """Rows that a group of HOW.SLICES programs share, a block each; they exchange the two sums of a row over `nvidia`'s board.

    A row is finished one turn late, when the sums of all have arrived. Until then its r and dy wait in registers.
    """
    tl.static_assert(HOW.ROWS == 1)
    tl.static_assert(p.dy1 is None and p.x is None and p.x1 is None, "no sums but those of one norm are exchanged")
    slice_id = tl.program_id(0) % HOW.SLICES
    group = tl.program_id(0) // HOW.SLICES
    groups = tl.num_programs(0) // HOW.SLICES
    first_col = slice_id * HOW.BLOCK_N
    at = place(group, first_col, n.M, HOW)
    b_weight = load_weights(p.weight, at, HOW, HOW.OFFSET)
    b_sums = zero_sums(HOW)
    b_waiting_r = zero_pack(p.r.dtype.element_ty, HOW)
    b_waiting_dy = zero_pack(p.dy.dtype.element_ty, HOW)
    # Rows before the first and behind the last are masked.
    for turn in tl.range(0, tl.cdiv(n.tiles - group, groups) + 1, num_stages=HOW.STAGES):
        at = place(group + turn * groups, first_col, n.M, HOW)
        before = place(group + (turn - 1) * groups, first_col, n.M, HOW)
        if HOW.PREFETCH:
            prefetch_slice(p, stride, group + (turn + HOW.STAGES - 1) * groups, groups, first_col, n.M, HOW)
        b_r = load_rows(p.r, at, stride.r, HOW)
        b_dy = load_rows(p.dy, at, stride.dy, HOW)
        b_rstd, b_mean = load_stats(p.stats, at)
        b_xhat = normalised(b_r, b_mean, b_rstd, at, HOW)
        b_sums = add_weight_gradients(b_sums, b_dy, (), b_xhat, HOW)
        b_c1, b_c2 = row_sums(weighted(b_dy, b_weight, (), (), HOW), b_xhat, HOW)
        publish(p.board, group, turn, slice_id, b_c1, b_c2, HOW)

        b_r_before = (unpack(b_waiting_r, p.r.dtype.element_ty),)
        b_dy_before = (unpack(b_waiting_dy, p.dy.dtype.element_ty),)
        b_waiting_r = pack(b_r[0], p.r.dtype.element_ty)
        b_waiting_dy = pack(b_dy[0], p.dy.dtype.element_ty)
        b_dz = load_rows(p.dr, before, stride.dr, HOW)
        b_rstd, b_mean = load_stats(p.stats, before)
        b_c1, b_c2 = collect(p.board, group, turn - 1, HOW)
        b_g = weighted(b_dy_before, b_weight, (), (), HOW)
        b_xhat = normalised(b_r_before, b_mean, b_rstd, before, HOW)
        b_dz = through_norm(b_dz, b_g, b_xhat, b_c1, b_c2, b_rstd, HOW)
        store_input_gradients(p, seed, stride, n, b_dz, before, HOW)
    store_partials(p, b_sums, group, place(0, first_col, n.M, HOW), HOW)


@triton.jit
def load_upstream(p, stride, b_mean, b_rstd, at, HOW: tl.constexpr):
    """g, x̂, dy and dy1 of a block."""
    b_xhat = normalised(load_rows(p.r, at, stride.r, HOW), b_mean, b_rstd, at, HOW)
    b_dy = load_rows(p.dy, at, stride.dy, HOW)
    b_dy1 = load_rows(p.dy1, at, stride.dy1, HOW)
    b_weight = load_weights(p.weight, at, HOW, HOW.OFFSET)
    b_weight1 = load_weights(p.weight1, at, HOW, HOW.OFFSET)
    return weighted(b_dy, b_weight, b_dy1, b_weight1, HOW), b_xhat, b_dy, b_dy1


@triton.jit
def normalised(b_r, b_mean, b_rstd, at, HOW: tl.constexpr):
    """x̂, zero past the row's end."""
    b_xhat = ()
    for i in tl.static_range(blocks(HOW)):
        b = deviation(b_r[i], b_mean, HOW.NORM) * b_rstd[:, None]
        if centres(HOW.NORM):
            b = zero_outside(b, i, at, HOW)
        b_xhat += (b,)
    return b_xhat


@triton.jit
def weighted(b_dy, b_weight, b_dy1, b_weight1, HOW: tl.constexpr):
    """g = dy · weight + dy1 · weight1; one of dy and dy1 may be an empty tuple."""
    b_g = ()
    for i in tl.static_range(blocks(HOW)):
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
def row_sums(b_g, b_xhat, HOW: tl.constexpr):
    """fp32 [ROWS] twice: the sums over the columns of g · x̂ and of g (0 where the norm does not centre), in one reduction."""
    b_product = b_g[0] * b_xhat[0]
    b_sum = b_g[0]
    for i in tl.static_range(1, blocks(HOW)):
        b_product += b_g[i] * b_xhat[i]
        b_sum += b_g[i]
    if centres(HOW.NORM):
        b_c1, b_c2 = tl.reduce((b_product, b_sum), 1, add_pairs)
    else:
        b_c1 = tl.sum(b_product, 1)
        b_c2 = tl.zeros([HOW.ROWS], tl.float32)
    return b_c1, b_c2


@triton.jit
def through_norm(b_dr, b_g, b_xhat, b_c1, b_c2, b_rstd, HOW: tl.constexpr):
    """dz = dr + the gradient through the norm; b_c1, b_c2: sums over the columns, as of `row_sums`."""
    b_dz = ()
    b_c1 *= b_rstd * (1.0 / HOW.N)
    b_c2 *= b_rstd * (1.0 / HOW.N)
    for i in tl.static_range(blocks(HOW)):
        b = norm_gradient(b_g[i], b_xhat[i], b_c1, b_c2, b_rstd, HOW.NORM)
        if len(b_dr) > 0:
            b += b_dr[i]
        b_dz += (b,)
    return b_dz


@triton.jit
def store_input_gradients(p, seed, stride, n, b_dz, at, HOW: tl.constexpr):
    """Stores dz, dx, dx1 where wanted; returns these columns' part of drowscale and drowscale1, fp32 [ROWS]."""
    if p.dz is not None:
        for i in tl.static_range(blocks(HOW)):
            b = narrow(b_dz[i], p.dz.dtype.element_ty)
            tl.store(p.dz + offsets(i, at, None, HOW), b, mask=block_mask(i, at, HOW))
    b_ds = store_branch_gradient(p.dx, p.drowscale, p.x, p.rowscale, stride.x, seed, n, b_dz, at, HOW, 0)
    b_ds1 = store_branch_gradient(p.dx1, p.drowscale1, p.x1, p.rowscale1, stride.x1, seed, n, b_dz, at, HOW, 1)
    return b_ds, b_ds1


@triton.jit
def store_branch_gradient(
    p_dx, p_drowscale, p_x, p_rowscale, stride_x, seed, n, b_dz, at, HOW: tl.constexpr, STREAM: tl.constexpr
):
    """dx = dropout(dz) · rowscale; returns the sum of dropout(dz) · x over these columns."""
    b_ds = tl.zeros([HOW.ROWS], tl.float32)
    if p_dx is not None or p_drowscale is not None:
        b_scale = load_scale(p_rowscale, at)
        for i in tl.static_range(blocks(HOW)):
            m = block_mask(i, at, HOW)
            b = b_dz[i]
            if HOW.DROPOUT:
                b = drop(b, seed, None, at, block_start(i, at, HOW), m, n, STREAM, HOW)
            if p_drowscale is not None:
                b_ds += tl.sum(b * tl.load(p_x + offsets(i, at, stride_x, HOW), mask=m, other=0.0).to(tl.float32), 1)
            if b_scale is not None:
                b = tl.where((b_scale != 0.0)[:, None], b * b_scale[:, None], 0.0)
            if p_dx is not None:
                tl.store(p_dx + offsets(i, at, None, HOW), narrow(b, p_dx.dtype.element_ty), mask=m)
    return b_ds


@triton.jit
def store_rowscale_gradients(p, b_ds, b_ds1, at):
    if p.drowscale is not None:
        tl.store(p.drowscale + at.rows, b_ds, mask=at.m_row)
    if p.drowscale1 is not None:
        tl.store(p.drowscale1 + at.rows, b_ds1, mask=at.m_row)


@triton.jit
def zero_sums(HOW: tl.constexpr):
    """Of each weight gradient wanted, fp32 blocks [ROWS, BLOCK_N]; the rows of a tile are added up at the end."""
    b_sums = ()
    for j in tl.static_range(4):
        b_row = ()
        if HOW.WANTED[j]:
            for _ in tl.static_range(blocks(HOW)):
                b_row += (tl.zeros([HOW.ROWS, HOW.BLOCK_N], tl.float32),)
        b_sums += (b_row,)
    return b_sums


@triton.jit
def add_weight_gradients(b_sums, b_dy, b_dy1, b_xhat, HOW: tl.constexpr):
    """b_sums and dy · x̂, dy, dy1 · x̂, dy1."""
    b_new = ()
    for j in tl.static_range(4):
        b_row = ()
        if HOW.WANTED[j]:
            for i in tl.static_range(blocks(HOW)):
                b = b_dy[i] if j < 2 else b_dy1[i]
                if j % 2 == 0:
                    b = b * b_xhat[i]
                b_row += (b_sums[j][i] + b,)
        b_new += (b_row,)
    return b_new


@triton.constexpr_function
def wanted_before(j, WANTED):
    """How many of the weight gradients before j are wanted."""
    return sum(WANTED[:j])


@triton.jit
def partial_row(p, group, j: tl.constexpr, HOW: tl.constexpr):
    """Where a group of programs keeps its sum of weight gradient j."""
    return p.partials + (group.to(tl.int64) * wanted_before(4, HOW.WANTED) + wanted_before(j, HOW.WANTED)) * HOW.N


@triton.jit
def store_partials(p, b_sums, group, at, HOW: tl.constexpr):
    """Stores the sums over the rows of a tile as the partial sums of a group of programs."""
    for j in tl.static_range(4):
        if HOW.WANTED[j]:
            p_row = partial_row(p, group, j, HOW)
            for i in tl.static_range(blocks(HOW)):
                cols = block_cols(i, at, HOW)
                tl.store(p_row + cols, tl.sum(b_sums[j][i], 0), mask=cols < HOW.N)


@triton.jit
def add_stored_partials(p, b_sums, stored, at, HOW: tl.constexpr):
    """b_sums and what this program stored before, if it has; in the first of its rows."""
    b_new = ()
    for j in tl.static_range(4):
        b_row = ()
        if HOW.WANTED[j]:
            p_row = partial_row(p, tl.program_id(0), j, HOW)
            cols = block_cols(0, at, HOW)
            first = (tl.arange(0, HOW.ROWS) == 0)[:, None]
            b_row += (b_sums[j][0] + tl.load(p_row + cols[None, :], mask=first & (cols < HOW.N)[None, :] & stored, other=0.0),)
        b_new += (b_row,)
    return b_new


@triton.jit
def prefetch_inputs(p, stride, tile, M, HOW: tl.constexpr):
    """Brings the rows of a tile into L2."""
    prefetch_tile(p.dr, stride.dr, tile, 0, HOW.N, M, HOW)
    if p.dy is not None or p.dy1 is not None:
        prefetch_tile(p.r, stride.r, tile, 0, HOW.N, M, HOW)
        prefetch_tile(p.dy, stride.dy, tile, 0, HOW.N, M, HOW)
        prefetch_tile(p.dy1, stride.dy1, tile, 0, HOW.N, M, HOW)


@triton.jit
def prefetch_slice(p, stride, tile, groups, first_col, M, HOW: tl.constexpr):
    """Brings this program's columns of a row into L2, and of dr those of the row before, which is finished beside it."""
    columns = tl.minimum(HOW.N - first_col, HOW.BLOCK_N)
    prefetch_tile(p.r, stride.r, tile, first_col, columns, M, HOW)
    prefetch_tile(p.dy, stride.dy, tile, first_col, columns, M, HOW)
    prefetch_tile(p.dr, stride.dr, tile - groups, first_col, columns, M, HOW)


@triton.jit(do_not_specialize=["groups"])
def finish_weight_gradients_kernel(
    p, groups, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, EARLY_START: tl.constexpr
):
    """p: Sums. Adds up the rows in a fixed order."""
    if EARLY_START:
        gdc_wait()
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_sum = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for first in tl.range(0, groups, BLOCK_P):
        rows = first + tl.arange(0, BLOCK_P)
        m = (rows < groups)[:, None] & (cols < WIDTH)[None, :]
        b_sum += tl.load(p.partials + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :], mask=m, other=0.0)
    tl.store(p.weights + cols, tl.sum(b_sum, 0), mask=cols < WIDTH)
