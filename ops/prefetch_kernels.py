"""Rows brought into L2, from where they are soon to be read or copied. NVIDIA's GPUs of compute capability 9.0 and later."""

import triton
import triton.language as tl


@triton.jit
def bring_rows(p, tile, M, stride, first_col, columns, ROWS: tl.constexpr, AT_ONCE: tl.constexpr = False):
    """Asks for `columns` columns of each row of a tile that is there; for nothing if p is None.

    One thread asks, and nobody waits for the answer: an instruction a row, or AT_ONCE one for the tile, whose rows must then be
    `columns` apart and first_col 0.
    """
    if p is not None:
        size = columns * (p.dtype.element_ty.primitive_bitwidth // 8)
        first_row = tl.full([], tile, tl.int64) * ROWS
        if AT_ONCE:
            _bring_at_once(p, size, first_row, tl.cast(M, tl.int64), ROWS)
        else:
            for i in tl.static_range(ROWS):
                _bring(p + (first_row + i) * stride + first_col, size, first_row + i < M)


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


@triton.jit
def _bring_at_once(p, size, first_row, M, ROWS: tl.constexpr):
    # `_bring` for all of a tile's rows that are there. What there is to compute for it stands behind the branch, where other
    # warps do not go: they come to their own loads that much earlier.
    tl.inline_asm_elementwise(
        "{ .reg .pred %passes; .reg .u32 %thread, %bytes; .reg .b64 %count, %at;"
        " mov.b32 $0, 0; mov.u32 %thread, %tid.x; setp.ne.u32 %passes, %thread, 0; @%passes bra passed;"
        " sub.s64 %count, $4, $3; min.s64 %count, %count, $5; setp.le.s64 %passes, %count, 0; @%passes bra passed;"
        " cvt.s64.s32 %at, $2; mad.lo.s64 %at, %at, $3, $1; and.b64 %at, %at, -16;"
        " cvt.u32.u64 %bytes, %count; mul.lo.u32 %bytes, %bytes, $2; and.b32 %bytes, %bytes, -16;"
        " cp.async.bulk.prefetch.L2.global [%at], %bytes; passed: }",
        "=r,l,r,l,l,l", [p, size, first_row, M, tl.full([], ROWS, tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
