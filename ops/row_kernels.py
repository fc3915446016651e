"""Rows as the norm kernels hold them: blocks side by side in registers, loaded, stored and summed in the same order.

A row of N columns is a block of BLOCK_N columns and TAIL_N more: one narrower block, or further ones of the same width.
5120 = 4096 + 1024 leaves no lane idle where the next power of two would idle three of eight; 65536 = 4 · 16384 has the compiler
finish one block before it loads the weights of the next, for which it then needs fewer registers. So a row is a tuple of blocks
[ROWS, width], of which only the last may reach past the row's end.
Where SLICES programs share a row, each holds the BLOCK_N columns that begin at its `first_col`.

The constexprs that all kernels share: ROWS rows in a tile; EVEN_N the blocks fill the row, so columns need no mask; MULTIPLE a
power of two, up to 16, that divides N and the distances between rows; VECTOR columns side by side in a thread; STAGES tiles in
flight, those to come in shared memory; HOLD weights stay in registers from tile to tile; LOOPED rows are wider than a tile and
read twice; SPAN the columns that all threads together hold side by side: a wider block repeats that, and each thread has all
rows of its columns.
"""

import triton
import triton.language as tl

from .conversion_kernels import widen, widen_again

NO_HINT = tl.constexpr("")  # to the caches: whatever the hardware does of itself
L1_AND_L2 = tl.constexpr("")
L2_ALONE = tl.constexpr(".cg")
PASSING = tl.constexpr(".cs")  # of a store: nobody reads it soon, so it is the first to leave L2


