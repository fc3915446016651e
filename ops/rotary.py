"""Norm and rotary positions of queries and keys in one kernel each way: the public functions, their checks, the reference.

    x̂ = x normalised over the D features of a head          norm: none, layernorm, rmsnorm
    y = x̂ · (weight + offset) + bias
    out_a = y_a · cos − y_b · sin,    out_b = y_a · sin + y_b · cos        for each of the R/2 pairs (a, b) of features

Su et al. 2021, arXiv:2104.09864; query-key norm: Henry et al. 2020, arXiv:2010.04245, and Dehghani et al. 2023,
arXiv:2302.05442. Pair i is the features i and i + R/2 (the half-split layout of Llama checkpoints on the Hub), or interleaved
2i and 2i + 1 (the paper's, of GPT-J and of Meta's own Llama checkpoints). Features from R on are not turned.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks, kit
from .reference import NORMS, Norm, affine

_KINDS = {None: Norm.none} | {key: kind for kind in (Norm.layernorm, Norm.rmsnorm) for key in (kind, kind.name)}


class Inputs(NamedTuple):
    x: Tensor  # [..., T, heads, D], or [..., T, (heads + 2 · kv_heads) · D] with keys and values in it
    k: Tensor | None  # [..., T, kv_heads, D]; None where they lie in x
    cos: Tensor | None  # [positions, R/2]; or [..., T, R/2], where the dimensions before T may all be 1
    sin: Tensor | None
    positions: Tensor | None  # [..., T]
    q_weight: Tensor | None  # [D] or [heads, D]
    q_bias: Tensor | None
    k_weight: Tensor | None
    k_bias: Tensor | None


class Options(NamedTuple):
    heads: int
    kv_heads: int
    norm: Norm
    eps: float
    zero_centered_weight: bool
    interleaved: bool


def rotary_qkv_fn(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: int,
    kv_heads: int | None = None,
    *,
    positions: Tensor | None = None,
    norm: Norm | str | None = None,
    q_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_weight: Tensor | None = None,
    k_bias: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_weight: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a packed projection; queries and keys normalised by head and turned by their position.

    Args:
        qkv: [..., T, (heads + 2·kv_heads)·D]: of each token the queries, the keys, the values, head by head. D is even. bf16,
            fp16 or fp32; fp64 too where the PyTorch reference runs. Tokens may lie apart.
        cos, sin: [P, R/2] with R ≤ D, of the angles of positions 0 … P−1; or, without positions, [..., T, R/2] of the angles
            of each token, where the dimensions before T are those of the tokens or all 1. Views are read where they lie. None:
            nothing is turned. They get no gradient.
        heads, kv_heads: kv_heads divides heads (grouped-query attention); None: as heads.
        positions: int64 or int32, the row of the tables for each token: [..., T], or a shape that expands to it. None: 0 … T−1.
            A position that the tables do not have, below 0 too, turns its features into NaN: nothing waits for the device.
        norm: "layernorm" or "rmsnorm" over the features of each head, before the turn. None: no norm.
        q_weight, k_weight: [D], one for all heads, or [heads, D] and [kv_heads, D]. None is 1.
        q_bias, k_bias: shaped as the weights. None is 0.
        eps: added to the variance.
        zero_centered_weight: weights are stored as their difference from 1.
        interleaved: pairs are features 2i and 2i + 1.

    Returns:
        q [..., T, heads, D] and k [..., T, kv_heads, D], contiguous, computed in fp32 and rounded to qkv's dtype; and
        v [..., T, kv_heads, D], a view of qkv. Backward writes the gradient of qkv once, in one kernel.

    Gradients of gradients are refused on the kernels. Under torch.func's transforms the PyTorch reference runs, which has them.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option not as above; before anything is launched.
    """
    name = "rotary_qkv_fn"
    checks.check_tensor(name, "qkv", qkv)
    kv_heads = heads if kv_heads is None else kv_heads
    heads, kv_heads = checks.as_size(name, "heads", heads, 1), checks.as_size(name, "kv_heads", kv_heads, 1)
    parts = heads + 2 * kv_heads
    if qkv.dim() < 2 or qkv.shape[-1] == 0 or qkv.shape[-1] % (2 * parts):
        raise ValueError(
            f"{name}: qkv has shape {tuple(qkv.shape)}, expected (..., T, ({heads} + 2·{kv_heads})·D) with an even D"
        )
    inputs = Inputs(qkv, None, cos, sin, positions, q_weight, q_bias, k_weight, k_bias)
    return _run(name, inputs, heads, kv_heads, norm, eps, zero_centered_weight, interleaved)  # type: ignore[return-value]


