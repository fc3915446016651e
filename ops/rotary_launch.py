"""From tensors to the rotary kernels: allocates what is returned, picks the tile, starts the kernels.

What is compiled follows from options, dtypes, the features of a head and distances in memory. It is worked out once. How many
tokens and sequences there are decides only how many programs start.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import gcd, prod
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .kernels import rotary as kernels
from .kernels.rotary import BackwardPointers, ForwardPointers, Variant, WeightGradients
from .launch import Launcher, device_facts
from .records import dtypes_of
from .rotary_operators import Inputs, Options, Upstream, empty_gradients, output_shapes


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


def work_of(D: int, inputs: Inputs) -> Work:
    R = 0 if inputs.cos is None else 2 * inputs.cos.shape[-1]
    for t in inputs[5:]:
        if t is not None:  # weights and biases are all by head, or none is
            return Work(D, R, t.dim() == 2)
    return Work(D, R, False)


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """q and k, contiguous, in the dtype of x."""
    x = inputs.x
    D = x.shape[-1] if inputs.k is not None else x.shape[-1] // (options.heads + 2 * options.kv_heads)
    return forward_call(options, work_of(D, inputs), x.device, dtypes_of(inputs))(inputs)


@lru_cache(maxsize=1024)
def forward_call(
    options: Options, work: Work, device: torch.device, dtypes: tuple
) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
    """`forward` of such a call, with all worked out that follows. dtypes: of the inputs, None for an absent one."""
    tile = forward_tile(dtypes[0].itemsize)
    (q_parts, q_shared), (k_parts, k_shared) = _parts(options, work)
    rows_of_tile = _tile_rows(work, tile)

    @lru_cache(maxsize=64)
    def compiled(layout: Layout) -> tuple[Launcher, Variant]:
        how = _variant(options, work, tile, dtypes[0], device, layout, PACKED=dtypes[1] is None)
        return _launcher(kernels.rotary_forward_kernel, ForwardPointers, ("x", "k", "cos", "sin"), tile, device), how

    @lru_cache(maxsize=256)
    def geometry(where: tuple, angles: tuple | None) -> tuple[Any, ...]:
        (x, _), k = where
        shapes = output_shapes(x, None if k is None else k[0], options)
        B, T, layout, strides = _laid_out(where, angles, len(shapes[0]) - 3, work.D, options.heads)
        start, how = compiled(layout)
        q_tiles, k_tiles = q_parts * B * -(-T * q_shared // rows_of_tile), k_parts * B * -(-T * k_shared // rows_of_tile)
        return *shapes, start, q_tiles + k_tiles, (T, q_tiles, _table_rows(angles), options.eps, *strides, how)

    def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
        x, k, cos, sin, *small = inputs
        if x.numel() == 0:  # whose strides say nothing
            q_shape, k_shape = output_shapes(x.shape, None if k is None else k.shape, options)
            return x.new_empty(q_shape), x.new_empty(k_shape)
        rows, angles, found = _found(geometry, (x, k), (cos, sin))
        q_shape, k_shape, start, programs, numbers = found
        outputs = x.new_empty(q_shape), x.new_empty(k_shape)
        start(programs, (*rows, *angles, *small, *outputs), *numbers)
        return outputs

    return run


def backward(upstream: Upstream, inputs: Inputs, options: Options, wanted: tuple[bool, ...]) -> list[Tensor]:
    """The gradients that `empty_gradients` lists.

    inputs: as of forward, but without a norm x and k may be None. wanted: of q_weight, q_bias, k_weight, k_bias.
    """
    dq = upstream.dq
    dtypes = dtypes_of((*upstream, *inputs))
    return backward_call(options, work_of(dq.shape[-1], inputs), dq.device, dtypes, wanted)(upstream, inputs)


@lru_cache(maxsize=1024)
def backward_call(
    options: Options, work: Work, device: torch.device, dtypes: tuple, wanted: tuple[bool, ...]
) -> Callable[[Upstream, Inputs], list[Tensor]]:
    """`backward` of such a call, with all worked out that follows. dtypes: of Upstream and of Inputs."""
    packed = dtypes[2] is not None
    tile = backward_tile(dtypes[0].itemsize, options.norm >= 0, pads=2 * _row_block(work) > work.D)
    (q_parts, q_shared), (k_parts, k_shared) = _parts(options, work)
    rows_of_tile = _tile_rows(work, tile)
    most_programs = device_facts(device).multiprocessors * tile.programs_per_sm
    sums = (wanted[0] or wanted[2], wanted[1] or wanted[3])
    sums_D, sums_parts, block = sum(sums) * work.D, sum(sums) * (q_parts + k_parts), 16

    @lru_cache(maxsize=64)
    def compiled(layout: Layout) -> tuple[Launcher, Launcher, Variant]:
        more = {"PACKED": packed, "STAGES": tile.stages, "WANTED": sums}
        how = _variant(options, work, tile, dtypes[0], device, layout, **more)
        strided = ("dq", "dk", "dv", "x", "k", "cos", "sin")
        start = _launcher(kernels.rotary_backward_kernel, BackwardPointers, strided, tile, device)
        blocks = -(-work.D // block)
        return start, _launcher(kernels.finish_rotary_weights_kernel, WeightGradients, (), Tile(0, 4), device, blocks), how

    @lru_cache(maxsize=256)
    def geometry(where: tuple, angles: tuple | None) -> tuple[Any, ...]:
        B, T, layout, strides = _laid_out(where, angles, len(where[0][0]) - 3, work.D, options.heads)
        start, finish, how = compiled(layout)
        q_programs, k_programs = B * -(-T * q_shared // rows_of_tile), B * -(-T * k_shared // rows_of_tile)
        if most_programs:
            # As many for each part as its share of the tiles, so that all end at the same time.
            share = most_programs / max(1, q_parts * q_programs + k_parts * k_programs)
            q_programs, k_programs = [min(n, max(1, round(n * share))) for n in (q_programs, k_programs)]
        numbers = (B, T, q_programs, k_programs, _table_rows(angles), options.eps, *strides, how)
        programs = q_parts * q_programs + k_parts * k_programs
        return start, programs, numbers, finish, (q_programs, k_programs, 256, block, how)

    def run(upstream: Upstream, inputs: Inputs) -> list[Tensor]:
        x, k, cos, sin, positions, q_weight, _, k_weight, _ = inputs
        gradients = empty_gradients(upstream, inputs, options, wanted)
        if upstream.dq.numel() == 0:
            return [gradient.zero_() for gradient in gradients]  # those of weights have elements
        rows, angles, found = _found(geometry, (*upstream, x, k), (cos, sin))
        start, programs, numbers, finish, finish_numbers = found
        dx, *others = gradients
        dk_in = None if packed else others.pop(0)
        partials = dx.new_empty(programs * sums_D, dtype=torch.float32) if sums_D else None
        start(programs, (*rows, *angles, positions, q_weight, k_weight, dx, dk_in, partials), *numbers)
        if partials is not None:
            weights = [others.pop(0) if wants else None for wants in wanted]
            finish(sums_parts, (partials, *weights), *finish_numbers)
        return gradients

    return run


# ---- what both directions share ---------------------------------------------------------------------------------------------

MOST_ROWS = 2**30  # of a sequence: the kernels count them in 32 bits, and those of the tiles behind its end


def _parts(options: Options, work: Work) -> list[tuple[int, int]]:
    """Of queries and of keys: sets of heads that share a weight, and the heads in each."""
    return [(n, 1) if work.per_head else (1, n) for n in (options.heads, options.kv_heads)]


def _row_block(work: Work) -> int:
    """Pairs of a row in a tile."""
    return triton.next_power_of_2(work.D // 2)


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
    geometry: Callable[..., tuple], rows: tuple[Tensor | None, ...], angles: tuple[Tensor | None, ...]
) -> tuple[tuple, tuple, tuple]:
    """The tensors with rows, and cos and sin, made contiguous where no few numbers tell where their rows lie; and what follows
    from that."""
    cos, sin = angles
    if cos is not None and sin is not None and cos.stride() != sin.stride():
        angles = tuple([t.clone(memory_format=torch.contiguous_format) for t in (cos, sin)])
    *where, at, _ = [None if t is None else (t.shape, t.stride()) for t in (*rows, *angles)]
    try:
        return rows, angles, geometry(tuple(where), at)
    except Irregular:
        return _found(geometry, *[tuple([None if t is None else t.contiguous() for t in some]) for some in (rows, angles)])


class Irregular(Exception):
    pass


def _laid_out(
    where: tuple, angles: tuple | None, tokens: int, D: int, heads: int
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


def _table_rows(angles: tuple | None) -> int:
    return 0 if angles is None else angles[0][0]


def _variant(
    options: Options, work: Work, tile: Tile, dtype: torch.dtype, device: torch.device, layout: Layout,
    **more: Any,
) -> Variant:  # fmt: skip
    return Variant(
        D=work.D,
        R=work.R,
        HEADS=options.heads,
        KV_HEADS=options.kv_heads,
        PER_HEAD=work.per_head,
        NORM=options.norm,
        OFFSET=float(options.zero_centered_weight),
        INTERLEAVED=options.interleaved,
        ROWS=_tile_rows(work, tile),
        BLOCK=_row_block(work),
        VECTOR=gcd(16 // dtype.itemsize, work.D // 2, work.R // 2),
        UNIT=layout.unit,
        HEAD_STRIDES=layout.head_strides,
        OWN_ANGLES=layout.own_angles,
        ANGLE_STRIDES=layout.angle_strides,
        EARLY_START=device_facts(device).since_sm_90,
        **more,
    )


def _launcher(
    kernel: Any, record: type, strided: tuple[str, ...], tile: Tile, device: torch.device, programs_y: int = 1
) -> Launcher:
    return Launcher(
        kernel, record, device, strided=strided, programs_y=programs_y, num_warps=tile.warps, maxnreg=tile.registers,
        launch_pdl=device_facts(device).since_sm_90 or None,
    )  # fmt: skip
