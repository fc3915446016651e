"""What only NVIDIA's GPUs have: shorter conversions, the order of loads, prefetch into L2, split rows. Others run plain Triton
instead and never split a row.

Programs that share a row tell each other the sums over their columns:

    turn i     load row i → my sums of it → publish → keep r and dy
               collect everyone's sums of row i − 1 → finish and store it

The board is int64 [groups, RING, turn_words], all −1 before the launch, a ring of turns so short that it stays in L2. A word is
two fp32 sums, the second without its last bit, which is the parity of the lap around the ring: a word of another lap has not
arrived. Aligned words of 8 bytes are written whole, so no fence is needed. A place is free again when it is written: who
publishes turn i has collected turn i − 2 of everyone, so everyone has collected turn i − 4, and RING is 4. All warps of a
program meet in the reduction before it publishes. All programs must be resident, so the launch is cooperative.
That a plain store reaches the others' relaxed loads is what the hardware does, not what PTX's memory model promises.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_cuda

from . import INTERPRET

PTX = tl.constexpr(not INTERPRET)
RING = tl.constexpr(4)
LAP_BIT = tl.constexpr(1 << 32)


@triton.jit
def widen(b):
    """A block in fp32. Two neighbours in bf16 share a register: two instructions for both, where the compiler takes three."""
    if PTX and b.dtype == tl.bfloat16 and cuda_capability_geq(8):
        b_wide = tl.inline_asm_elementwise(
            "{ .reg .b32 %pair; mov.b32 %pair, $2; shl.b32 $0, %pair, 16; and.b32 $1, %pair, 0xffff0000; }",
            "=r,=r,r", [b], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_wide = b.to(tl.float32)
    return b_wide


@triton.jit
def narrow(b, DTYPE: tl.constexpr):
    """An fp32 block rounded to DTYPE. The compiler would round bf16 one at a time."""
    if PTX and tl.bfloat16 == DTYPE and cuda_capability_geq(8):
        b_narrow = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        b_narrow = b.to(DTYPE)
    return b_narrow


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


@triton.jit
def word_of(b_first, b_second):
    """Two fp32 blocks as one of int64."""
    low = b_first.to(tl.uint32, bitcast=True).to(tl.int64)
    high = b_second.to(tl.uint32, bitcast=True).to(tl.int64)
    return low | (high << 32)


@triton.jit
def pair_of(words):
    """The two of `word_of`."""
    b_first = words.to(tl.uint32).to(tl.float32, bitcast=True)
    return b_first, (words >> 32).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


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
def prefetch_rows(p, tile, M, stride, first_col, columns, ROWS: tl.constexpr):
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
                "=r,l,r,r", [p + row * stride + first_col, size, (row < M).to(tl.int32)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.constexpr_function
def turn_words(SLICES):
    """Words that a turn has on the board: whole lines of 128 bytes, so that no two turns share one."""
    return -(-SLICES // 16) * 16


@triton.jit
def publish(p_board, group, turn, slice_id, b_first, b_second, HOW: tl.constexpr):
    """Puts two sums, fp32 [1] each, on the board."""
    word = word_of(b_first, b_second)
    p_words = p_board + (group * RING + turn % RING) * turn_words(HOW.SLICES) + slice_id
    tl.store(p_words + tl.arange(0, 1), (word & ~LAP_BIT) | lap_of(turn))


@triton.jit
def collect(p_board, group, turn, HOW: tl.constexpr):
    """Waits for what was published for a turn; the sums over all slices, fp32 [1] twice, 0 for the turn before the first."""
    LANES: tl.constexpr = triton.next_power_of_2(HOW.SLICES)
    tl.static_assert(LANES <= 32, "a warp reads the words of a row at once, each lane one")
    lanes = tl.arange(0, LANES)
    p_words = p_board + (group * RING + turn % RING) * turn_words(HOW.SLICES)
    words = wait_for_words(p_words + lanes, tl.zeros([LANES], tl.int64) + lap_of(turn), (turn >= 0) & (lanes < HOW.SLICES))
    # One use of the words, in one reduction: the compiler repeats the wait for each layout in which it wants them.
    first, second = tl.reduce(pair_of(words & ~LAP_BIT), 0, add_pairs)
    return tl.full([1], first, tl.float32), tl.full([1], second, tl.float32)


@triton.jit
def lap_of(turn):
    return tl.full([], turn // RING & 1, tl.int64) * LAP_BIT  # turn is a plain int in the interpreter


@triton.jit
def wait_for_words(p_words, laps, m):
    """int64 [LANES], read again until each is of its lap; 0 where masked."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred %waits; .reg .b64 %bits; setp.ne.s32 %waits, $3, 0; mov.b64 $0, 0;"
        " again: @%waits ld.relaxed.gpu.global.b64 $0, [$1];"
        " and.b64 %bits, $0, 4294967296; setp.ne.and.s64 %waits, %bits, $2, %waits;"
        " @%waits bra again; }",
        "=&l,l,l,r", [p_words, laps, m.to(tl.int32)], dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@triton.constexpr_function
def in_pairs(DTYPE):
    """Whether two values of DTYPE share a register while they wait."""
    return PTX.value and cuda_capability_geq(8) and DTYPE in (tl.bfloat16, tl.float16)


@triton.jit
def zero_pack(DTYPE: tl.constexpr, HOW: tl.constexpr):
    """What `pack` makes of zeros."""
    if in_pairs(DTYPE):
        b_packed = tl.zeros([1, HOW.BLOCK_N // 2], tl.int32)
    else:
        b_packed = tl.zeros([1, HOW.BLOCK_N], DTYPE)
    return b_packed


@triton.jit
def pack(b, DTYPE: tl.constexpr):
    """An fp32 block of values that DTYPE has: int32 [1, BLOCK_N / 2] if two share a register."""
    if in_pairs(DTYPE):
        b_low, b_high = tl.split(tl.reshape(b, [b.shape[0], b.shape[1] // 2, 2]))
        INSTRUCTION: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if tl.bfloat16 == DTYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
        b_packed = tl.inline_asm_elementwise(INSTRUCTION, "=r,f,f", [b_low, b_high], dtype=tl.int32, is_pure=True, pack=1)
    else:
        b_packed = b.to(DTYPE)
    return b_packed


@triton.jit
def unpack(b_packed, DTYPE: tl.constexpr):
    """fp32: what was packed."""
    if in_pairs(DTYPE):
        if tl.bfloat16 == DTYPE:
            b_low = (b_packed << 16).to(tl.float32, bitcast=True)
            b_high = (b_packed & -65536).to(tl.float32, bitcast=True)
        else:
            b_low = (b_packed & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            b_high = (b_packed >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        b = tl.reshape(tl.join(b_low, b_high), [b_packed.shape[0], b_packed.shape[1] * 2])
    else:
        b = widen(b_packed)
    return b