def rotary_qk_fn(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    positions: Tensor | None = None,
    norm: Norm | str | None = None,
    q_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_weight: Tensor | None = None,
    k_bias: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_weight: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same for queries and keys that are tensors of their own.

    Args:
        q: [..., T, heads, D], k: [..., T, kv_heads, D], of one dtype. Views are read where they lie: batches, tokens and heads
            may be any distance apart, so that a transposed [B, heads, T, D] is welcome.
        The others as for `rotary_qkv_fn`.

    Returns:
        q and k in their shapes, contiguous.

    Raises:
        ValueError, TypeError: as `rotary_qkv_fn`.
    """
    name = "rotary_qk_fn"
    checks.check_tensor(name, "q", q)
    checks.check_operand(name, "k", k, q, (q.dtype,), "q")
    if q.dim() < 3 or 0 in q.shape[-2:] or q.shape[-1] % 2:
        raise ValueError(f"{name}: q has shape {tuple(q.shape)}, expected (..., T, heads, D) with an even D of 2 or more")
    if k.dim() != q.dim() or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1] or k.shape[-2] == 0:
        raise ValueError(
            f"{name}: k has shape {tuple(k.shape)}, expected that of q {tuple(q.shape)} but for the number of heads"
        )
    inputs = Inputs(q, k, cos, sin, positions, q_weight, q_bias, k_weight, k_bias)
    return _run(name, inputs, q.shape[-2], k.shape[-2], norm, eps, zero_centered_weight, interleaved)  # type: ignore[return-value]


def _run(
    name: str, inputs: Inputs, heads: int, kv_heads: int, norm: Norm | str | None, eps: float, zero_centered_weight: bool,
    interleaved: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    if norm not in _KINDS:
        raise ValueError(f"{name}: norm is {norm!r}, accepted: None, layernorm, rmsnorm")
    eps = checks.as_eps(name, eps)
    flags = checks.as_flags(name, zero_centered_weight=zero_centered_weight, interleaved=interleaved)
    options = Options(heads, kv_heads, _KINDS[norm], eps, **flags)
    kernels, dtypes = checks.kernels_for(inputs.x)
    inputs = _checked(name, inputs, options, dtypes)
    if not kernels:
        return reference(inputs, options)
    return rotary(inputs, options)[: 3 if inputs.k is None else 2]


def _checked(name: str, inputs: Inputs, options: Options, accepted: tuple[torch.dtype, ...]) -> Inputs:
    """The inputs, with positions [..., T] where there are any."""
    x, k, cos, sin, positions, *weights = inputs
    of, tokens, D = "q", x.shape[:-2], x.shape[-1]
    if k is None:
        of, tokens, D = "qkv", x.shape[:-1], D // (options.heads + 2 * options.kv_heads)
    checks.check_dtype(name, of, x, accepted)
    for argument, t in zip(Inputs._fields[2:], inputs[2:], strict=True):
        if t is not None:
            checks.check_operand(name, argument, t, x, (torch.int64, torch.int32) if argument == "positions" else accepted, of)
    if cos is not None and sin is not None:
        rows = tokens[-1] if positions is None else 1
        fits = cos.dim() == 2 and cos.shape[0] >= rows
        if cos.dim() > 2 and positions is None:  # of each token
            fits = cos.shape[:-1] == tokens or cos.shape[:-1] == (*[1] * (len(tokens) - 1), tokens[-1])
        if not fits or not 1 <= cos.shape[-1] <= D // 2 or sin.shape != cos.shape:
            shapes = f"cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}"
            each = "" if positions is not None else f" or (…, {rows}, R/2) of each token,"
            raise ValueError(f"{name}: {shapes}, expected ({rows} or more, R/2) for both,{each} with R/2 from 1 to {D // 2}")
        checks.check_dtype(name, "sin", sin, (cos.dtype,))
        if cos.requires_grad or sin.requires_grad:
            raise ValueError(f"{name}: cos and sin get no gradient; detach them")
    elif cos is not None or sin is not None or positions is not None:
        raise ValueError(f"{name}: cos and sin are a pair, and positions are their rows; give both, or none of the three")
    given = {argument: t for argument, t in zip(Inputs._fields[5:], weights, strict=True) if t is not None}
    if given and options.norm == Norm.none:
        raise ValueError(f"{name}: {', '.join(given)} without a norm; pass norm, or leave the weights and biases out")
    per_head = any(t.dim() == 2 for t in given.values())
    for argument, t in given.items():
        by_head = (options.heads if argument[0] == "q" else options.kv_heads, D)
        if t.shape != (by_head if per_head else (D,)):
            both = f"({D},), or {by_head} where all weights and biases are by head"
            raise ValueError(f"{name}: {argument} has shape {tuple(t.shape)}, expected {both}")
    if positions is None or positions.shape == tokens:
        return inputs
    try:
        return inputs._replace(positions=positions.expand(tokens).contiguous())
    except RuntimeError:
        shapes = f"{tuple(positions.shape)}, expected {tuple(tokens)} or what expands to it"
        raise ValueError(f"{name}: positions has shape {shapes}") from None


# ---- operator ---------------------------------------------------------------------------------------------------------------


class Outputs(NamedTuple):
    q: Tensor  # contiguous, as k is
    k: Tensor
    v: Tensor | None  # a view of x, where x is packed


class Rotary(kit.Op):
    name, Inputs, Options, Outputs = "rotary", Inputs, Options, Outputs
    materialize = True

    def function(self, given, o):
        return "rotary_qk_fn" if "k" in given else "rotary_qkv_fn"

    def width(self, tensors):
        *_, cos, _, _, q_weight, q_bias, k_weight, k_bias = tensors  # with the inputs Backward ends too
        per_head = any(t is not None and t.dim() == 2 for t in (q_weight, q_bias, k_weight, k_bias))  # all are, or none is
        return tensors[0].shape[-1], 0 if cos is None else 2 * cos.shape[-1], per_head

    def written(self, given, o):
        return ["q", "k"]

    def asked(self, given, o):
        return ["q", "k"] if "k" in given else ["q", "k", "v"]

    def view(self, given, o):
        if "k" in given:
            return None

        def with_values(i, outputs):
            *_, heads, D = outputs[1].shape
            return *outputs[:2], i[0].narrow(-1, -heads * D, heads * D).view(*outputs[1].shape)

        return with_values

    def kept(self, of, o, needs):
        kept = super().kept(of, o, needs)
        return kept if o.norm != Norm.none else kept | {"x": None, "k": None}  # nothing is computed of them

    def wanted(self, of, o, needs, given):
        return super().wanted(of, o, (True, True, *needs[2:]), given)  # a kernel writes the gradients of both

    def outputs(self, i, o):
        if i.k is not None:
            return Outputs(i.x.new_empty(i.x.shape), i.x.new_empty(i.k.shape), None)
        *tokens, width = i.x.shape
        D = width // (o.heads + 2 * o.kv_heads)
        return Outputs(i.x.new_empty((*tokens, o.heads, D)), i.x.new_empty((*tokens, o.kv_heads, D)), None)

    def gradients(self, b, o, wanted):
        dq, dk, dv = b[:3]
        if dv is None:
            found = [dq.new_empty(dq.shape), dk.new_empty(dk.shape)]
        else:
            *tokens, _, D = dq.shape
            found = [dq.new_empty((*tokens, (o.heads + 2 * o.kv_heads) * D)), None]
        weights = [None if dtype is None else t.new_empty(t.shape) for t, dtype in zip(b[8:], wanted[5:], strict=True)]
        return self.Gradients(*found, None, None, None, *weights)

    def start(self, i, o):
        kernels, x, k = kit.kernels("rotary"), i.x, i.k
        D = x.shape[-1] if k is not None else x.shape[-1] // (o.heads + 2 * o.kv_heads)
        work = Work(D, *self.width(i)[1:])
        tile = forward_tile(x.itemsize)
        (q_parts, q_shared), (k_parts, k_shared) = _parts(o, work)
        rows_of_tile, dtype, device, packed = _tile_rows(work, tile), x.dtype, x.device, k is None

        @kit.memoised
        def compiled(layout):
            how = _variant(o, work, tile, dtype, device, layout, PACKED=packed)
            kernel, record, strided = kernels.rotary_forward_kernel, kernels.ForwardPointers, ("x", "k", "cos", "sin")
            return kit.Launcher(kernel, record, device, strided, early=True, num_warps=tile.warps), how

        @kit.memoised
        def placed(where, angles):
            B, T, layout, strides = _laid_out(where, angles, len(where[0][0]) - (2 if packed else 3), D, o.heads)
            start, how = compiled(layout)
            q_tiles, k_tiles = q_parts * B * -(-T * q_shared // rows_of_tile), k_parts * B * -(-T * k_shared // rows_of_tile)
            return start, q_tiles + k_tiles, (T, q_tiles, angles[0][0] if angles else 0, o.eps, *strides, how)

        def run(i):
            x, k, cos, sin, *small = i
            outputs = self.outputs(Inputs._make(i), o)
            if x.numel() > 0:  # else its strides say nothing
                rows, angles, (start, programs, numbers) = _found(placed, (x, k), (cos, sin))
                start(programs, (*rows, *angles, *small, *outputs[:2]), *numbers)
            return outputs

        return run

    def start_backward(self, b, o, wanted):
        kernels, device, dtype = kit.kernels("rotary"), b.dq.device, b.dq.dtype
        packed, work = b.dv is not None, Work(*self.width(b))
        D = work.D
        tile = backward_tile(dtype.itemsize, o.norm != Norm.none, pads=2 * _row_block(work) > D)
        (q_parts, q_shared), (k_parts, k_shared) = _parts(o, work)
        rows_of_tile = _tile_rows(work, tile)
        most_programs = kit.device_facts(device).multiprocessors * tile.programs_per_sm
        sums = (bool(wanted.dq_weight or wanted.dk_weight), bool(wanted.dq_bias or wanted.dk_bias))
        sums_D, sums_parts, block = sum(sums) * D, sum(sums) * (q_parts + k_parts), 16

        @kit.memoised
        def compiled(layout):
            how = _variant(o, work, tile, dtype, device, layout, PACKED=packed, STAGES=tile.stages, WANTED=sums)
            strided, kernel = ("dq", "dk", "dv", "x", "k", "cos", "sin"), kernels.rotary_backward_kernel
            start = kit.Launcher(
                kernel, kernels.BackwardPointers, device, strided, early=True, num_warps=tile.warps, maxnreg=tile.registers
            )
            record, blocks = kernels.WeightGradients, -(-D // block)
            finish = kit.Launcher(kernels.finish_rotary_weights_kernel, record, device, (), blocks, early=True, num_warps=4)
            return start, finish, how

        @kit.memoised
        def placed(where, angles):
            B, T, layout, strides = _laid_out(where, angles, len(where[0][0]) - 3, D, o.heads)
            start, finish, how = compiled(layout)
            q_programs, k_programs = B * -(-T * q_shared // rows_of_tile), B * -(-T * k_shared // rows_of_tile)
            if most_programs:
                # As many for each part as its share of the tiles, so that all end at the same time.
                share = most_programs / max(1, q_parts * q_programs + k_parts * k_programs)
                q_programs, k_programs = [min(n, max(1, round(n * share))) for n in (q_programs, k_programs)]
            numbers = (B, T, q_programs, k_programs, angles[0][0] if angles else 0, o.eps, *strides, how)
            programs = q_parts * q_programs + k_parts * k_programs
            return start, programs, numbers, finish, (q_programs, k_programs, 256, block, how)

        def run(b):
            dq, dk, dv, x, k, cos, sin, positions, q_weight, _, k_weight, _ = b
            gradients = self.gradients(b, o, wanted)
            if dq.numel() == 0:
                return kit.zeroed(gradients)
            rows, angles, found = _found(placed, (dq, dk, dv, x, k), (cos, sin))
            start, programs, numbers, finish, finish_numbers = found
            dx, dk_in, _, _, _, *weights = gradients
            partials = dx.new_empty(programs * sums_D, dtype=torch.float32) if sums_D else None
            start(programs, (*rows, *angles, positions, q_weight, k_weight, dx, dk_in, partials), *numbers)
            if partials is not None:
                finish(sums_parts, (partials, *weights), *finish_numbers)
            return gradients

        return run


rotary = Rotary()


# ---- launch -----------------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """How much of the work a program takes at a time."""

    elements: int  # rows times the features of a row, rounded up to a power of two
    warps: int
    stages: int = 1  # backward: tiles in flight, the one at work included
    programs_per_sm: int = 0  # backward: persistent programs; 0: a program for each tile
    registers: int | None = None  # most of a thread, so that all those programs fit; None: the compiler's choice


def forward_tile(itemsize: int) -> Tile:
    return Tile(elements=8192 // itemsize, warps=4)


def backward_tile(itemsize: int, normalises: bool, pads: bool) -> Tile:
    """pads: the features of a row are not a power of two."""
    elements = 4096 // itemsize
    if not normalises:  # no sums: nothing to keep from tile to tile
        return Tile(elements, warps=4)
    if pads:  # masked lanes keep no bytes in flight, so more programs do (H100, D = 80: .85 of copy bandwidth, .79 with four)
        return Tile(elements, warps=4, programs_per_sm=5, registers=96)
    # Six, with 80 registers, are 1 % faster for RMSNorm; LayerNorm spills and is a fifth slower.
    return Tile(elements, warps=4, programs_per_sm=4, registers=128)


class Work(NamedTuple):
    """What a call does to a row."""

    D: int  # features of a head
    R: int  # those that are turned
    per_head: bool  # each head has weights of its own


MOST_ROWS = 2**30  # of a sequence: the kernels count them in 32 bits, and those of the tiles behind its end


def _parts(options: Options, work: Work) -> list[tuple[int, int]]:
    """Of queries and of keys: sets of heads that share a weight, and the heads in each."""
    return [(n, 1) if work.per_head else (1, n) for n in (options.heads, options.kv_heads)]


def _row_block(work: Work) -> int:
    """Pairs of a row in a tile."""
    return 1 << (work.D // 2 - 1).bit_length()


def _tile_rows(work: Work, tile: Tile) -> int:
    return max(1, tile.elements // (2 * _row_block(work)))


class Layout(NamedTuple):
    """What is compiled of the distances between the rows of tensors."""

    unit: int  # a power of two up to 16 that divides those of sequences and tokens. Triton would see whether 16 divides them
    head_strides: tuple[int, ...]
    wide: tuple[int, ...]  # the others, where one takes more than 32 bits
    own_angles: bool  # each sequence has angles of its own
    angle_strides: tuple[int, int]  # from the angles of a token to those of the next, and from a pair's to the next pair's


def _found(
    placed: Callable[..., tuple], rows: tuple[Tensor | None, ...], angles: tuple[Tensor | None, ...]
) -> tuple[tuple, tuple, tuple]:
    """The tensors with rows, and cos and sin, made contiguous where no few numbers tell where their rows lie; and what follows
    from that."""
    cos, sin = angles
    if cos is not None and sin is not None and cos.stride() != sin.stride():
        angles = tuple([t.clone(memory_format=torch.contiguous_format) for t in (cos, sin)])
    *where, at, _ = [None if t is None else (t.shape, t.stride()) for t in (*rows, *angles)]
    try:
        return rows, angles, placed(tuple(where), at)
    except Irregular:
        rows, angles = (tuple([None if t is None else t.contiguous() for t in some]) for some in (rows, angles))
        return _found(placed, rows, angles)


class Irregular(Exception):
    pass


def _laid_out(
    where: Sequence, angles: tuple | None, tokens: int, D: int, heads: int
) -> tuple[int, int, Layout, list[int]]:  # fmt: skip
    """Of tensors: sequences, tokens in each, the layout of their rows, and the distances of sequences and tokens, over
    `Layout.unit`, zeros for an absent tensor.

    where: shapes and strides, or None; angles: of cos. tokens: the dimension of tokens, behind which a tensor has heads and
    features, or both side by side in one dimension.

    Raises:
        Irregular: no such numbers tell where the rows lie.
    """
    all_strides: list[int] = []
    head_strides: list[int] = []
    for at in where:
        batch = token = head = 0
        if at is not None:
            shape, strides = at
            if strides[-1] != 1:
                raise Irregular
            batch = _distance(shape[:tokens], strides[:tokens])
            token = strides[tokens] if shape[tokens] != 1 else 0
            head = strides[-2] if len(shape) == tokens + 3 else D
        all_strides += batch, token
        head_strides.append(head)
    B, T = prod(where[0][0][:tokens]), where[0][0][tokens]
    if T * heads >= MOST_ROWS:
        raise ValueError(f"rotary: {T} tokens in a sequence times {heads} heads, accepted: less than {MOST_ROWS}")
    unit = gcd(16, *all_strides)
    strides = [stride // unit for stride in all_strides]
    wide = tuple(strides) if max(strides) >= 2**31 else ()
    return B, T, Layout(unit, tuple(head_strides), wide, *_angles_laid_out(angles)), strides


def _angles_laid_out(angles: tuple | None) -> tuple[bool, tuple[int, int]]:
    if angles is None:
        return False, (0, 0)
    shape, strides = angles
    # Where there is but one token, the distance to the next is what it would be: it compiles nothing of its own.
    token = _distance(shape[:-1], strides[:-1]) or strides[-2]
    return prod(shape[:-2]) != 1, (token, strides[-1] if shape[-1] != 1 else 1)


def _distance(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Between neighbours in all these dimensions taken as one; 0 if there are none."""
    there = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n != 1]
    if any(outer != n * inner for (_, outer), (n, inner) in pairwise(there)):
        raise Irregular
    return there[-1][1] if there else 0


