"""Dropout in Triton: the mask generator that the norm kernels share, and a kernel that applies a mask or writes it."""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from .conversion_kernels import PTX
from .row_kernels import multiples


@triton.jit
def keep_block(seed, rows, first_col, threshold, STREAM: tl.constexpr, BLOCK_N: tl.constexpr, VECTOR: tl.constexpr):
    """int1 [ROWS, BLOCK_N], true where kept, for rows (int64 [ROWS]) and BLOCK_N columns from first_col, a multiple of 8."""
    return kept(draw_block(seed, rows, first_col, STREAM, BLOCK_N, VECTOR), threshold, BLOCK_N)


@triton.jit
def draw_block(seed, rows, first_col, STREAM: tl.constexpr, BLOCK_N: tl.constexpr, VECTOR: tl.constexpr):
    """The draws that `kept` compares, two in a word: uint32 [ROWS, BLOCK_N / 8, 2, 2], for VECTOR = 4 [ROWS, BLOCK_N / 4, 2].

    The bits of `philox`: one call of seven rounds serves eight neighbouring columns, which is one 16-byte vector of bf16.
    Where a thread holds VECTOR = 4 columns (16 bytes of fp32) it makes the call for itself and takes its half: cheaper than
    to get the bits from the neighbour that has them.
    """
    zero = tl.zeros([rows.shape[0], BLOCK_N // VECTOR], tl.uint32)
    vector = zero + (first_col // VECTOR + tl.arange(0, BLOCK_N // VECTOR))[None, :].to(tl.uint32)
    c1 = zero + (rows & 0xFFFFFFFF)[:, None].to(tl.uint32)
    c2 = zero + (rows >> 32)[:, None].to(tl.uint32)
    if VECTOR == 8:
        w0, w1, w2, w3 = philox(seed, vector, c1, c2, zero + STREAM)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [ROWS, BLOCK_N / 8, 2, 2]; word = 2 · third index + fourth
    else:
        w0, w1, w2, w3 = philox(seed, vector // 2, c1, c2, zero + STREAM)
        second = vector % 2 == 1
        words = tl.join(tl.where(second, w2, w0), tl.where(second, w3, w1))  # [ROWS, BLOCK_N / 4, 2]
    return words


@triton.jit
def kept(words, threshold, BLOCK_N: tl.constexpr):
    """Where a draw reaches the threshold; where that is 0, everywhere."""
    # Draw j is the low half of word j / 2 for even j, the high half for odd: compared as the high half of 32 bits, of which
    # the low half then decides nothing.
    draws = tl.join(words << 16, words)
    return tl.reshape(draws, [words.shape[0], BLOCK_N]) >= (threshold.to(tl.uint32) << 16)


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """Seven rounds of Philox4x32 with key `seed` on counters uint32: what `tl.philox` returns, in fewer instructions."""
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(7):
        low0, high0 = multiply(c0, 0xD2511F53)
        low2, high2 = multiply(c2, 0xCD9E8D57)
        c0 = high2 ^ c1 ^ k0
        c1 = low2
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def multiply(b, FACTOR: tl.constexpr):
    """Low and high half of b · FACTOR, all uint32. One multiplication, where the compiler takes one for each half."""
    if PTX and is_cuda():
        b_low, b_high = tl.inline_asm_elementwise(
            """{
            .reg .b64 %both;
            mul.wide.u32 %both, $2, $3;
            mov.b64 {$0, $1}, %both;
            }""",
            "=r,=r,r,r", [b, FACTOR], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        b_low = tl.mul(b, FACTOR, sanitize_overflow=False)
        b_high = tl.umulhi(b, FACTOR)
    return b_low, b_high


@triton.jit
def drop_block(b, seed, p_mask, rows, first_col, m, N, threshold, scale, STREAM: tl.constexpr, VECTOR: tl.constexpr):
    """dropout of a block fp32 [ROWS, width] from first_col on; the mask goes to p_mask, bool [M, N], if there is one."""
    m_keep = keep_block(seed, rows, first_col, threshold, STREAM, b.shape[1], VECTOR)
    if p_mask is not None:
        cols = first_col + tl.arange(0, b.shape[1])
        tl.store(p_mask + rows[:, None] * N + cols[None, :], m_keep, mask=m)
    return tl.where(m_keep, b * scale, 0.0)


@triton.jit(do_not_specialize=["M", "threshold"], do_not_specialize_on_alignment=["p_seed"])
def dropout_kernel(
    p_x, p_y, p_seed, M, N, stride_x, threshold, scale,
    STREAM: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    """y [M, N] = dropout(x); or, without x, the mask itself, 1 where kept."""
    N, stride_x = multiples((N, stride_x), MULTIPLE)
    blocks = tl.cdiv(N, BLOCK_N)  # of columns; on the one grid dimension that may be long, as either M or N may be
    rows = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first_col = (tl.program_id(0) % blocks) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    m = (rows < M)[:, None] & (cols < N)[None, :]
    m_keep = keep_block(tl.load(p_seed), rows, first_col, threshold, STREAM, BLOCK_N, 8)
    if p_x is not None:
        b_x = tl.load(p_x + rows[:, None] * stride_x + cols[None, :], mask=m, other=0.0).to(tl.float32)
        tl.store(p_y + rows[:, None] * N + cols[None, :], tl.where(m_keep, b_x * scale, 0.0), mask=m)
    else:
        tl.store(p_y + rows[:, None] * N + cols[None, :], m_keep, mask=m)