@triton.jit
def multiples(numbers, MULTIPLE: tl.constexpr):
    """A tuple of numbers that MULTIPLE divides, so that the compiler knows it.

    Of an argument it knows whether 16 does, and no more: it would read rows of 1000 columns two bytes at a time, and in a loop
    it would copy nothing ahead. Each MULTIPLE, of 16, 8, 4, 2 and 1, is a variant of the kernel.
    """
    known = ()
    for i in tl.static_range(len(numbers)):
        if MULTIPLE < 16:
            known += (numbers[i] // MULTIPLE * MULTIPLE,)
        else:
            known += (numbers[i],)
    return known


@triton.jit
def tile_rows(tile, ROWS: tl.constexpr, LONG: tl.constexpr):
    """int64 [ROWS]: the rows of a tile. LONG: there are 2³¹ or more; for fewer a product of 32 bits saves a register or two."""
    if LONG:
        rows = tl.full([1], tile, tl.int64) * ROWS + tl.arange(0, ROWS)
    else:
        rows = unsigned(tile * ROWS + tl.arange(0, ROWS))
    return rows


@triton.jit
def unsigned(number):
    """A row or a distance between rows, which is 0 or more, as int64.

    Where the compiler need not extend a sign, the product of two that had 32 bits is one multiplication, and else three.
    """
    number += tl.full([], 0, tl.int32)  # an argument of 1 is a constant without a dtype
    if number.dtype == tl.int32:
        number = number.to(tl.uint32)
    return number.to(tl.int64)


@triton.jit
def signed(number):
    """As int64, of which the compiler knows that it may be negative.

    For a row of which a thread holds so much that nothing else may take registers: LayerNorm of 32768 columns takes 64 so, and
    108 without a sign (sm_90).
    """
    return (number + tl.full([], 0, tl.int32)).to(tl.int64)


@triton.constexpr_function
def block_count(BLOCK_N, TAIL_N):
    return triton.cdiv(BLOCK_N + TAIL_N, BLOCK_N)


@triton.constexpr_function
def block_width(i, BLOCK_N, TAIL_N):
    return TAIL_N if i > 0 and TAIL_N < BLOCK_N else BLOCK_N


@triton.constexpr_function
def inside(i, BLOCK_N, TAIL_N, EVEN_N):
    """Whether block i lies inside the row, so that its columns need no mask."""
    return EVEN_N or i + 1 < block_count(BLOCK_N, TAIL_N)


@triton.jit
def valid(rows, M, ALWAYS: tl.constexpr):
    """int1 [ROWS]; ALWAYS: a tile is one row, and there are as many tiles."""
    if ALWAYS:
        m_row = tl.full([1], True, tl.int1)
    else:
        m_row = rows < M
    return m_row


@triton.jit
def block_start(i: tl.constexpr, first_col, BLOCK_N: tl.constexpr):
    """The first column of block i, a multiple of 8."""
    if i > 0:
        first_col += i * BLOCK_N
    return first_col


@triton.jit
def block_cols(i: tl.constexpr, first_col, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, VECTOR: tl.constexpr):
    """int32 [width]: the columns of block i, of which a thread is to hold VECTOR side by side."""
    return block_start(i, first_col, BLOCK_N) + tl.max_contiguous(tl.arange(0, block_width(i, BLOCK_N, TAIL_N)), VECTOR)


@triton.jit
def block_mask(i: tl.constexpr, m_row, cols, N, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr):
    """int1 [ROWS, 1] where the whole block lies inside the row, else [ROWS, width]."""
    if inside(i, BLOCK_N, TAIL_N, EVEN_N):
        m = m_row[:, None]
    else:
        m = m_row[:, None] & (cols < N)[None, :]
    return m


@triton.jit
def load_row(
    p, rows, m_row, stride, first_col, N, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr,
    VECTOR: tl.constexpr, RAW: tl.constexpr = False, EVICTION: tl.constexpr = NO_HINT, CACHE: tl.constexpr = L1_AND_L2,
):  # fmt: skip
    """fp32 blocks of a row, or as they were stored if RAW; zero where masked, and everywhere if there is nothing to load."""
    b_row = ()
    for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
        cols = block_cols(i, first_col, BLOCK_N, TAIL_N, VECTOR)
        if p is not None:
            m = block_mask(i, m_row, cols, N, BLOCK_N, TAIL_N, EVEN_N)
            b = tl.load(
                p + rows[:, None] * unsigned(stride) + cols[None, :],
                mask=m, other=0.0, eviction_policy=EVICTION, cache_modifier=CACHE,
            )  # fmt: skip
            if not RAW:
                b = widen(b)
        else:
            b = tl.zeros([rows.shape[0], cols.shape[0]], tl.float32)
        b_row += (b,)
    return b_row


@triton.jit
def store_row(
    p, b_row, rows, m_row, stride, first_col, N, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr,
    VECTOR: tl.constexpr, CACHE: tl.constexpr = NO_HINT,
):  # fmt: skip
    for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
        cols = block_cols(i, first_col, BLOCK_N, TAIL_N, VECTOR)
        m = block_mask(i, m_row, cols, N, BLOCK_N, TAIL_N, EVEN_N)
        tl.store(p + rows[:, None] * unsigned(stride) + cols[None, :], b_row[i], mask=m, cache_modifier=CACHE)


@triton.jit
def load_vector(
    p, first_col, N, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr,
    ABSENT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """fp32 blocks [1, width] of a weight or bias, OFFSET added; an absent one is ABSENT everywhere."""
    b_vector = ()
    for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
        b_vector += (load_vector_block(i, p, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, ABSENT, OFFSET),)
    return b_vector


@triton.jit
def load_vector_block(
    i: tl.constexpr, p, first_col, N, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr,
    VECTOR: tl.constexpr, ABSENT: tl.constexpr, OFFSET: tl.constexpr, TIMES: tl.constexpr = 1,
    CACHE: tl.constexpr = L1_AND_L2,
):  # fmt: skip
    """fp32 [TIMES, width], the same TIMES over, OFFSET added; [1, width] of ABSENT where there is nothing to load."""
    cols = block_cols(i, first_col, BLOCK_N, TAIL_N, VECTOR)
    if p is None:
        b = tl.full([1, cols.shape[0]], ABSENT, tl.float32)
    else:
        at = tl.broadcast_to(cols[None, :], [TIMES, cols.shape[0]])
        if inside(i, BLOCK_N, TAIL_N, EVEN_N):
            b = widen(tl.load(p + at, cache_modifier=CACHE))
        else:
            b = widen(tl.load(p + at, mask=at < N, other=0.0, cache_modifier=CACHE))
        if OFFSET != 0.0:  # the compiler would add a zero
            b += OFFSET
    return b


@triton.jit
def gather(b_terms, b):
    """Terms of a sum over columns, one more block among them: added to those of its width, so that few reductions are left."""
    if len(b_terms) == 0:
        b_terms += (b,)
    elif b_terms[0].shape[1] == b.shape[1]:
        b_terms = (b_terms[0] + b,)
    else:
        b_terms += (b,)
    return b_terms


@triton.jit
def fold(b_terms, SPAN: tl.constexpr):
    """The same sum over the columns in fewer of them: the columns of the first block that a thread holds, added to its tail.

    One reduction over threads then does for both blocks. Only where both repeat every SPAN columns, else nothing is done.
    """
    if len(b_terms) == 2 and b_terms[1].shape[1] >= SPAN:
        ROWS: tl.constexpr = b_terms[1].shape[0]
        TAIL_N: tl.constexpr = b_terms[1].shape[1]
        b = tl.reshape(b_terms[0], [ROWS, b_terms[0].shape[1] // TAIL_N, TAIL_N])
        b_folded = (tl.sum(b, 1) + b_terms[1],)
    else:
        b_folded = b_terms
    return b_folded


@triton.jit
def row_sum(b_row, SPAN: tl.constexpr):
    """fp32 [ROWS]: the sum over the columns of all blocks."""
    b_terms = ()
    for i in tl.static_range(len(b_row)):
        b_terms = gather(b_terms, b_row[i])
    b_folded = fold(b_terms, SPAN)
    b_sum = tl.sum(b_folded[0], 1)
    for i in tl.static_range(1, len(b_folded)):
        b_sum += tl.sum(b_folded[i], 1)
    return b_sum


@triton.jit
def dot_rows(b_row, b_other, SPAN: tl.constexpr):
    """fp32 [ROWS]: the sum over the columns of the products."""
    b_terms = ()
    for i in tl.static_range(len(b_row)):
        b_terms = gather(b_terms, b_row[i] * b_other[i])
    return row_sum(b_terms, SPAN)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def two_dots(b_row, b_other, SPAN: tl.constexpr):
    """fp32 [ROWS] twice: the sums over the columns of row · other and of row, in one reduction, so with one barrier."""
    b_products = ()
    b_terms = ()
    for i in tl.static_range(len(b_row)):
        b_products = gather(b_products, b_row[i] * b_other[i])
        b_terms = gather(b_terms, b_row[i])
    b_products = fold(b_products, SPAN)
    b_terms = fold(b_terms, SPAN)
    b_dot, b_sum = tl.reduce((b_products[0], b_terms[0]), 1, add_pairs)
    for i in tl.static_range(1, len(b_terms)):
        b_block_dot, b_block_sum = tl.reduce((b_products[i], b_terms[i]), 1, add_pairs)
        b_dot += b_block_dot
        b_sum += b_block_sum
    return b_dot, b_sum


@triton.jit
def reopen(b, PACKED: tl.constexpr):
    """A block that waits as it would be stored, in fp32 for one use."""
    if PACKED:
        b = widen_again(b)
    return b
