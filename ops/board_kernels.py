"""The board on which programs that share rows tell each other their sums over the columns. Names as in `forward_kernels`.

A split row is finished LAG rounds late, so that nobody waits for what was sent a moment ago:

    round i     load tile i → its sums over my columns → publish → lay tile i by
                take up tile i − LAG → collect everyone's sums of it → finish, store

The first rounds have nothing to finish and the last, beyond the tiles, nothing to load: their rows are masked.

The board is int64 [groups, RING, ROWS, SLICES · PARTS], all −1 before the launch. RING is the rounds after which a place is
written again, so few that the board stays in L2: read from memory its words were 2 to 5 points of bandwidth late. PARTS is the
warps that lie side by side along a program's columns, each of which publishes its own sums, or 1 where a row would so have too
many words (`tiling.parts`). All warps read all words of a row at once: one that is asked for too early costs the way to L2 and
back once more.

A word is two sums in fp32, the second without its last bit, which is that of the lap around the ring. Aligned words of 8 bytes
are written whole, so that no fence is needed. A place may be written again once all have read it: who is about to publish round
i has collected round i − 1 − LAG of everyone, so everyone has ended round i − 2 − LAG and with it collected round
i − 2 − 2 · LAG. That holds for each warp that publishes; where some do not, all warps of a program meet before it does. That a
plain store reaches the others' relaxed loads is what the hardware does, not what PTX's memory model promises.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from .conversion_kernels import PTX, widen

LAP_BIT = tl.constexpr(1 << 32)


@triton.jit
def board_place(p_board, group, turn, ROWS: tl.constexpr, WORDS: tl.constexpr, RING: tl.constexpr):
    """Where the words of a round are, and the bit of its lap."""
    lap = tl.cast(turn // RING & 1, tl.int64) * LAP_BIT
    return p_board + (group * RING + turn % RING) * (ROWS * WORDS), lap


@triton.jit
def sum_parts(b, PARTS: tl.constexpr, SPAN: tl.constexpr):
    """fp32 [ROWS, PARTS]: the sums over the columns of each warp."""
    return tl.sum(tl.sum(by_part(b, PARTS, SPAN), 1), 2)


@triton.jit
def by_part(b, PARTS: tl.constexpr, SPAN: tl.constexpr):
    """[ROWS, width] as [ROWS, n, PARTS, strip]: a warp holds a strip of columns in every SPAN of them."""
    STRIPS: tl.constexpr = strips(b.shape[1], SPAN)
    return tl.reshape(b, [b.shape[0], STRIPS, PARTS, b.shape[1] // (STRIPS * PARTS)])


@triton.constexpr_function
def strips(width, SPAN):
    return max(1, width // SPAN)


@triton.jit
def part_columns(parts, N, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr):
    """fp32, shaped as parts: how many columns of the row those parts of it hold, counted over all slices of BLOCK_N columns."""
    STRIPS: tl.constexpr = strips(BLOCK_N, SPAN)
    STRIP: tl.constexpr = BLOCK_N // (STRIPS * PARTS)
    first = parts // PARTS * BLOCK_N + parts % PARTS * STRIP
    count = tl.zeros(parts.shape, tl.int32)
    for i in tl.static_range(STRIPS):
        count += tl.maximum(tl.minimum(N - first - i * PARTS * STRIP, STRIP), 0)
    return count.to(tl.float32)


@triton.jit
def publish(p_words, lap, b_first, b_second, slice_id, SLICES: tl.constexpr, APART: tl.constexpr):
    """Puts two sums of each part, fp32 [ROWS, PARTS], on the board for all warps that share the rows.

    APART: a row's columns need not be in all warps, of which some would have nothing to publish.
    """
    if APART:
        tl.debug_barrier()
    ROWS: tl.constexpr = b_first.shape[0]
    PARTS: tl.constexpr = b_first.shape[1]
    low = b_first.to(tl.uint32, bitcast=True).to(tl.int64)
    high = b_second.to(tl.uint32, bitcast=True).to(tl.int64)
    word = ((low | (high << 32)) & ~LAP_BIT) | lap
    parts = slice_id * PARTS + tl.arange(0, PARTS)
    p_words += tl.arange(0, ROWS)[:, None] * (SLICES * PARTS) + parts[None, :]
    tl.store(p_words, word)


@triton.jit
def collect(p_words, lap, published, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """What all warps that share the tile's rows have published: of each row a tuple of blocks, fp32 [lanes] twice.

    Together the blocks of a row are its WORDS words in order, and zeros beyond them; all zeros if nothing was published. Waits
    for the other programs: the launch must be cooperative, so that all of them run. All words are asked for at once.
    """
    LANES: tl.constexpr = board_lanes(WORDS)
    BLOCKS: tl.constexpr = triton.cdiv(WORDS, LANES)
    lanes = tl.arange(0, LANES)
    arguments = (p_words + lanes, lap + tl.zeros([LANES], tl.int64))
    for j in tl.static_range(BLOCKS):
        arguments += ((published & (lanes + j * LANES < WORDS)).to(tl.int32),)
    words = read_words(arguments, ROWS, BLOCKS, WORDS, LANES)
    found = ()
    for i in tl.static_range(ROWS):
        of_row = ()
        for j in tl.static_range(BLOCKS):
            word = words[i * BLOCKS + j]
            b_first = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
            of_row += ((b_first, (word >> 32 & 0xFFFFFFFE).to(tl.uint32).to(tl.float32, bitcast=True)),)
        found += (of_row,)
    return found


@triton.constexpr_function
def board_lanes(WORDS):
    """Words that a warp reads at once."""
    return min(32, triton.next_power_of_2(WORDS))


@triton.jit
def read_words(arguments, ROWS: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr):
    """Blocks of int64 [LANES]. arguments: where the first of them is, its lap, and of each row's blocks where there is one."""
    if ROWS * BLOCKS == 1:
        words = (
            tl.inline_asm_elementwise(
                waiting_loads(1, 1, WORDS, LANES), "=&l,l,l,r", arguments, dtype=tl.int64, is_pure=False, pack=1
            ),
        )
    else:
        words = tl.inline_asm_elementwise(
            waiting_loads(ROWS, BLOCKS, WORDS, LANES), load_operands(ROWS, BLOCKS), arguments,
            dtype=load_dtypes(ROWS * BLOCKS), is_pure=False, pack=1,
        )  # fmt: skip
    return words


