"""Split rows: what the programs that share a row of backward exchange.

    turn i     load row i → my sums of it → publish → keep r and dy
               collect everyone's sums of row i − 1 → finish and store it

The board is int64 [groups, RING, turn_words], all −1 before the launch: a ring of turns so short that it stays in L2. A word
holds two fp32 sums. The last bit of the second sum is replaced by the parity of the lap around the ring, so a reader can tell
whether the word that it finds is of its own lap or of the one before. NVIDIA only, since the wait is inline PTX.

Which order of memory accesses this relies on:
- A word of 8 bytes, aligned to 8, is written and read whole. Both sums and the parity arrive together, so no fence is needed.
- A reader reads a word again and again with relaxed loads at the scope of the GPU, which look into L2, until the parity is its
  own. The writer uses a plain store. That a plain store reaches such loads of other multiprocessors is what the hardware does;
  PTX's memory model promises it for relaxed stores only.
- A place of the ring is free when it is written again. A program publishes turn i after it has collected turn i − 2 of
  everyone. Whoever published turn i − 2 had collected turn i − 4 of everyone before. So everyone has read turn i − 4, and the
  ring has four places.
- All warps of a program meet in the reduction that precedes `publish`, so no warp is more than one turn ahead of another.
- All programs are resident at once, or they would wait for ever: the launch is cooperative.
"""

import triton
import triton.language as tl

from .rows import add_pairs

RING = tl.constexpr(4)
LAP_BIT = tl.constexpr(1 << 32)


@triton.constexpr_function
def turn_words(SLICES):
    """Words that a turn has on the board: whole lines of 128 bytes, so that no two turns share one."""
    return -(-SLICES // 16) * 16


@triton.jit
def publish(p_board, group, turn, slice_id, b_first, b_second, VARIANT: tl.constexpr):
    """Puts two sums, fp32 [1] each, on the board."""
    word = word_of(b_first, b_second)
    p_words = p_board + (group * RING + turn % RING) * turn_words(VARIANT.SLICES) + slice_id
    tl.store(p_words + tl.arange(0, 1), (word & ~LAP_BIT) | lap_of(turn))


@triton.jit
def collect(p_board, group, turn, VARIANT: tl.constexpr):
    """Waits for what was published for a turn; the sums over all slices, fp32 [1] twice, 0 for the turn before the first."""
    LANES: tl.constexpr = triton.next_power_of_2(VARIANT.SLICES)
    tl.static_assert(LANES <= 32, "a warp reads the words of a row at once, each lane one")
    lanes = tl.arange(0, LANES)
    p_words = p_board + (group * RING + turn % RING) * turn_words(VARIANT.SLICES)
    words = wait_for_words(p_words + lanes, tl.zeros([LANES], tl.int64) + lap_of(turn), (turn >= 0) & (lanes < VARIANT.SLICES))
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
