"""Norm and rotary positions of queries and keys: the forward kernel, the backward kernel, and the sum over its partial sums.

A row is the D features of one head of one token. Its features form D/2 pairs, and the position turns the first R/2 of them:

    x̂ = x normalised over D           (`norms`; x itself without a norm)
    y = x̂ · (weight + OFFSET) + bias
    out_a = y_a · cos − y_b · sin,    out_b = y_a · sin + y_b · cos        for each pair (a, b)

Su et al. 2021, arXiv:2104.09864. The gradient of a turn is the turn by the opposite angle. Backward normalises x again: that
takes no bytes, because it reads x anyway.

A part is a set of heads that share one weight: the queries, the keys, or a single head where each has its own weight. A program
works on one part. The rows of a part are counted within a sequence, T · HEADS of them, so that a row's position costs one
division by a constant.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .constants import Constants
from .norms import NONE, centres, deviation, inverse, row_sums, spread, through_norm
from .nvidia import keep_order, widen
from .rows import mean
from .weight_gradients import add_products, sum_partials, zero_sums


@dataclass(frozen=True)
class Variant(Constants):
    """What a kernel is compiled for."""

    D: int  # features of a head
    R: int  # features that are turned; 0: none
    HEADS: int  # query heads
    KV_HEADS: int  # key heads, and as many value heads
    PER_HEAD: bool  # each head has a weight of its own
    PACKED: bool  # queries, keys and values lie side by side in one tensor
    NORM: int  # a value of `reference.Norm`
    OFFSET: float  # added to the weights: 1.0 where they are zero-centred
    INTERLEAVED: bool  # feature 2i is paired with 2i + 1; else i with i + R/2
    ROWS: int  # in a tile
    BLOCK: int  # pairs in a tile's row: D/2 rounded up to a power of two
    VECTOR: int  # neighbouring features in a thread
    UNIT: int  # a power of two that divides all strides, which come divided by it
    HEAD_STRIDES: tuple[int, ...]  # elements from a head to the next: of x and k; in backward of dq, dk, dv, x and k
    OWN_ANGLES: bool  # each sequence has rows of cos and sin of its own, T of them
    ANGLE_STRIDES: tuple[int, int]  # in cos and sin, from a row to the next and from a pair to the next
    STAGES: int = 1  # tiles in flight in backward, the one at work included
    EARLY_START: bool = False  # programmatic dependent launch: the kernel waits for the one before by itself
    WANTED: tuple[bool, bool] = (False, False)  # whether backward sums up gradients of weights, and of biases


class ForwardPointers(NamedTuple):
    """Tensors as rows [B, T, heads, D] but for what is said; absent ones are None."""

    x: tl.tensor  # queries; or queries, keys and values side by side
    k: tl.tensor  # keys; None where they lie in x
    cos: tl.tensor  # [positions, R/2], or [B · T, R/2] where sequences have their own
    sin: tl.tensor
    positions: tl.tensor  # [B, T]; None: 0 … T-1
    q_weight: tl.tensor  # [D], or [heads, D]
    q_bias: tl.tensor
    k_weight: tl.tensor
    k_bias: tl.tensor
    q_out: tl.tensor
    k_out: tl.tensor


class BackwardPointers(NamedTuple):
    dq: tl.tensor
    dk: tl.tensor
    dv: tl.tensor  # there where x is packed
    x: tl.tensor  # None without a norm
    k: tl.tensor
    cos: tl.tensor
    sin: tl.tensor
    positions: tl.tensor
    q_weight: tl.tensor
    k_weight: tl.tensor
    dx: tl.tensor  # like x, contiguous
    dk_in: tl.tensor  # like k, contiguous; None where x is packed
    partials: tl.tensor  # fp32 [programs of queries and keys, gradients wanted, D]


class WeightGradients(NamedTuple):
    """[D] or [heads, D]; absent ones are None."""

    partials: tl.tensor  # those of BackwardPointers
    q_weight: tl.tensor
    q_bias: tl.tensor
    k_weight: tl.tensor
    k_bias: tl.tensor


class At(NamedTuple):
    """The place of a tile."""

    sequence: tl.tensor
    index: tl.tensor  # within the sequence
    count: tl.tensor  # of tiles in each sequence


class Rows(NamedTuple):
    """The rows of a tile."""

    sequence: tl.tensor  # int64
    tokens: tl.tensor  # int64 [ROWS], within the sequence
    heads: tl.tensor  # int32 [ROWS], within the part
    m: tl.tensor  # int1 [ROWS, 1]: rows that are there


# ---- forward ----------------------------------------------------------------------------------------------------------------

FORWARD_NUMBERS = ["T", "q_tiles", "table_rows", "eps", "x_batch", "x_token", "k_batch", "k_token"]


# A new number of tokens must compile nothing.
@triton.jit(do_not_specialize=FORWARD_NUMBERS)
def rotary_forward_kernel(p, T, q_tiles, table_rows, eps, x_batch, x_token, k_batch, k_token, HOW: tl.constexpr):
    """A program for each tile, first those of queries. x_batch … k_token: strides over HOW.UNIT."""
    if HOW.EARLY_START:
        gdc_wait()  # for the kernel before; nothing may be read or written above
    program = tl.program_id(0)
    if program < q_tiles:
        o = HOW.HEADS * HOW.D
        turn_tile(
            p.x, x_batch, x_token, HOW.HEAD_STRIDES[0], p.q_weight, p.q_bias, p.q_out, o, p, program, T, table_rows, eps,
            HOW.HEADS, HOW,
        )  # fmt: skip
    else:
        program -= q_tiles
        o = HOW.KV_HEADS * HOW.D
        p_k = p.x + HOW.HEADS * HOW.D if HOW.PACKED else p.k
        batch = x_batch if HOW.PACKED else k_batch
        token = x_token if HOW.PACKED else k_token
        turn_tile(
            p_k, batch, token, HOW.HEAD_STRIDES[0 if HOW.PACKED else 1], p.k_weight, p.k_bias, p.k_out, o, p, program, T,
            table_rows, eps, HOW.KV_HEADS, HOW,
        )  # fmt: skip


@triton.jit
def turn_tile(
    p_x, batch, token, HEAD_STRIDE: tl.constexpr, p_weight, p_bias, p_out, o_token, p, program, T, table_rows, eps,
    HEADS: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Normalises and turns one tile of `HEADS` heads. Heads with weights of their own are parts of one head each."""
    if HOW.PER_HEAD:  # neighbouring programs take neighbouring heads
        head = program % HEADS
        rows = rows_of(first_tile(program // HEADS, T, 1, HOW), T, 1, HOW)
        p_x += head.to(tl.int64) * HEAD_STRIDE
        p_out += head * HOW.D
        b_w = load_weights(p_weight, head, HOW, HOW.OFFSET)
        b_bias = load_weights(p_bias, head, HOW, 0.0)
    else:
        rows = rows_of(first_tile(program, T, HEADS, HOW), T, HEADS, HOW)
        b_w = load_weights(p_weight, 0, HOW, HOW.OFFSET)
        b_bias = load_weights(p_bias, 0, HOW, 0.0)
    b_x = load_raw(p_x, row_offsets(rows, batch, token, HEAD_STRIDE, HOW), rows.m, HOW)
    b_cos, b_sin = load_angles(p, rows, T, table_rows, HOW)
    b_a, b_b = pairs(b_x, HOW)
    if HOW.NORM != NONE:
        b_a, b_b, _ = normalised(b_a, b_b, eps, HOW)
        if len(b_w) > 0:
            b_a *= b_w[0]
            b_b *= b_w[1]
        if len(b_bias) > 0:
            b_a += b_bias[0]
            b_b += b_bias[1]
    b_a, b_b = turned(b_a, b_b, b_cos, b_sin)
    o_out = (rows.sequence * T + rows.tokens) * o_token + rows.heads * HOW.D
    store_pairs(p_out, o_out, rows.m, b_a, b_b, HOW)


# ---- backward ---------------------------------------------------------------------------------------------------------------

BACKWARD_NUMBERS = [
    "B", "T", "q_programs", "k_programs", "table_rows", "eps", "dq_batch", "dq_token", "dk_batch", "dk_token", "dv_batch",
    "dv_token", "x_batch", "x_token", "k_batch", "k_token",
]  # fmt: skip


@triton.jit(do_not_specialize=BACKWARD_NUMBERS)
def rotary_backward_kernel(
    p, B, T, q_programs, k_programs, table_rows, eps, dq_batch, dq_token, dk_batch, dk_token, dv_batch, dv_token, x_batch,
    x_token, k_batch, k_token, HOW: tl.constexpr,
):  # fmt: skip
    """Persistent programs: q_programs for each part of queries, then k_programs for each of keys. All of them then copy dv.

    With g = the turn of the upstream gradient by the opposite angle:

        dweight = Σ_rows g · x̂,   dbias = Σ_rows g,   dx = the gradient of g · weight through the norm    `norms.norm_gradient`

    A program stores a partial sum of its part's weight gradients; finish_rotary_weights_kernel adds them in a fixed order.
    """
    if HOW.EARLY_START:
        gdc_launch_dependents()  # the sum over partials may take its place now: it reads nothing before its own wait
        gdc_wait()
    program = tl.program_id(0)
    Q_PARTS: tl.constexpr = HOW.HEADS if HOW.PER_HEAD else 1
    o_dx = token_width(HOW)
    o_k = HOW.HEADS * HOW.D if HOW.PACKED else 0
    if program < Q_PARTS * q_programs:
        turn_back(
            p.dq, dq_batch, dq_token, HOW.HEAD_STRIDES[0], p.x, x_batch, x_token, HOW.HEAD_STRIDES[3], p.q_weight, p.dx, o_dx,
            p, program % q_programs, q_programs, program // q_programs, program, B, T, table_rows, eps, HOW.HEADS, HOW,
        )  # fmt: skip
    else:
        mine = program - Q_PARTS * q_programs
        p_k = p.k if not HOW.PACKED or p.x is None else p.x + o_k
        p_dk = p.dx + o_k if HOW.PACKED else p.dk_in
        batch = x_batch if HOW.PACKED else k_batch
        token = x_token if HOW.PACKED else k_token
        turn_back(
            p.dk, dk_batch, dk_token, HOW.HEAD_STRIDES[1], p_k, batch, token, HOW.HEAD_STRIDES[3 if HOW.PACKED else 4],
            p.k_weight, p_dk, o_dx if HOW.PACKED else HOW.KV_HEADS * HOW.D, p, mine % k_programs, k_programs,
            mine // k_programs, program, B, T, table_rows, eps, HOW.KV_HEADS, HOW,
        )  # fmt: skip
    if HOW.PACKED:
        o_v = (HOW.HEADS + HOW.KV_HEADS) * HOW.D
        at = first_tile(program, T, HOW.KV_HEADS, HOW)
        step = first_tile(tl.num_programs(0), T, HOW.KV_HEADS, HOW)
        for _ in tl.range(program, B * step.count, tl.num_programs(0), num_stages=HOW.STAGES):
            rows = rows_of(at, T, HOW.KV_HEADS, HOW)
            b_a, b_b = pairs(load_raw(p.dv, row_offsets(rows, dv_batch, dv_token, HOW.HEAD_STRIDES[2], HOW), rows.m, HOW), HOW)
            o_out = (rows.sequence * T + rows.tokens) * o_dx + rows.heads * HOW.D
            store_pairs(p.dx + o_v, o_out, rows.m, b_a, b_b, HOW)
            at = next_tile(at, step)


@triton.jit
def turn_back(
    p_dout, batch, token, HEAD_STRIDE: tl.constexpr, p_x, x_batch, x_token, X_HEAD_STRIDE: tl.constexpr, p_weight, p_dx,
    o_token, p, first, programs, part, partial, B, T, table_rows, eps, HEADS: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """The gradients of a part. first, programs: the part's tiles that this program takes; partial: its place among partials."""
    SHARED: tl.constexpr = 1 if HOW.PER_HEAD else HEADS  # heads that share the weight
    if HOW.PER_HEAD:
        p_dout += part.to(tl.int64) * HEAD_STRIDE
        p_dx += part * HOW.D
        if p_x is not None:
            p_x += part.to(tl.int64) * X_HEAD_STRIDE
        b_w = load_weights(p_weight, part, HOW, HOW.OFFSET)
    else:
        b_w = load_weights(p_weight, 0, HOW, HOW.OFFSET)
    b_sums = zero_sums(HOW.WANTED, 2, HOW.ROWS, HOW.BLOCK)
    at = first_tile(first, T, SHARED, HOW)
    step = first_tile(programs, T, SHARED, HOW)
    for _ in tl.range(first, B * step.count, programs, num_stages=HOW.STAGES):
        rows = rows_of(at, T, SHARED, HOW)
        b_dout = load_raw(p_dout, row_offsets(rows, batch, token, HEAD_STRIDE, HOW), rows.m, HOW)
        b_x = load_raw(p_x, row_offsets(rows, x_batch, x_token, X_HEAD_STRIDE, HOW), rows.m, HOW)
        b_cos, b_sin = load_angles(p, rows, T, table_rows, HOW)
        keep_order()  # else x, which is used late, is loaded when the rest has come
        at = next_tile(at, step)
        b_a, b_b = pairs(b_dout, HOW)
        b_a, b_b = turned(b_a, b_b, b_cos, 0.0 - b_sin)
        if HOW.NORM != NONE:
            b_xa, b_xb = pairs(b_x, HOW)
            b_xa, b_xb, b_rstd = normalised(b_xa, b_xb, eps, HOW)
            b_xhat = (b_xa, b_xb)
            b_sums = add_products(b_sums, 0, (b_a, b_b), b_xhat)
            if len(b_w) > 0:
                b_a *= b_w[0]
                b_b *= b_w[1]
            b_c1, b_c2 = row_sums((b_a, b_b), b_xhat, HOW.NORM)
            b_a, b_b = through_norm((), (b_a, b_b), b_xhat, b_xhat, b_c1, b_c2, b_rstd, b_rstd, HOW.NORM, HOW.D)
        o_out = (rows.sequence * T + rows.tokens) * o_token + rows.heads * HOW.D
        store_pairs(p_dx, o_out, rows.m, b_a, b_b, HOW)
    for i in tl.static_range(2):
        if HOW.WANTED[i]:
            store_partial(p.partials, partial, i, b_sums[i], HOW)


@triton.jit
def store_partial(p_partials, partial, i: tl.constexpr, b_sum, HOW: tl.constexpr):
    """Stores the sums over the rows of a tile as gradient i (0: weight, 1: bias) of this program."""
    p_row = p_partials + (partial.to(tl.int64) * wanted(HOW) + (i if HOW.WANTED[0] else 0)) * HOW.D
    o_a, o_b = columns(HOW)
    m = tl.arange(0, HOW.BLOCK) < HOW.D // 2
    tl.store(p_row + o_a, tl.sum(b_sum[0], 0), mask=m)
    tl.store(p_row + o_b, tl.sum(b_sum[1], 0), mask=m)


@triton.jit(do_not_specialize=["q_programs", "k_programs"])
def finish_rotary_weights_kernel(p, q_programs, k_programs, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, HOW: tl.constexpr):
    """A program adds up, in a fixed order, BLOCK columns of one gradient of one part."""
    if HOW.EARLY_START:
        gdc_wait()
    Q_PARTS: tl.constexpr = HOW.HEADS if HOW.PER_HEAD else 1
    part = tl.program_id(0) // wanted(HOW)
    i = tl.program_id(0) % wanted(HOW)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = part * q_programs
    count = q_programs
    if part >= Q_PARTS:
        first = Q_PARTS * q_programs + (part - Q_PARTS) * k_programs
        count = k_programs
    b_total = sum_partials(p.partials, first, count, wanted(HOW), i, cols, HOW.D, PROGRAMS)
    if HOW.WANTED[0] and i == 0:
        store_weights(p.q_weight, p.k_weight, part, cols, b_total, HOW)
    else:
        store_weights(p.q_bias, p.k_bias, part, cols, b_total, HOW)


@triton.jit
def store_weights(p_q, p_k, part, cols, b_total, HOW: tl.constexpr):
    Q_PARTS: tl.constexpr = HOW.HEADS if HOW.PER_HEAD else 1
    if part < Q_PARTS:
        if p_q is not None:
            tl.store(p_q + part * HOW.D + cols, b_total, mask=cols < HOW.D)
    else:
        if p_k is not None:
            tl.store(p_k + (part - Q_PARTS) * HOW.D + cols, b_total, mask=cols < HOW.D)


# ---- what both directions share ---------------------------------------------------------------------------------------------


@triton.constexpr_function
def token_width(HOW):
    """Elements of a token in dx."""
    return (HOW.HEADS + 2 * HOW.KV_HEADS if HOW.PACKED else HOW.HEADS) * HOW.D


@triton.constexpr_function
def wanted(HOW):
    """How many gradients of a part are summed up."""
    return sum(HOW.WANTED)


@triton.constexpr_function
def pads(HOW):
    """Whether a tile's row is wider than a row."""
    return HOW.D // 2 != HOW.BLOCK


@triton.jit
def first_tile(tile, T, HEADS: tl.constexpr, HOW: tl.constexpr):
    """The place of a tile of a part with HEADS heads; or, of a number of tiles, how far it reaches."""
    count = tl.cdiv(T * HEADS, HOW.ROWS)
    return At(tile // count, tile % count, count)


@triton.jit
def next_tile(at, step):
    """Without a division, which would take as many instructions as a quarter of the tile's work."""
    index = at.index + step.index
    sequence = at.sequence + step.sequence
    over = index >= at.count
    return At(tl.where(over, sequence + 1, sequence), tl.where(over, index - at.count, index), at.count)


@triton.jit
def rows_of(at, T, HEADS: tl.constexpr, HOW: tl.constexpr):
    """The rows of a tile. No tile has rows of two sequences."""
    first = at.index * HOW.ROWS
    o = first % HEADS + tl.arange(0, HOW.ROWS)
    tokens = first // HEADS + o // HEADS
    return Rows(tl.full([], at.sequence, tl.int64), tl.cast(tokens, tl.int64), o % HEADS, (tokens < T)[:, None])


@triton.jit
def row_offsets(rows, batch, token, HEAD_STRIDE: tl.constexpr, HOW: tl.constexpr):
    """int64 [ROWS]: where the rows begin. batch, token: strides over HOW.UNIT."""
    o = rows.sequence * (tl.full([], batch, tl.int64) * HOW.UNIT) + rows.tokens * (tl.full([], token, tl.int64) * HOW.UNIT)
    return o + rows.heads * HEAD_STRIDE


@triton.jit
def columns(HOW: tl.constexpr):
    """int32 [BLOCK] twice: the features of each pair. Pairs from R/2 on are not turned; what they pair is of no interest."""
    j = tl.arange(0, HOW.BLOCK)
    if HOW.INTERLEAVED:
        o_a = 2 * j
        o_b = 2 * j + 1
    elif HOW.R == 0 or HOW.R == HOW.D:
        o_a = j
        o_b = j + HOW.D // 2
    else:
        o_a = j + tl.where(j < HOW.R // 2, 0, HOW.R // 2)
        o_b = j + tl.where(j < HOW.R // 2, HOW.R // 2, HOW.D // 2)
        o_a = tl.max_contiguous(tl.multiple_of(o_a, HOW.VECTOR), HOW.VECTOR)
        o_b = tl.max_contiguous(tl.multiple_of(o_b, HOW.VECTOR), HOW.VECTOR)
    return o_a, o_b


@triton.jit
def inside(m_row, HOW: tl.constexpr):
    """Of what is loaded or stored at once, all features or one of each pair, what is there: int1 [ROWS, 1 or that many]."""
    m = m_row
    if pads(HOW):
        EACH: tl.constexpr = 2 if HOW.INTERLEAVED else 1
        m = m_row & (tl.arange(0, EACH * HOW.BLOCK) < EACH * HOW.D // 2)[None, :]
    return m


@triton.jit
def load_raw(p, o_row, m_row, HOW: tl.constexpr):
    """What `pairs` takes, as it lies in memory, zero where masked. An empty tuple where there is no tensor."""
    b_raw = ()
    if p is not None:
        m = inside(m_row, HOW)
        if HOW.INTERLEAVED:
            cols = tl.arange(0, 2 * HOW.BLOCK)
            b_raw = (tl.load(p + o_row[:, None] + cols[None, :], mask=m, other=0.0),)
        else:
            o_a, o_b = columns(HOW)
            b_a = tl.load(p + o_row[:, None] + o_a[None, :], mask=m, other=0.0)
            b_b = tl.load(p + o_row[:, None] + o_b[None, :], mask=m, other=0.0)
            b_raw = (b_a, b_b)
    return b_raw


@triton.jit
def pairs(b_raw, HOW: tl.constexpr):
    """The two members of each pair, fp32 [ROWS, BLOCK] twice."""
    if HOW.INTERLEAVED:
        b_a, b_b = tl.split(tl.reshape(widen(b_raw[0]), [HOW.ROWS, HOW.BLOCK, 2]))
    else:
        b_a = widen(b_raw[0])
        b_b = widen(b_raw[1])
    return b_a, b_b


@triton.jit
def store_pairs(p, o_row, m_row, b_a, b_b, HOW: tl.constexpr):
    m = inside(m_row, HOW)
    if HOW.INTERLEAVED:
        cols = tl.arange(0, 2 * HOW.BLOCK)
        b = tl.reshape(tl.join(b_a, b_b), [HOW.ROWS, 2 * HOW.BLOCK])
        tl.store(p + o_row[:, None] + cols[None, :], b, mask=m)
    else:
        o_a, o_b = columns(HOW)
        tl.store(p + o_row[:, None] + o_a[None, :], b_a, mask=m)
        tl.store(p + o_row[:, None] + o_b[None, :], b_b, mask=m)


@triton.jit
def load_weights(p, part, HOW: tl.constexpr, OFFSET: tl.constexpr):
    """fp32 [1, BLOCK] twice, OFFSET added; an empty tuple where there is no weight."""
    b_weights = ()
    if p is not None:
        o_a, o_b = columns(HOW)
        m = tl.arange(0, HOW.BLOCK) < HOW.D // 2
        b_a = widen(tl.load(p + part * HOW.D + o_a, mask=m, other=0.0))
        b_b = widen(tl.load(p + part * HOW.D + o_b, mask=m, other=0.0))
        if OFFSET != 0.0:
            b_a += OFFSET
            b_b += OFFSET
        b_weights = (b_a[None, :], b_b[None, :])
    return b_weights


@triton.jit
def load_angles(p, rows, T, table_rows, HOW: tl.constexpr):
    """Cosine and sine of each pair, fp32 [ROWS, BLOCK] twice: 1 and 0 for pairs that are not turned, NaN for positions that the
    table does not have."""
    if HOW.R == 0:
        b_cos = tl.full([1, 1], 1.0, tl.float32)
        b_sin = tl.zeros([1, 1], tl.float32)
    else:
        j = tl.arange(0, HOW.BLOCK)[None, :]
        m = rows.m
        if HOW.R // 2 != HOW.BLOCK:
            m = m & (j < HOW.R // 2)
        if p.positions is None:
            o_row = rows.tokens
            if HOW.OWN_ANGLES:
                o_row += rows.sequence * T
            o = o_row[:, None] * HOW.ANGLE_STRIDES[0] + j * HOW.ANGLE_STRIDES[1]
            b_cos = widen(tl.load(p.cos + o, mask=m, other=1.0))
            b_sin = widen(tl.load(p.sin + o, mask=m, other=0.0))
        else:
            o_token = rows.sequence * T + rows.tokens
            position = tl.load(p.positions + o_token[:, None], mask=rows.m, other=0).to(tl.int64)
            m_there = (position >= 0) & (position < table_rows)
            o = position * HOW.ANGLE_STRIDES[0] + j * HOW.ANGLE_STRIDES[1]
            b_cos = widen(tl.load(p.cos + o, mask=m & m_there, other=1.0))
            b_sin = widen(tl.load(p.sin + o, mask=m & m_there, other=0.0))
            b_cos = tl.where(m_there, b_cos, float("nan"))
    return b_cos, b_sin


@triton.jit
def turned(b_a, b_b, b_cos, b_sin):
    return b_a * b_cos - b_b * b_sin, b_a * b_sin + b_b * b_cos


@triton.jit
def normalised(b_a, b_b, eps, HOW: tl.constexpr):
    """x̂, zero past the row's end, and rstd, fp32 [ROWS]."""
    b_mean = tl.zeros([HOW.ROWS], tl.float32)
    if centres(HOW.NORM):
        b_mean = mean(tl.sum(b_a + b_b, 1), HOW.D)
        b_a = deviation(b_a, b_mean, HOW.NORM)
        b_b = deviation(b_b, b_mean, HOW.NORM)
        if pads(HOW):
            m = (tl.arange(0, HOW.BLOCK) < HOW.D // 2)[None, :]
            b_a = tl.where(m, b_a, 0.0)
            b_b = tl.where(m, b_b, 0.0)
    b_rstd = inverse(tl.sum(spread(b_a, HOW.NORM) + spread(b_b, HOW.NORM), 1), HOW.D, eps, HOW.NORM)
    return b_a * b_rstd[:, None], b_b * b_rstd[:, None], b_rstd
