"""Cross-entropy of rows of logits: loss and gradient with each logit read once, or loss first and gradient later.

    m = max_j x_j          s = Σ_j exp(x_j − m)          lse = m + log s                 p_j = exp(x_j − m) / s
    loss = (1 − ε) (lse − x_t) + ε (lse − mean_j x_j) + z lse²                           t: the target, ε: label smoothing
    dloss/dx_j = p_j (1 + 2 z lse) − (1 − ε) [j = t] − ε / V                             z: z_loss (PaLM, arXiv:2204.02311)
    with softcap c:  x_j = c tanh(l_j / c),  dx_j/dl_j = 1 − (x_j / c)²                  (Gemma 2, arXiv:2408.00118)

A program keeps the last HELD blocks of its row in registers, two 16-bit logits in each, and so reads them once. What is left of
a wider row, its head, is read by groups of blocks, once for m and s and once for the gradient.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_cuda

from . import INTERPRET
from .nvidia import PTX, prefetch_rows, widen

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))


@dataclass(frozen=True)
class RowTile:
    """What a kernel is compiled for."""

    V: int  # columns in a row
    BLOCK: int  # columns in a block, a power of two
    HELD: int  # blocks at the end of a row that stay in registers
    GROUP: int  # blocks of the head that are loaded together
    PAIRS: bool  # two 16-bit logits are loaded as one int32
    STRIDE_UNIT: int  # divides the distance between rows, so that the compiler knows their alignment
    DTYPE: Any  # Triton's dtype of the logits
    GRADIENT: bool  # the gradient is computed too
    SOFTCAP: bool
    SMOOTHING: bool
    PREFETCH: bool = False  # the next row of a program is brought into L2

    def __post_init__(self) -> None:
        if not INTERPRET:  # a kernel is to find constants in them; the interpreter takes plain values
            for field in fields(self):
                object.__setattr__(self, field.name, tl.constexpr(getattr(self, field.name)))


class Pointers(NamedTuple):
    logits: Any  # [M, V]
    gradient: Any  # [M, V], of the logits' strides: may be the logits themselves; None without GRADIENT
    targets: Any  # [M]
    loss: Any  # fp32 [M], 0 where ignored
    stats: Any  # fp32 [M, 2]: m and s; None where nobody needs them
    scale: Any  # fp32 [1], a factor of the gradient; None for 1


class Numbers(NamedTuple):
    M: Any
    stride: Any  # from a row to the next, over STRIDE_UNIT
    ignore_index: Any
    softcap: Any
    z_loss: Any
    smoothing: Any


@triton.jit(do_not_specialize=["M", "ignore_index", "softcap", "z_loss", "smoothing"])
def cross_entropy_kernel(p, M, stride, ignore_index, softcap, z_loss, smoothing, HOW: tl.constexpr):
    """Loss of each row; with GRADIENT also scale · dloss/dlogits. A program takes every num_programs-th row."""
    n = Numbers(M, stride, ignore_index, softcap, z_loss, smoothing)
    scale = 1.0
    if p.scale is not None:
        scale = tl.load(p.scale)
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=1):
        if HOW.PREFETCH:
            prefetch_rows(p.logits, row + tl.num_programs(0), M, row_step(n, HOW), 0, HOW.V, 1)
        target = tl.load(p.targets + row).to(tl.int64)
        counts = target != ignore_index
        check_target(target, counts, HOW)
        at = start_of(row, n, HOW)
        b_held = load_blocks(p.logits, at, head_columns(HOW), counts, HOW.HELD, "evict_first", HOW)
        x_target = tl.load(p.logits + at + target, mask=counts, other=0.0).to(tl.float32)
        b_max, b_sum, b_total = nothing_yet(HOW)
        if head_columns(HOW) > 0:
            for first in tl.range(0, head_columns(HOW), HOW.GROUP * HOW.BLOCK, num_stages=1):
                b_head = load_blocks(p.logits, at, first, counts, HOW.GROUP, "evict_last", HOW)
                b_max, b_sum, b_total = absorb(b_head, first, b_max, b_sum, b_total, n, HOW)
        b_max, b_sum, b_total = absorb(b_held, head_columns(HOW), b_max, b_sum, b_total, n, HOW)
        m, s = tl.reduce((b_max, b_sum), 0, join_sums)
        xt, _ = softcapped(x_target, n, HOW)
        log_s = tl.log2(s) * LN2
        lse = m + log_s
        loss = log_s + (m - xt)  # the large terms first: their difference has no rounding error
        if HOW.SMOOTHING:
            loss += smoothing * (xt - tl.sum(b_total, 0) / HOW.V)
        loss += z_loss * lse * lse
        tl.store(p.loss + row, tl.where(counts, loss, 0.0))
        if p.stats is not None:
            tl.store(p.stats + 2 * row, m)
            tl.store(p.stats + 2 * row + 1, s)
        if HOW.GRADIENT:
            tl.debug_barrier()  # every thread has read the target's logit, which is about to be overwritten
            slope = tl.where(counts, scale, 0.0)
            factors = factors_of(m, s, lse, slope, n, HOW)
            n = Numbers(M, stride, ignore_index, opaque(softcap), z_loss, smoothing)
            store_gradients(p.gradient, b_held, at, head_columns(HOW), factors, n, HOW.HELD, HOW)
            if head_columns(HOW) > 0:
                for first in tl.range(0, head_columns(HOW), HOW.GROUP * HOW.BLOCK, num_stages=1):
                    b_head = load_blocks(p.logits, at, first, counts, HOW.GROUP, "evict_first", HOW)
                    store_gradients(p.gradient, b_head, at, first, factors, n, HOW.GROUP, HOW)
            tl.debug_barrier()  # what a block stored at the target's place comes first
            store_target(p.gradient, at, target, counts, x_target, factors, slope, n, HOW)


@triton.jit(do_not_specialize=["M", "ignore_index", "softcap", "z_loss", "smoothing"])
def cross_entropy_gradient_kernel(
    p, p_dloss, M, stride, ignore_index, softcap, z_loss, smoothing, PER_ROW: tl.constexpr, HOW: tl.constexpr
):
    """The gradient of the logits from the statistics of their rows. A program for each group of blocks of a row."""
    n = Numbers(M, stride, ignore_index, softcap, z_loss, smoothing)
    GROUPS: tl.constexpr = (HOW.V + HOW.GROUP * HOW.BLOCK - 1) // (HOW.GROUP * HOW.BLOCK)
    row = tl.program_id(0) // GROUPS
    first = (tl.program_id(0) % GROUPS) * (HOW.GROUP * HOW.BLOCK)
    target = tl.load(p.targets + row).to(tl.int64)
    counts = target != ignore_index
    at = start_of(row, n, HOW)
    b_group = load_blocks(p.logits, at, first, counts, HOW.GROUP, "evict_first", HOW)
    here = counts & (target >= first) & (target < first + HOW.GROUP * HOW.BLOCK)
    x_target = tl.load(p.logits + at + target, mask=here, other=0.0).to(tl.float32)
    m = tl.load(p.stats + 2 * row)
    s = tl.load(p.stats + 2 * row + 1)
    slope = tl.load(p_dloss + (row if PER_ROW else 0)).to(tl.float32)
    if p.scale is not None:
        slope *= tl.load(p.scale)
    slope = tl.where(counts, slope, 0.0)
    factors = factors_of(m, s, m + tl.log2(s) * LN2, slope, n, HOW)
    tl.debug_barrier()
    store_gradients(p.gradient, b_group, at, first, factors, n, HOW.GROUP, HOW)
    tl.debug_barrier()
    store_target(p.gradient, at, target, here, x_target, factors, slope, n, HOW)


@triton.jit(do_not_specialize=["M", "ignore_index"])
def count_targets_kernel(p_targets, p_scale, M, ignore_index, BLOCK: tl.constexpr):
    """scale = 1 / number of targets that count. One program."""
    o = tl.arange(0, BLOCK)
    b_count = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, M, BLOCK):
        b_target = tl.load(p_targets + first + o, mask=first + o < M, other=ignore_index)
        b_count += (b_target != ignore_index).to(tl.int32)
    tl.store(p_scale, 1.0 / tl.sum(b_count, 0).to(tl.float32))


@triton.jit(do_not_specialize=["M"])
def sum_losses_kernel(p_loss, p_scale, p_sum, M, BLOCK: tl.constexpr):
    """scale · Σ loss, in a fixed order. One program."""
    o = tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, M, BLOCK):
        b_sum += tl.load(p_loss + first + o, mask=first + o < M, other=0.0)
    total = tl.sum(b_sum, 0)
    if p_scale is not None:
        scale = tl.load(p_scale)
        total = tl.where(scale == INF, float("nan"), total * scale)  # the mean of no loss
    tl.store(p_sum, total)


@triton.jit(do_not_specialize=["size"])
def scale_kernel(p, p_factor, size, BLOCK: tl.constexpr):
    """p *= factor, both on the device. Where the factor is 1 nothing is read."""
    factor = tl.load(p_factor).to(tl.float32)
    if factor != 1.0:
        o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        b = tl.load(p + o, mask=o < size, other=0.0).to(tl.float32)
        tl.store(p + o, (b * factor).to(p.dtype.element_ty), mask=o < size)


# ---- where blocks lie --------------------------------------------------------------------------------------------------------


@triton.constexpr_function
def head_columns(HOW):
    """Columns of a row that are not held: whole groups."""
    group = HOW.GROUP * HOW.BLOCK
    return max(0, -(-(HOW.V - HOW.HELD * HOW.BLOCK) // group) * group)


@triton.constexpr_function
def words(HOW):
    """Of a block, each with one logit or two."""
    return HOW.BLOCK // 2 if HOW.PAIRS else HOW.BLOCK


@triton.constexpr_function
def zero_bits(HOW):
    return tl.int32 if HOW.PAIRS else HOW.DTYPE


@triton.jit
def row_step(n, HOW: tl.constexpr):
    return tl.full([], n.stride, tl.int64) * HOW.STRIDE_UNIT


@triton.jit
def start_of(row, n, HOW: tl.constexpr):
    """Of a row, in logits from the first one."""
    return tl.full([], row, tl.int64) * row_step(n, HOW)


@triton.jit
def pointers(p, at, first, i: tl.constexpr, HOW: tl.constexpr):
    """[words]: of block i behind column `first`."""
    if HOW.PAIRS:
        p_words = p.to(tl.pointer_type(tl.int32)) + at // 2 + (first // 2 + i * words(HOW))
    else:
        p_words = p + at + (first + i * words(HOW))
    return p_words + tl.arange(0, words(HOW))


@triton.jit
def inside(first, i: tl.constexpr, HOW: tl.constexpr):
    """int1 [words]: where block i behind column `first` is inside the row."""
    PER_WORD: tl.constexpr = 2 if HOW.PAIRS else 1
    return first // PER_WORD + i * words(HOW) + tl.arange(0, words(HOW)) < HOW.V // PER_WORD


@triton.constexpr_function
def ends_inside(first, i, HOW):
    """Whether block i behind column `first`, a constant or anywhere in the head, ends inside the row."""
    end = first + (i + 1) * HOW.BLOCK if isinstance(first, int) else head_columns(HOW)
    return end <= HOW.V


@triton.jit
def load_blocks(p, at, first, counts, COUNT: tl.constexpr, POLICY: tl.constexpr, HOW: tl.constexpr):
    """COUNT blocks as they lie in memory, all asked for before any is used. Nothing of rows that don't count."""
    b = ()
    for i in tl.static_range(COUNT):
        if ends_inside(first, i, HOW):
            m = counts
        else:
            m = inside(first, i, HOW) & counts
        b += (tl.load(pointers(p, at, first, i, HOW), mask=m, other=0, eviction_policy=POLICY),)
    return b


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
def absorb(b, first, b_max, b_sum, b_total, n, HOW: tl.constexpr):
    """The same with the logits of some blocks."""
    b_largest = tl.full([words(HOW)], -INF, tl.float32)
    for i in tl.static_range(len(b)):
        for h in tl.static_range(2 if HOW.PAIRS else 1):
            b_largest = tl.maximum(b_largest, outside_as(halves(b[i], HOW)[h], -INF, first, i, HOW))
    b_largest, _ = softcapped(b_largest, n, HOW)
    b_new = tl.maximum(b_max, b_largest)
    b_shift = tl.where(b_new == -INF, 0.0, b_new)  # where all is -inf, exp(-inf - 0) = 0
    b_sum *= tl.exp2((b_max - b_shift) * LOG2E)
    for i in tl.static_range(len(b)):
        for h in tl.static_range(2 if HOW.PAIRS else 1):
            x, _ = softcapped(halves(b[i], HOW)[h], n, HOW)
            b_sum += tl.exp2((outside_as(x, -INF, first, i, HOW) - b_shift) * LOG2E)
            if HOW.SMOOTHING:
                b_total += outside_as(x, 0.0, first, i, HOW)
    return b_new, b_sum, b_total