def _variant(
    options: Options, work: Work, tile: Tile, dtype: torch.dtype, device: torch.device, layout: Layout,
    **more: Any,
) -> Any:  # fmt: skip
    return kit.kernels("rotary").Variant(
        D=work.D,
        R=work.R,
        HEADS=options.heads,
        KV_HEADS=options.kv_heads,
        PER_HEAD=work.per_head,
        NORM=int(options.norm),
        OFFSET=float(options.zero_centered_weight),
        INTERLEAVED=options.interleaved,
        ROWS=_tile_rows(work, tile),
        BLOCK=_row_block(work),
        VECTOR=gcd(16 // dtype.itemsize, work.D // 2, work.R // 2),
        UNIT=layout.unit,
        HEAD_STRIDES=layout.head_strides,
        OWN_ANGLES=layout.own_angles,
        ANGLE_STRIDES=layout.angle_strides,
        EARLY_START=kit.device_facts(device).since_sm_90,
        **more,
    )


# ---- reference --------------------------------------------------------------------------------------------------------------


def reference(inputs: Inputs, options: Options) -> tuple[Tensor, ...]:
    """The same in plain PyTorch, differentiable, on any device: what the kernels are tested against."""
    x, k, cos, sin, positions, q_weight, q_bias, k_weight, k_bias = inputs
    parts = options.heads, options.kv_heads, options.kv_heads
    q, k, *values = (x, k) if k is not None else x.unflatten(-1, (sum(parts), -1)).split(parts, dim=-2)
    if cos is not None and sin is not None:
        if positions is not None:
            there = (positions >= 0) & (positions < len(cos))
            rows = positions.long().where(there, 0)
            cos, sin = cos[rows].masked_fill(~there[..., None], torch.nan), sin[rows]
        elif cos.dim() == 2:
            cos, sin = cos[: q.shape[-3]], sin[: q.shape[-3]]
    q, k = (_turned(t, cos, sin, weight, bias, options) for t, weight, bias in ((q, q_weight, q_bias), (k, k_weight, k_bias)))
    return q, k, *values


def _turned(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, weight: Tensor | None, bias: Tensor | None, options: Options
) -> Tensor:
    """x [..., T, heads, D]; cos, sin [T, R/2] or [..., T, R/2]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.to(dtype)
    if options.norm != Norm.none:
        weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
        if weight is not None and options.zero_centered_weight:
            weight = weight + 1.0
        per_head = any(t is not None and t.dim() == 2 for t in (weight, bias))
        inside, behind = ((None, None), (weight, bias)) if per_head else ((weight, bias), (None, None))
        y = affine(NORMS[options.norm](y, *inside, options.eps), *behind)
    if cos is not None and sin is not None:
        cos, sin = (t.to(dtype).unsqueeze(-2) for t in (cos, sin))  # [..., T, 1, R/2]
        turns, rest = y[..., : 2 * cos.shape[-1]], y[..., 2 * cos.shape[-1] :]
        a, b = (turns[..., ::2], turns[..., 1::2]) if options.interleaved else turns.chunk(2, dim=-1)
        pairs = (a * cos - b * sin, a * sin + b * cos)
        turned = torch.stack(pairs, dim=-1).flatten(-2) if options.interleaved else torch.cat(pairs, dim=-1)
        y = torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
    return y.to(x.dtype)
