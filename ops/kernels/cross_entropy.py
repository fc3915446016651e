"""Cross-entropy of rows of logits: loss and gradient with each logit read once, or loss first and gradient later.

    m = max_j x_j          s = Σ_j exp(x_j − m)          lse = m + log s                 p_j = exp(x_j − m) / s
    loss = (1 − ε) (lse − x_t) + ε (lse − mean_j x_j) + z lse²                           t: the target, ε: label smoothing
    dloss/dx_j = p_j (1 + 2 z lse) − (1 − ε) [j = t] − ε / V                             z: z_loss (PaLM, arXiv:2204.02311)
    with softcap c:  x_j = c tanh(l_j / c),  dx_j/dl_j = 1 − (x_j / c)²                  (Gemma 2, arXiv:2408.00118)

A program keeps the last HELD blocks of its row in registers, two 16-bit logits in each, and so reads them once. What is left of
a wider row, its head, is read by groups of blocks, once for m and s and once for the gradient.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_cuda

from .constants import Constants
from .nvidia import PTX, widen
from .rows import LOG2E, as_mask, tanh

INF = tl.constexpr(float("inf"))


@dataclass(frozen=True)
class RowTile(Constants):
    """What a kernel is compiled for."""

    V: int  # columns in a row
    BLOCK: int  # columns in a block, a power of two
    HELD: int  # blocks at the end of a row that stay in registers
    GROUP: int  # blocks of the head that are loaded together
    PAIRS: bool  # two 16-bit logits are loaded as one int32
    VECTOR: int  # logits in 16 bytes
    SHIFTED: bool  # rows begin anywhere; blocks lie from the 16-byte boundary before a row on
    STRIDE_UNIT: int  # divides the distance between rows, so that the compiler knows their alignment
    DTYPE: Any  # Triton's dtype of the logits
    GRADIENT: bool  # the gradient is computed too
    SOFTCAP: bool
    SMOOTHING: bool


class Pointers(NamedTuple):
    """Those that a kernel works with."""

    logits: Any = None  # [M, V]
    gradient: Any = None  # [M, V]: may be the logits themselves
    targets: Any = None  # [M]
    loss: Any = None  # fp32 [M], 0 where ignored
    stats: Any = None  # fp32 [M, 2]: m and s; None where nobody needs them
    scale: Any = None  # fp32 [1], a factor of the gradient; None for 1
    total: Any = None  # fp32 []: the reduced loss
    dloss: Any = None  # [] or [M]: the upstream gradient


class Row(NamedTuple):
    at: Any  # its first logit, counted from the tensor's
    first_word: Any  # of its first block, likewise
    shift: Any  # columns of that block before the row


class Numbers(NamedTuple):
    stride: Any  # from a row of logits to the next, over STRIDE_UNIT
    out_stride: Any  # of the gradient's rows
    ignore_index: Any
    softcap: Any
    z_loss: Any
    smoothing: Any


@triton.jit(do_not_specialize=["ignore_index", "softcap", "z_loss", "smoothing"])
def cross_entropy_kernel(p, stride, out_stride, ignore_index, softcap, z_loss, smoothing, HOW: tl.constexpr):
    """Loss of each row; with GRADIENT also scale · dloss/dlogits. A program for each row."""
    n = Numbers(stride, out_stride, ignore_index, softcap, z_loss, smoothing)
    scale = 1.0
    if p.scale is not None:
        scale = tl.load(p.scale)
    row = tl.program_id(0)
    target = tl.load(p.targets + row).to(tl.int64)
    counts = target != ignore_index
    check_target(target, counts, HOW)
    here, there = row_of(row, n.stride, HOW), row_of(row, n.out_stride, HOW)
    b_held = load_blocks(p.logits, here, head_columns(HOW), counts, HOW.HELD, "evict_first", HOW)
    x_target = load_one(p.logits, here, target, counts)
    x_first, x_last = load_one(p.logits, here, 0, counts), load_one(p.logits, here, HOW.V - 1, counts)
    b_max, b_sum, b_total = nothing_yet(HOW)
    if head_columns(HOW) > 0:
        for first in tl.range(0, head_columns(HOW), HOW.GROUP * HOW.BLOCK, num_stages=1):
            b_head = load_blocks(p.logits, here, first, counts, HOW.GROUP, "evict_last", HOW)
            b_max, b_sum, b_total = absorb(b_head, here, first, b_max, b_sum, b_total, n, HOW)
    b_max, b_sum, b_total = absorb(b_held, here, head_columns(HOW), b_max, b_sum, b_total, n, HOW)
    m, s = tl.reduce((b_max, b_sum), 0, join_sums)
    xt, _ = softcapped(x_target, n, HOW)
    log_s = log(s)
    lse = m + log_s
    loss = log_s + (m - xt)  # the large terms first: their difference has no rounding error
    if HOW.SMOOTHING:
        loss = log_s + (1.0 - smoothing) * (m - xt) + smoothing * (m - tl.sum(b_total, 0) / HOW.V)
    loss += z_loss * lse * lse
    tl.store(p.loss + row, tl.where(counts, loss, 0.0))
    if p.stats is not None:
        tl.store(p.stats + 2 * row, m)
        tl.store(p.stats + 2 * row + 1, s)
    if HOW.GRADIENT:
        tl.debug_barrier()  # every thread has read the logits that it wants, before they are overwritten
        slope = tl.where(counts, scale, 0.0)
        factors = factors_of(m, s, lse, slope, n, HOW)
        n = Numbers(stride, out_stride, ignore_index, opaque(softcap), z_loss, smoothing)
        store_gradients(p.gradient, b_held, there, head_columns(HOW), factors, n, HOW.HELD, HOW)
        if head_columns(HOW) > 0:
            for first in tl.range(0, head_columns(HOW), HOW.GROUP * HOW.BLOCK, num_stages=1):
                b_head = load_blocks(p.logits, here, first, counts, HOW.GROUP, "evict_first", HOW)
                store_gradients(p.gradient, b_head, there, first, factors, n, HOW.GROUP, HOW)
        store_ends(p.gradient, there, x_first, x_last, True, True, factors, n, HOW)
        tl.debug_barrier()  # what is stored at the target's place as if it were none comes first
        store_one(p.gradient, there, target, counts, x_target, factors, slope * (1.0 - smoothing), n, HOW)


@triton.jit(do_not_specialize=["ignore_index", "softcap", "z_loss", "smoothing"])
def cross_entropy_gradient_kernel(
    p, stride, out_stride, ignore_index, softcap, z_loss, smoothing, PER_ROW: tl.constexpr, HOW: tl.constexpr
):
    """The gradient of the logits from the statistics of their rows. A program for each group of blocks of a row."""
    n = Numbers(stride, out_stride, ignore_index, softcap, z_loss, smoothing)
    GROUPS: tl.constexpr = head_columns(HOW) // (HOW.GROUP * HOW.BLOCK)
    row = tl.program_id(0) // GROUPS
    first = (tl.program_id(0) % GROUPS) * (HOW.GROUP * HOW.BLOCK)
    slope = tl.load(p.dloss + (row if PER_ROW else 0)).to(tl.float32)
    if p.scale is not None:
        slope *= tl.load(p.scale)
    if HOW.SHIFTED:  # its masks cost time, and most groups need none
        if (first > 0) & (first + HOW.GROUP * HOW.BLOCK <= HOW.V):
            store_group(p, row, first, slope, n, True, HOW)
        else:
            store_group(p, row, first, slope, n, False, HOW)
    else:
        store_group(p, row, first, slope, n, False, HOW)


@triton.jit
def store_group(p, row, first, slope, n, INSIDE: tl.constexpr, HOW: tl.constexpr):
    """The gradients of the group behind column `first`. INSIDE: it has no column that isn't the row's."""
    target = tl.load(p.targets + row).to(tl.int64)
    counts = target != n.ignore_index
    slope = tl.where(counts, slope, 0.0)
    here, there = row_of(row, n.stride, HOW), row_of(row, n.out_stride, HOW)
    b_group = load_blocks(p.logits, here, first, counts, HOW.GROUP, "evict_first", HOW, INSIDE)
    has_target = counts & in_group(target, first, here, HOW)
    x_target = load_one(p.logits, here, target, has_target)
    has_last = in_group(HOW.V - 1, first, here, HOW)
    x_first, x_last = load_one(p.logits, here, 0, counts & (first == 0)), load_one(p.logits, here, HOW.V - 1, counts & has_last)
    m = tl.load(p.stats + 2 * row)
    s = tl.load(p.stats + 2 * row + 1)
    factors = factors_of(m, s, m + log(s), slope, n, HOW)
    tl.debug_barrier()  # as in the kernel above, before and behind the blocks
    store_gradients(p.gradient, b_group, there, first, factors, n, HOW.GROUP, HOW, INSIDE)
    if not INSIDE:
        store_ends(p.gradient, there, x_first, x_last, first == 0, has_last, factors, n, HOW)
    tl.debug_barrier()
    store_one(p.gradient, there, target, has_target, x_target, factors, slope * (1.0 - n.smoothing), n, HOW)


@triton.jit(do_not_specialize=["M", "ignore_index"])
def count_targets_kernel(p, M, ignore_index, BLOCK: tl.constexpr):
    """scale = 1 / number of targets that count. One program."""
    o = tl.arange(0, BLOCK)
    b_count = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, M, BLOCK):
        b_target = tl.load(p.targets + first + o, mask=first + o < M, other=ignore_index)
        b_count += (b_target != ignore_index).to(tl.int32)
    tl.store(p.scale, 1.0 / tl.sum(b_count, 0).to(tl.float32))


@triton.jit(do_not_specialize=["M"])
def sum_losses_kernel(p, M, BLOCK: tl.constexpr):
    """scale · Σ loss, in a fixed order. One program."""
    o = tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, M, BLOCK):
        b_sum += tl.load(p.loss + first + o, mask=first + o < M, other=0.0)
    total = tl.sum(b_sum, 0)
    if p.scale is not None:
        scale = tl.load(p.scale)
        total = tl.where(scale == INF, float("nan"), total * scale)  # the mean of no loss
    tl.store(p.total, total)


@triton.jit(do_not_specialize=["M"])
def scale_kernel(p, stride, M, V, BLOCK: tl.constexpr):
    """gradient *= dloss, a scalar. Where that is 1 nothing is read, and few programs find that out sooner than one for each
    block of each row. Each takes a block of every so many rows."""
    factor = tl.load(p.dloss).to(tl.float32)
    if factor != 1.0:
        blocks = tl.cdiv(V, BLOCK)
        for row in tl.range(tl.program_id(0) // blocks, M, tl.num_programs(0) // blocks):
            o = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
            p_block = p.gradient + tl.full([], row, tl.int64) * stride + o
            b = tl.load(p_block, mask=o < V, other=0.0).to(tl.float32)
            b = tl.where(b == 0.0, 0.0, b * factor)  # a row that does not count has no gradient, whatever the factor is
            tl.store(p_block, b.to(p_block.dtype.element_ty), mask=o < V)


# ---- where blocks lie --------------------------------------------------------------------------------------------------------


@triton.constexpr_function
def per_word(HOW):
    """Logits that are loaded as one."""
    return 2 if HOW.PAIRS else 1


@triton.constexpr_function
def words(HOW):
    """Of a block."""
    return HOW.BLOCK // (2 if HOW.PAIRS else 1)


@triton.constexpr_function
def head_columns(HOW):
    """Columns of a row that are not held: whole groups."""
    group = HOW.GROUP * HOW.BLOCK
    columns = HOW.V + (HOW.VECTOR - 1 if HOW.SHIFTED else 0)
    return max(0, -(-(columns - HOW.HELD * HOW.BLOCK) // group) * group)


@triton.jit
def step(stride, HOW: tl.constexpr):
    """From a row to the next; the product may take more bits than the stride."""
    return tl.full([], stride, tl.int64) * HOW.STRIDE_UNIT


@triton.jit
def row_of(row, stride, HOW: tl.constexpr):
    at = tl.full([], row, tl.int64) * step(stride, HOW)
    if HOW.SHIFTED:
        vector = at // HOW.VECTOR
        first_word = vector * (HOW.VECTOR // per_word(HOW))
        shift = (at - vector * HOW.VECTOR).to(tl.int32)
    else:
        first_word = at // per_word(HOW)
        shift = 0
    return Row(at, first_word, shift)


@triton.jit
def word_indices(first, i: tl.constexpr, HOW: tl.constexpr):
    """int32 [words]: of block i behind column `first`."""
    return first // per_word(HOW) + i * words(HOW) + tl.arange(0, words(HOW))


@triton.jit
def pointers(p, row, first, i: tl.constexpr, HOW: tl.constexpr):
    """[words]: of block i behind column `first`."""
    if HOW.PAIRS:
        p = p.to(tl.pointer_type(tl.int32))
    return p + row.first_word + word_indices(first, i, HOW)


@triton.constexpr_function
def lies_inside(first, i, HOW):
    """Whether block i behind column `first`, a constant or anywhere in the head, lies inside the row, whatever the shift."""
    constant = isinstance(first, int)
    end = first + (i + 1) * HOW.BLOCK if constant else head_columns(HOW)
    return end <= HOW.V and not (HOW.SHIFTED and i == 0 and (not constant or first == 0))


@triton.jit
def inside(row, first, i: tl.constexpr, h: tl.constexpr, HOW: tl.constexpr):
    """int1 [words]: where half h of the words of block i is a column of the row."""
    o_word = word_indices(first, i, HOW)
    if HOW.SHIFTED:
        o = o_word * per_word(HOW) + h
        m = (o >= row.shift) & (o < row.shift + HOW.V)
    else:
        m = o_word < HOW.V // per_word(HOW)
    return m


@triton.jit
def in_group(column, first, row, HOW: tl.constexpr):
    """Whether a column is in the group of blocks behind `first`."""
    return (column + row.shift >= first) & (column + row.shift < first + HOW.GROUP * HOW.BLOCK)


@triton.jit
def load_blocks(
    p, row, first, counts, COUNT: tl.constexpr, POLICY: tl.constexpr, HOW: tl.constexpr, INSIDE: tl.constexpr = False
):
    """COUNT blocks as they lie in memory, all asked for before any is used. Nothing of rows that don't count.

    Where rows are shifted, whole vectors: they hold logits of the neighbouring rows too. That of the tensor's end may reach a
    few bytes past it, in the same 16, which memory always has.
    """
    b = ()
    for i in tl.static_range(COUNT):
        m = as_mask(counts)
        if INSIDE or lies_inside(first, i, HOW):
            pass
        elif HOW.SHIFTED:
            m &= word_indices(first, i, HOW) // (HOW.VECTOR // per_word(HOW)) * HOW.VECTOR < row.shift + HOW.V
        else:
            m &= inside(row, first, i, 0, HOW)
        b += (tl.load(pointers(p, row, first, i, HOW), mask=m, other=0, eviction_policy=POLICY),)
    return b


@triton.jit
def load_one(p, row, column, m):
    return tl.load(p + row.at + column, mask=m, other=0.0).to(tl.float32)


# ---- two logits in a word ----------------------------------------------------------------------------------------------------


@triton.jit
def halves(b, HOW: tl.constexpr):
    """The logits of a block, fp32: the even columns and the odd ones, or all of them in a tuple of one."""
    if HOW.PAIRS:
        if tl.bfloat16 == HOW.DTYPE:
            b_values = ((b << 16).to(tl.float32, bitcast=True), (b & -65536).to(tl.float32, bitcast=True))
        else:
            b_low = (b & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            b_values = (b_low, (b >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32))
    else:
        b_values = (widen(b),)
    return b_values


@triton.jit
def joined(b, HOW: tl.constexpr):
    """What `halves` was made of, from rounded values."""
    if HOW.PAIRS:
        if PTX and cuda_capability_geq(8):
            INSTRUCTION: tl.constexpr = (
                "cvt.rn.bf16x2.f32 $0, $2, $1;" if tl.bfloat16 == HOW.DTYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
            )
            b_words = tl.inline_asm_elementwise(INSTRUCTION, "=r,f,f", [b[0], b[1]], dtype=tl.int32, is_pure=True, pack=1)
        else:
            b_low = b[0].to(HOW.DTYPE).to(tl.uint16, bitcast=True).to(tl.int32)
            b_words = b_low | (b[1].to(HOW.DTYPE).to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    else:
        b_words = b[0].to(HOW.DTYPE)
    return b_words


# ---- the formulas ------------------------------------------------------------------------------------------------------------


@triton.jit
def nothing_yet(HOW: tl.constexpr):
    """Maximum, Σ exp and Σ of no logits: fp32 [words] each."""
    zeros = tl.zeros([words(HOW)], tl.float32)
    return zeros - INF, zeros, zeros


@triton.jit
def absorb(b, row, first, b_max, b_sum, b_total, n, HOW: tl.constexpr):
    """The same with the logits of some blocks."""
    b_largest = tl.full([words(HOW)], -INF, tl.float32)
    for i in tl.static_range(len(b)):
        for h in tl.static_range(per_word(HOW)):
            b_largest = tl.maximum(b_largest, outside_as(halves(b[i], HOW)[h], -INF, row, first, i, h, HOW))
    b_largest, _ = softcapped(b_largest, n, HOW)
    b_new = tl.maximum(b_max, b_largest)
    b_shift = tl.where(b_new == -INF, 0.0, b_new)  # where all is -inf, exp(-inf - 0) = 0
    b_sum *= tl.exp2((b_max - b_shift) * LOG2E)
    for i in tl.static_range(len(b)):
        for h in tl.static_range(per_word(HOW)):
            x, _ = softcapped(halves(b[i], HOW)[h], n, HOW)
            b_sum += tl.exp2((outside_as(x, -INF, row, first, i, h, HOW) - b_shift) * LOG2E)
            if HOW.SMOOTHING:
                b_total += outside_as(x, 0.0, row, first, i, h, HOW)
    return b_new, b_sum, b_total


@triton.jit
def outside_as(x, VALUE: tl.constexpr, row, first, i: tl.constexpr, h: tl.constexpr, HOW: tl.constexpr):
    """x, and VALUE outside the row."""
    if not lies_inside(first, i, HOW):
        x = tl.where(inside(row, first, i, h, HOW), x, VALUE)
    return x


@triton.jit
def join_sums(m1, s1, m2, s2):
    """Maximum and Σ exp(x - maximum) of two sets of logits."""
    m = tl.maximum(m1, m2)
    shift = tl.where(m == -INF, 0.0, m)
    return m, s1 * tl.exp2((m1 - shift) * LOG2E) + s2 * tl.exp2((m2 - shift) * LOG2E)


@triton.jit
def softcapped(x, n, HOW: tl.constexpr):
    """c tanh(x / c), and its derivative; without softcap x and 1."""
    slope = 1.0
    if HOW.SOFTCAP:
        t = tanh(x * (1.0 / n.softcap))
        x = n.softcap * t
        slope = 1.0 - t * t
    return x, slope


class Factors(NamedTuple):
    """gradient = exp(x - m) · exponential - constant."""

    m: tl.tensor
    exponential: tl.tensor
    constant: tl.tensor


@triton.jit
def factors_of(m, s, lse, slope, n, HOW: tl.constexpr):
    """slope: what the loss of the row is multiplied by, 0 where it doesn't count."""
    return Factors(m, tl.where(slope == 0.0, 0.0, slope * (1.0 + 2.0 * n.z_loss * lse) / s), slope * n.smoothing / HOW.V)


