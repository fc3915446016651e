"""The last step of backward: from dz to the gradients of x, x1 and their row scales."""

import triton
import triton.language as tl

from .conversion_kernels import narrow
from .dropout_kernels import draw_block, drop_block, kept
from .row_kernels import block_cols, block_count, block_mask, block_start, block_width, load_row, store_row, unsigned


@triton.jit
def draw_row(
    seed, rows, first_col, threshold, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, VECTOR: tl.constexpr, STREAM: tl.constexpr,
    WANTED: tl.constexpr,
):  # fmt: skip
    """The draws of a row's dropout, block by block, if WANTED: to be made while the row is on its way."""
    b_draws = ()
    if WANTED:
        for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
            b_draws += (
                draws_unless_all_are_kept(
                    seed, rows, block_start(i, first_col, BLOCK_N), threshold, block_width(i, BLOCK_N, TAIL_N), VECTOR, STREAM
                ),
            )
    return b_draws


@triton.jit
def draws_unless_all_are_kept(
    seed, rows, first_col, threshold, WIDTH: tl.constexpr, VECTOR: tl.constexpr, STREAM: tl.constexpr
):
    """`draw_block`, kept where it stands by a branch: else the compiler moves it to its use, behind the sums over the row,
    where all warps wait for it and have nothing else to do."""
    if VECTOR == 8:
        b = tl.zeros([rows.shape[0], WIDTH // 8, 2, 2], tl.uint32)
    else:
        b = tl.zeros([rows.shape[0], WIDTH // 4, 2], tl.uint32)
    if threshold > 0:
        b = draw_block(seed, rows, first_col, STREAM, WIDTH, VECTOR)
    return b


@triton.jit
def store_input_gradients(
    p_dz, p_dx, p_dx1, p_drowscale, p_drowscale1, p_x, p_x1, p_rowscale, p_rowscale1, seed, b_draws, b_draws1, b_dz,
    rows, m_row, first_col, N, stride_x, stride_x1, threshold, scale,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """Stores dz, dx, dx1 where they are wanted; returns these columns' share of drowscale and drowscale1, fp32 [ROWS]."""
    if p_dz is not None:
        store_row(p_dz, b_dz, rows, m_row, N, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR)
    b_ds = store_branch_gradient(
        p_dx, p_drowscale, p_x, p_rowscale, seed, b_draws, b_dz,
        rows, m_row, first_col, N, stride_x, threshold, scale, ROWS, BLOCK_N, TAIL_N, EVEN_N, VECTOR, DROPOUT, 0,
    )  # fmt: skip
    b_ds1 = store_branch_gradient(
        p_dx1, p_drowscale1, p_x1, p_rowscale1, seed, b_draws1, b_dz,
        rows, m_row, first_col, N, stride_x1, threshold, scale, ROWS, BLOCK_N, TAIL_N, EVEN_N, VECTOR, DROPOUT, 1,
    )  # fmt: skip
    return b_ds, b_ds1


@triton.jit
def store_branch_gradient(
    p_dx, p_drowscale, p_x, p_rowscale, seed, b_draws, b_dz, rows, m_row, first_col, N, stride_x, threshold, scale,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr,
    DROPOUT: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """dx = dropout(dz) · rowscale; the sum of dropout(dz) · x over these columns, fp32 [ROWS].

    b_draws: of `draw_row`; or nothing, and the draws are made here.
    """
    b_ds = tl.zeros([ROWS], tl.float32)
    if (p_dx is not None) or (p_drowscale is not None):
        b_scale = tl.full([ROWS], 1.0, tl.float32)
        if p_rowscale is not None:
            b_scale = tl.load(p_rowscale + rows, mask=m_row, other=0.0).to(tl.float32)
        if p_drowscale is not None:
            b_x = load_row(p_x, rows, m_row, stride_x, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR)
        for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
            cols = block_cols(i, first_col, BLOCK_N, TAIL_N, VECTOR)
            start = block_start(i, first_col, BLOCK_N)
            m = block_mask(i, m_row, cols, N, BLOCK_N, TAIL_N, EVEN_N)
            b_dx = b_dz[i]
            if len(b_draws) > 0:
                b_dx = tl.where(kept(b_draws[i], threshold, b_dx.shape[1]), b_dx * scale, 0.0)
            elif DROPOUT:
                if (p_rowscale is not None) and (p_drowscale is None):
                    # Rows with a scale of 0 get no gradient, and need no random numbers to know that.
                    if tl.max((b_scale != 0.0).to(tl.int32), 0) > 0:
                        b_dx = drop_block(b_dx, seed, None, rows, start, m, N, threshold, scale, STREAM, VECTOR)
                else:
                    b_dx = drop_block(b_dx, seed, None, rows, start, m, N, threshold, scale, STREAM, VECTOR)
            if p_drowscale is not None:
                b_ds += tl.sum(b_dx * b_x[i], 1)
            if p_dx is not None:
                if p_rowscale is not None:
                    b_dx = tl.where((b_scale != 0.0)[:, None], b_dx * b_scale[:, None], 0.0)
                tl.store(p_dx + rows[:, None] * unsigned(N) + cols[None, :], narrow(b_dx, p_dx.dtype.element_ty), mask=m)
    return b_ds


@triton.jit
def store_rowscale_gradients(p_drowscale, p_drowscale1, b_ds, b_ds1, rows, m_row):
    if p_drowscale is not None:
        tl.store(p_drowscale + rows, b_ds, mask=m_row)
    if p_drowscale1 is not None:
        tl.store(p_drowscale1 + rows, b_ds1, mask=m_row)