@triton.constexpr_function
def waiting_loads(ROWS, BLOCKS, WORDS, LANES):
    """PTX that reads all words again until each is of this lap."""
    count = ROWS * BLOCKS
    loads = range(count)
    bytes_on = [8 * (i // BLOCKS * WORDS + i % BLOCKS * LANES) for i in loads]
    lines = [".reg .pred %waits;", ".reg .b64 %bits;", *(f".reg .pred %ask{i};" for i in loads)]
    lines += [line for i in loads for line in (f"setp.ne.s32 %ask{i}, ${count + 2 + i % BLOCKS}, 0;", f"mov.b64 ${i}, 0;")]
    lines += ["again:", *(f"@%ask{i} ld.relaxed.gpu.global.b64 ${i}, [${count} + {bytes_on[i]}];" for i in loads)]
    for i in loads:
        lines += [f"and.b64 %bits, ${i}, {LAP_BIT.value};", f"setp.ne.and.s64 %ask{i}, %bits, ${count + 1}, %ask{i};"]
    lines += ["mov.pred %waits, %ask0;", *(f"or.pred %waits, %waits, %ask{i};" for i in loads[1:]), "@%waits bra again;"]
    return "{" + " ".join(lines) + "}"


@triton.constexpr_function
def load_operands(ROWS, BLOCKS):
    """Of `waiting_loads`: words out; where the first is, its lap and what to ask for in."""
    return ",".join(["=&l"] * (ROWS * BLOCKS) + ["l", "l"] + ["r"] * BLOCKS)


@triton.constexpr_function
def load_dtypes(count):
    return (tl.int64,) * count


@triton.jit
def put(b, i: tl.constexpr, number):
    """b, fp32 [ROWS], with a number in place i."""
    return tl.where(tl.arange(0, b.shape[0]) == i, number, b)


@triton.constexpr_function
def pairs(DTYPE):
    """Whether two values of DTYPE share a register while they wait."""
    return PTX.value and cuda_capability_geq(8) and DTYPE in (tl.bfloat16, tl.float16)


@triton.jit
def lay_by(b, DTYPE: tl.constexpr):
    """An fp32 block of values that DTYPE has, as it waits for a later round: int32 [ROWS, width / 2] if in pairs."""
    if pairs(DTYPE):
        b_low, b_high = tl.split(tl.reshape(b, [b.shape[0], b.shape[1] // 2, 2]))
        INSTRUCTION: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if tl.bfloat16 == DTYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
        b_waiting = tl.inline_asm_elementwise(INSTRUCTION, "=r,f,f", [b_low, b_high], dtype=tl.int32, is_pure=True, pack=1)
    else:
        b_waiting = b.to(DTYPE)
    return b_waiting


@triton.jit
def nothing_by(ROWS: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr):
    """What `lay_by` makes of zeros."""
    if pairs(DTYPE):
        b_waiting = tl.zeros([ROWS, BLOCK_N // 2], tl.int32)
    else:
        b_waiting = tl.zeros([ROWS, BLOCK_N], DTYPE)
    return b_waiting


@triton.jit
def take_up(b_waiting, DTYPE: tl.constexpr):
    """fp32: what was laid by."""
    if pairs(DTYPE):
        if tl.bfloat16 == DTYPE:
            b_low = (b_waiting << 16).to(tl.float32, bitcast=True)
            b_high = (b_waiting & -65536).to(tl.float32, bitcast=True)
        else:
            b_low = (b_waiting & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            b_high = (b_waiting >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        b = tl.reshape(tl.join(b_low, b_high), [b_waiting.shape[0], b_waiting.shape[1] * 2])
    else:
        b = widen(b_waiting)
    return b


@triton.jit
def another_round(b_waiting):
    """What waits another round. Not the value itself: in a loop that hands one on unchanged the compiler prefetches nothing."""
    if PTX:
        b_waiting = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [b_waiting], dtype=b_waiting.dtype, is_pure=True, pack=4 // b_waiting.dtype.itemsize
        )
    return b_waiting
