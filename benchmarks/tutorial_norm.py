"""LayerNorm forward the way Triton's tutorial teaches it: one program a row, three passes over the columns in blocks.

Written here from that idea, as the contender of the published comparison `seed_figures --figure a`; no part of `ops`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _layer_norm_rows(p_x, p_y, p_weight, p_bias, stride, N, eps, BLOCK_N: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    p_x += i_row * stride
    p_y += i_row * stride

    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        o_col = start + tl.arange(0, BLOCK_N)
        total += tl.load(p_x + o_col, mask=o_col < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / N

    squares = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        o_col = start + tl.arange(0, BLOCK_N)
        b_x = tl.load(p_x + o_col, mask=o_col < N, other=0.0).to(tl.float32)
        b_x = tl.where(o_col < N, b_x - mean, 0.0)
        squares += b_x * b_x
    rstd = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / N + eps)

    for start in range(0, N, BLOCK_N):
        o_col = start + tl.arange(0, BLOCK_N)
        m_col = o_col < N
        b_x = tl.load(p_x + o_col, mask=m_col, other=0.0).to(tl.float32)
        b_weight = tl.load(p_weight + o_col, mask=m_col, other=0.0).to(tl.float32)
        b_bias = tl.load(p_bias + o_col, mask=m_col, other=0.0).to(tl.float32)
        tl.store(p_y + o_col, (b_x - mean) * rstd * b_weight + b_bias, mask=m_col)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [M, N], contiguous. A block holds a whole row as long as that is at most 64 KB, as in the tutorial."""
    rows, width = x.shape
    block_n = min(65536 // x.element_size(), triton.next_power_of_2(width))
    warps = min(max(block_n // 256, 1), 8)
    y = torch.empty_like(x)
    _layer_norm_rows[(rows,)](x, y, weight, bias, x.stride(0), width, eps, BLOCK_N=block_n, num_warps=warps)
    return y
