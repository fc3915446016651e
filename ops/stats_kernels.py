"""A row's statistics in memory, from forward to backward. Names as in `forward_kernels`."""

import triton
import triton.language as tl


@triton.jit
def store_stats(p_stats, b_rstd, b_mean, rows, m, IS_RMS: tl.constexpr):
    """p_stats: fp32 [M, 1] rstd for RMSNorm, [M, 2] rstd and mean for LayerNorm.

    Both as one word: a sector of 32 bytes takes as long to write whatever is written of it, and two vectors were 0.2 to 1.1 %
    of the time up to 4096 columns. As [ROWS, 2] numbers they took up to ten registers more.
    """
    if IS_RMS:
        tl.store(p_stats + rows, b_rstd, mask=m)
    else:
        low = b_rstd.to(tl.uint32, bitcast=True).to(tl.int64)
        high = b_mean.to(tl.uint32, bitcast=True).to(tl.int64)
        tl.store(p_stats.to(tl.pointer_type(tl.int64)) + rows, low | (high << 32), mask=m)


@triton.jit
def load_stats(p_stats, rows, m_row, IS_RMS: tl.constexpr):
    """rstd and mean, fp32 [ROWS]; no mean for RMSNorm."""
    if IS_RMS:
        b_rstd = tl.load(p_stats + rows, mask=m_row, other=0.0)
        b_mean = tl.zeros([rows.shape[0]], tl.float32)
    else:
        word = tl.load(p_stats.to(tl.pointer_type(tl.int64)) + rows, mask=m_row, other=0)
        b_rstd = word.to(tl.uint32).to(tl.float32, bitcast=True)
        b_mean = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return b_rstd, b_mean
