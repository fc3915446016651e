"""Rows brought into L2, from where they are soon to be read or copied. NVIDIA's GPUs of compute capability 9.0 and later."""

import triton
import triton.language as tl


@triton.jit
def bring_rows(p, tile, M, stride, first_col, columns, ROWS: tl.constexpr):
    """Asks for `columns` columns of each row of a tile that is there; for nothing if p is None.

    One thread asks: an instruction a row, and nobody waits for the answer.
    """
    if p is not None:
        size = columns * (p.dtype.element_ty.primitive_bitwidth // 8)
        for i in tl.static_range(ROWS):
            row = tl.full([], tile, tl.int64) * ROWS + i
            _bring(p + row * stride + first_col, size, row < M)


@triton.jit
def _bring(p, size, wanted):
    # From the 16 bytes that p lies in, as many whole ones as fit: other addresses are an error. So a few bytes before p may be
    # read too, and none behind the row.
    tl.inline_asm_elementwise(
        "{ .reg .pred %asks; .reg .u32 %thread; .reg .u64 %at; .reg .u32 %bytes;"
        " mov.b32 $0, 0; mov.u32 %thread, %tid.x; setp.eq.u32 %asks, %thread, 0; setp.ne.and.b32 %asks, $3, 0, %asks;"
        " and.b64 %at, $1, -16; and.b32 %bytes, $2, -16;"
        " @%asks cp.async.bulk.prefetch.L2.global [%at], %bytes; }",
        "=r,l,r,r", [p, size, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