@triton.jit
def outside_as(x, VALUE: tl.constexpr, first, i: tl.constexpr, HOW: tl.constexpr):
    """x, and VALUE past the row's end."""
    if not ends_inside(first, i, HOW):
        x = tl.where(inside(first, i, HOW), x, VALUE)
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


@triton.jit
def tanh(x):
    """To 2 ulp. Below 0.3 by the series, where the difference in the other formula has few digits."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    q = x * x
    near = x + x * q * (-1 / 3 + q * (2 / 15 + q * (-17 / 315 + q * (62 / 2835))))
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0.0, -far, far))


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
def store_gradients(p, b, at, first, f, n, COUNT: tl.constexpr, HOW: tl.constexpr):
    """Of COUNT blocks, as if no column were the target."""
    for i in tl.static_range(COUNT):
        g = ()
        for h in tl.static_range(2 if HOW.PAIRS else 1):
            g += (gradient_of(halves(b[i], HOW)[h], f, n, HOW),)
        if ends_inside(first, i, HOW):
            tl.store(pointers(p, at, first, i, HOW), joined(g, HOW))
        else:
            tl.store(pointers(p, at, first, i, HOW), joined(g, HOW), mask=inside(first, i, HOW))


@triton.jit
def store_target(p, at, target, m, x, f, slope, n, HOW: tl.constexpr):
    """The gradient of the target's logit x."""
    xc, inner = softcapped(x, n, HOW)
    g = tl.exp2((xc - f.m) * LOG2E) * f.exponential - slope * (1.0 - n.smoothing)
    if HOW.SMOOTHING:
        g -= f.constant
    tl.store(p + at + target, (g * inner).to(p.dtype.element_ty), mask=m)


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
