"""Dropout in Triton: the mask generator that the norm kernels share, and a kernel that applies a mask or writes it."""

import triton
import triton.language as tl


@triton.jit
def keep_block(seed, rows, first_col, threshold, STREAM: tl.constexpr, BLOCK_N: tl.constexpr):
    """int1 [ROWS, BLOCK_N], true where kept, for rows (int64 [ROWS]) and BLOCK_N columns from first_col, a multiple of 8.

    The bits of `philox`: one call of seven rounds serves eight neighbouring columns, which is one 16-byte vector of bf16.
    """
    zero = tl.zeros([rows.shape[0], BLOCK_N // 8], tl.uint32)
    group = first_col // 8 + tl.arange(0, BLOCK_N // 8)
    c0 = zero + group[None, :].to(tl.uint32)
    c1 = zero + (rows & 0xFFFFFFFF)[:, None].to(tl.uint32)
    c2 = zero + (rows >> 32)[:, None].to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, zero + STREAM, 7)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [ROWS, BLOCK_N / 8, 2, 2]; word = 2 · third index + fourth
    halves = tl.join(words & 0xFFFF, words >> 16)  # draw j: low half of word j / 2 for even j, high half for odd
    return tl.reshape(halves, [rows.shape[0], BLOCK_N]).to(tl.int32) >= threshold


@triton.jit(do_not_specialize=["M", "threshold"], do_not_specialize_on_alignment=["p_seed"])
def dropout_kernel(
    p_x, p_y, p_seed, M, N, stride_x, threshold, scale,
    STREAM: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y [M, N] = dropout(x); or, without x, the mask itself, 1 where kept."""
    blocks = tl.cdiv(N, BLOCK_N)  # of columns; on the one grid dimension that may be long, as either M or N may be
    rows = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first_col = (tl.program_id(0) % blocks) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    m = (rows < M)[:, None] & (cols < N)[None, :]
    m_keep = keep_block(tl.load(p_seed), rows, first_col, threshold, STREAM, BLOCK_N)
    if p_x is not None:
        b_x = tl.load(p_x + rows[:, None] * stride_x + cols[None, :], mask=m, other=0.0).to(tl.float32)
        tl.store(p_y + rows[:, None] * N + cols[None, :], tl.where(m_keep, b_x * scale, 0.0), mask=m)
    else:
        tl.store(p_y + rows[:, None] * N + cols[None, :], m_keep, mask=m)
