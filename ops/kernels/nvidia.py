"""What only NVIDIA's GPUs have, as inline PTX: a shorter conversion, the order of loads, prefetch into L2. Other GPUs run plain
Triton in its place. docs/kernels.md has for each what it is worth.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_cuda

from . import INTERPRET

PTX = tl.constexpr(not INTERPRET)


@triton.jit
def widen(b):
    """A block in fp32. Two neighbours in bf16 share a register: two instructions for both, where the compiler takes three."""
    if PTX and b.dtype == tl.bfloat16 and b.numel % 2 == 0 and cuda_capability_geq(8):
        b_wide = tl.inline_asm_elementwise(
            "{ .reg .b32 %pair; mov.b32 %pair, $2; shl.b32 $0, %pair, 16; and.b32 $1, %pair, 0xffff0000; }",
            "=r,=r,r", [b], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_wide = b.to(tl.float32)
    return b_wide


@triton.jit
def keep_order():
    """Issues the loads above it before those below. Else ptxas moves loads that are used late behind those used early.

    bar.warp.sync orders the memory accesses of a warp. The mov is there because inline assembly must return something.
    """
    if PTX and is_cuda():
        nothing = tl.full([], 0, tl.int32)
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [nothing], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def prefetch_rows(p, tile, M, N, first_col, columns, ROWS: tl.constexpr):
    """Brings `columns` columns of each row of a tile into L2, as far as the tile has rows; needs compute capability 9.0.

    One thread asks, one instruction a row, and nobody waits for the answer.
    """
    if p is not None:
        size = columns * (p.dtype.element_ty.primitive_bitwidth // 8)
        first_row = tl.full([], tile, tl.int64) * ROWS
        for i in tl.static_range(ROWS):
            row = first_row + i
            # The instruction takes 16-byte blocks. Aligned down, it may read a few bytes before p, and none behind the row.
            tl.inline_asm_elementwise(
                "{ .reg .pred %asks; .reg .u32 %thread; .reg .u64 %at; .reg .u32 %bytes;"
                " mov.b32 $0, 0; mov.u32 %thread, %tid.x; setp.eq.u32 %asks, %thread, 0; setp.ne.and.b32 %asks, $3, 0, %asks;"
                " and.b64 %at, $1, -16; and.b32 %bytes, $2, -16;"
                " @%asks cp.async.bulk.prefetch.L2.global [%at], %bytes; }",
                "=r,l,r,r", [p + row * N + first_col, size, (row < M).to(tl.int32)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def multiply(b, FACTOR: tl.constexpr):
    """Low and high half of b · FACTOR, all uint32. One multiplication, where the compiler takes one for each half."""
    if PTX and is_cuda():
        b_low, b_high = tl.inline_asm_elementwise(
            "{ .reg .b64 %both; mul.wide.u32 %both, $2, $3; mov.b64 {$0, $1}, %both; }",
            "=r,=r,r,r", [b, FACTOR], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        b_low = tl.mul(b, FACTOR, sanitize_overflow=False)
        b_high = tl.umulhi(b, FACTOR)
    return b_low, b_high