@triton.jit
def gradient_of(x, f, n, HOW: tl.constexpr):
    x, inner = softcapped(x, n, HOW)
    g = tl.exp2((x - f.m) * LOG2E) * f.exponential
    if HOW.SMOOTHING:
        g -= f.constant
    if HOW.SOFTCAP:
        g *= inner
    return g


@triton.jit
def store_gradients(p, b, row, first, f, n, COUNT: tl.constexpr, HOW: tl.constexpr, INSIDE: tl.constexpr = False):
    """Of COUNT blocks, as if no column were the target. Of a word that the row shares with another, nothing."""
    for i in tl.static_range(COUNT):
        g = ()
        for h in tl.static_range(per_word(HOW)):
            g += (gradient_of(halves(b[i], HOW)[h], f, n, HOW),)
        if INSIDE or lies_inside(first, i, HOW):
            tl.store(pointers(p, row, first, i, HOW), joined(g, HOW))
        else:
            m = inside(row, first, i, 0, HOW) & inside(row, first, i, per_word(HOW) - 1, HOW)
            tl.store(pointers(p, row, first, i, HOW), joined(g, HOW), mask=m)


@triton.jit
def store_ends(p, row, x_first, x_last, has_first, has_last, f, n, HOW: tl.constexpr):
    """Of the columns whose words are shared with another row."""
    if HOW.SHIFTED and HOW.PAIRS:
        store_one(p, row, 0, has_first & (row.shift % 2 == 1), x_first, f, 0.0, n, HOW)
        store_one(p, row, HOW.V - 1, has_last & ((row.shift + HOW.V) % 2 == 1), x_last, f, 0.0, n, HOW)


@triton.jit
def store_one(p, row, column, m, x, f, less, n, HOW: tl.constexpr):
    """The gradient of one logit x. less: what is subtracted because it is the target's."""
    x, inner = softcapped(x, n, HOW)
    g = tl.exp2((x - f.m) * LOG2E) * f.exponential - less
    if HOW.SMOOTHING:
        g -= f.constant
    tl.store(p + row.at + column, (g * inner).to(p.dtype.element_ty), mask=m)


@triton.jit
def log(x):
    """To one ulp, for a scalar; the GPU's own logarithm has an error of 2^-22."""
    return tl.log(x.to(tl.float64)).to(tl.float32)


@triton.jit
def opaque(x):
    """x, and the compiler does not know that it is: else it would keep the capped logits for the gradient, and spill them."""
    if PTX and is_cuda():
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)
    return x


@triton.jit
def check_target(target, counts, HOW: tl.constexpr):
    """Ends the kernel with an error, as PyTorch's does, where a target is no column."""
    tl.device_assert(~counts | ((target >= 0) & (target < HOW.V)), "cross_entropy_fn: a target is out of range")
