"""Dropout in Triton: the mask generator that the norm kernels share, and a kernel that applies a mask or writes it.

The bits are those of `philox`. One call of seven rounds serves eight neighbouring columns.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .nvidia import multiply


@triton.jit
def drop(b, seed, p_mask, at, first_col, m, n, STREAM: tl.constexpr, VARIANT: tl.constexpr):
    """Dropout of an fp32 block [ROWS, width] that begins at first_col; stores the mask, bool [M, N], if p_mask is there."""
    m_keep = keep_mask(seed, at.rows, first_col, n.threshold, STREAM, b.shape[1], VARIANT.VECTOR)
    if p_mask is not None:
        cols = first_col + tl.arange(0, b.shape[1])
        tl.store(p_mask + at.rows[:, None] * VARIANT.N + cols[None, :], m_keep, mask=m)
    return tl.where(m_keep, b * n.scale, 0.0)


@triton.jit
def keep_mask(seed, rows, first_col, threshold, STREAM: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """int1 [ROWS, WIDTH], true where kept, for rows (int64 [ROWS]) and the WIDTH columns from first_col, a multiple of 8.

    A thread that holds VECTOR = 4 columns makes the call for eight and takes its half: cheaper than to get the bits from the
    neighbour that has them.
    """
    zero = tl.zeros([rows.shape[0], WIDTH // VECTOR], tl.uint32)
    vector = zero + (first_col // VECTOR + tl.arange(0, WIDTH // VECTOR))[None, :].to(tl.uint32)
    row_low = zero + (rows & 0xFFFFFFFF)[:, None].to(tl.uint32)
    row_high = zero + (rows >> 32)[:, None].to(tl.uint32)
    if VECTOR == 8:
        w0, w1, w2, w3 = philox(seed, vector, row_low, row_high, zero + STREAM)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [ROWS, WIDTH / 8, 2, 2]; word = 2 · third index + fourth
    else:
        w0, w1, w2, w3 = philox(seed, vector // 2, row_low, row_high, zero + STREAM)
        second = vector % 2 == 1
        words = tl.join(tl.where(second, w2, w0), tl.where(second, w3, w1))  # [ROWS, WIDTH / 4, 2]
    # Draw j is the low half of word j / 2 for even j, the high half for odd: compared as the high half of 32 bits, of which
    # the low half then decides nothing.
    draws = tl.join(words << 16, words)
    return tl.reshape(draws, [rows.shape[0], WIDTH]) >= (threshold.to(tl.uint32) << 16)


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """Seven rounds of Philox4x32 with key `seed` on counters uint32: what `tl.philox` returns, in fewer instructions."""
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(7):
        low0, high0 = multiply(c0, 0xD2511F53)
        low2, high2 = multiply(c2, 0xCD9E8D57)
        c0, c1 = high2 ^ c1 ^ k0, low2
        c2, c3 = high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


class Pointers(NamedTuple):
    x: tl.tensor  # [M, N], or None: the mask itself is written, 1 where kept
    y: tl.tensor  # [M, N]


# A new batch size, probability or seed must compile nothing.
@triton.jit(do_not_specialize=["M", "threshold"], do_not_specialize_on_alignment=["p_seed"])
def dropout_kernel(
    p, p_seed, M, threshold, scale,
    N: tl.constexpr, STREAM: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = dropout(x), or the mask."""
    blocks = tl.cdiv(N, BLOCK_N)  # of columns; on the one grid dimension that may be long, as either M or N may be
    rows = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first_col = (tl.program_id(0) % blocks) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    m = (rows < M)[:, None] & (cols < N)[None, :]
    m_keep = keep_mask(tl.load(p_seed), rows, first_col, threshold, STREAM, BLOCK_N, 8)
    if p.x is not None:
        b_x = tl.load(p.x + rows[:, None] * N + cols[None, :], mask=m, other=0.0).to(tl.float32)
        tl.store(p.y + rows[:, None] * N + cols[None, :], tl.where(m_keep, b_x * scale, 0.0), mask=m)
    else:
        tl.store(p.y + rows[:, None] * N + cols[None, :], m_keep, mask=m)
