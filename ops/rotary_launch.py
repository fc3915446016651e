"""From tensors to the rotary kernels: allocates what is returned, picks the tile, starts the kernels.

What is compiled follows from options, dtypes, the features of a head and distances in memory. How many tokens and sequences
there are decides only how many programs start.
"""

from collections.abc import Sequence
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
from .rotary import Inputs, Options, empty_gradients, empty_outputs, head_width

SUM_BLOCK = 16  # features whose partial sums of weight gradients one program adds up


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


class Call(NamedTuple):
    """What is compiled follows from it, and from where rows lie."""

    options: Options
    D: int  # features of a head
    R: int  # those that are turned
    per_head: bool  # each head has weights of its own
    device: torch.device
    dtypes: tuple  # of all tensors, None for an absent one

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Of queries and of keys: sets of heads that share a weight, and the heads in each."""
        return [(n, 1) if self.per_head else (1, n) for n in self.options[:2]]


def call_of(tensors: Sequence, inputs: Inputs, options: Options, D: int) -> Call:
    """tensors: all that there are."""
    R = 0 if inputs.cos is None else 2 * inputs.cos.shape[1]
    per_head = any(t is not None and t.dim() == 2 for t in inputs[5:])
    return Call(options, D, R, per_head, tensors[0].device, dtypes_of(tensors))


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """q and k, contiguous, in the dtype of x."""
    x, k, cos, *small = inputs
    call = call_of(inputs, inputs, options, head_width(x, k, options))
    rows, (B, T, strides, layout) = laid_out((x, k), x.dim() - (2 if k is None else 3), call.D)
    start, how, rows_of_tile = forward_kernel(call, layout)
    q_tiles, k_tiles = (parts * B * -(-T * shared // rows_of_tile) for parts, shared in call.parts)
    outputs = empty_outputs(inputs, options)
    table_rows = 0 if cos is None else cos.shape[0]
    start(q_tiles + k_tiles, (*rows, cos, *small, *outputs), T, q_tiles, table_rows, options.eps, *strides, how)
    return outputs


@lru_cache(maxsize=1024)
def forward_kernel(call: Call, layout: "Layout") -> tuple[Launcher, Variant, int]:
    """What is compiled, and the rows of a tile."""
    tile = forward_tile(call.dtypes[0].itemsize)
    how = _variant(call, tile, layout, PACKED=call.dtypes[1] is None)
    start = _launcher(kernels.rotary_forward_kernel, ForwardPointers, call, tile, strided=("x", "k"))
    return start, how, rows_of(tile, call.D)


def backward(upstream: Sequence, inputs: Inputs, options: Options, wanted: tuple[bool, ...]) -> list[Tensor]:
    """The gradients that `empty_gradients` lists.

    upstream: dq, dk, and dv where x is packed. inputs: as of forward, but without a norm x and k may be None. wanted: of
    q_weight, q_bias, k_weight, k_bias.
    """
    dq, _, dv = upstream
    x, k, cos, sin, positions, q_weight, _, k_weight, _ = inputs
    call = call_of((*upstream, *inputs), inputs, options, dq.shape[-1])
    rows, (B, T, strides, layout) = laid_out((*upstream, x, k), dq.dim() - 3, call.D)
    start, add_up, how, rows_of_tile, most = backward_kernels(call, layout, wanted)
    (q_parts, q_shared), (k_parts, k_shared) = call.parts
    q_programs, k_programs = (B * -(-T * shared // rows_of_tile) for shared in (q_shared, k_shared))
    sums = (wanted[0] or wanted[2]) + (wanted[1] or wanted[3])
    if most:
        # As many for each part as its share of the tiles, so that all end at the same time.
        share = most / max(1, q_parts * q_programs + k_parts * k_programs)
        q_programs, k_programs = (min(n, max(1, round(n * share))) for n in (q_programs, k_programs))
    programs = q_parts * q_programs + k_parts * k_programs
    gradients = empty_gradients(upstream, inputs, options, wanted)
    if programs == 0:
        return [gradient.zero_() for gradient in gradients]
    dx, *others = gradients
    dk_in = others.pop(0) if dv is None else None
    partials = dx.new_empty(programs * sums * call.D, dtype=torch.float32) if sums else None
    table_rows = 0 if cos is None else cos.shape[0]
    numbers = (B, T, q_programs, k_programs, table_rows, options.eps, *strides, how)
    start(programs, (*rows, cos, sin, positions, q_weight, k_weight, dx, dk_in, partials), *numbers)
    if partials is not None:
        weights = [others.pop(0) if wants else None for wants in wanted]
        add_up(sums * (q_parts + k_parts), (partials, *weights), q_programs, k_programs, 256, SUM_BLOCK, how)
    return gradients


@lru_cache(maxsize=1024)
def backward_kernels(call: Call, layout: "Layout", wanted: tuple[bool, ...]) -> tuple[Launcher, Launcher, Variant, int, int]:
    """What is compiled, the rows of a tile, and the persistent programs, 0 for a program for each tile."""
    tile = backward_tile(call.dtypes[0].itemsize, call.options.norm >= 0, pads=2 * pairs(call.D) > call.D)
    sums = (wanted[0] or wanted[2], wanted[1] or wanted[3])
    how = _variant(call, tile, layout, PACKED=call.dtypes[2] is not None, STAGES=tile.stages, WANTED=sums)
    strided = ("dq", "dk", "dv", "x", "k")
    start = _launcher(kernels.rotary_backward_kernel, BackwardPointers, call, tile, strided=strided)
    adding = kernels.finish_rotary_weights_kernel
    add_up = _launcher(adding, WeightGradients, call, Tile(0, warps=4), programs_y=-(-call.D // SUM_BLOCK))
    return start, add_up, how, rows_of(tile, call.D), device_facts(call.device).multiprocessors * tile.programs_per_sm


# ---- what both directions share ---------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """What is compiled of the distances between the rows of tensors."""

    unit: int  # a power of two up to 16 that divides those of sequences and tokens. Triton would see whether 16 divides them
    head_strides: tuple[int, ...]
    wide: tuple[int, ...]  # the others, where one takes more than 32 bits


def laid_out(rows: tuple[Tensor | None, ...], tokens: int, D: int) -> tuple[tuple, tuple[int, int, list[int], Layout]]:
    """The tensors with rows, made contiguous where no three numbers tell where their rows lie; then sequences, tokens in each,
    the distances of sequences and tokens over `Layout.unit`, zeros for an absent tensor, and the layout.

    tokens: the dimension of tokens, behind which a tensor has heads and features, or both side by side in one dimension.
    """
    found = _found(tuple([None if t is None else (t.shape, t.stride()) for t in rows]), tokens, D)
    if found is None:
        return laid_out(tuple([None if t is None else t.contiguous() for t in rows]), tokens, D)
    return rows, found


@lru_cache(maxsize=1024)
def _found(where: tuple, tokens: int, D: int) -> tuple[int, int, list[int], Layout] | None:
    strides: list[int] = []
    head_strides: list[int] = []
    for at in where:
        batch = token = head = 0
        if at is not None:
            shape, distances = at
            leading = [(n, stride) for n, stride in zip(shape[:tokens], distances[:tokens], strict=True) if n != 1]
            if distances[-1] != 1 or any(outer != n * inner for (_, outer), (n, inner) in pairwise(leading)):
                return None
            batch = leading[-1][1] if leading else 0
            token = distances[tokens] if shape[tokens] != 1 else 0
            head = distances[-2] if len(shape) == tokens + 3 else D
        strides += batch, token
        head_strides.append(head)
    shape, unit = where[0][0], gcd(16, *strides)
    strides = [stride // unit for stride in strides]
    layout = Layout(unit, tuple(head_strides), tuple(strides) if max(strides) >= 2**31 else ())
    return prod(shape[:tokens]), shape[tokens], strides, layout


def pairs(D: int) -> int:
    """Of a row in a tile."""
    return triton.next_power_of_2(D // 2)


def rows_of(tile: Tile, D: int) -> int:
    return max(1, tile.elements // (2 * pairs(D)))


def _variant(call: Call, tile: Tile, layout: Layout, **more: Any) -> Variant:
    return Variant(
        D=call.D,
        R=call.R,
        HEADS=call.options.heads,
        KV_HEADS=call.options.kv_heads,
        PER_HEAD=call.per_head,
        NORM=call.options.norm,
        OFFSET=float(call.options.zero_centered_weight),
        INTERLEAVED=call.options.interleaved,
        ROWS=rows_of(tile, call.D),
        BLOCK=pairs(call.D),
        VECTOR=gcd(16 // call.dtypes[0].itemsize, call.D // 2, call.R // 2),
        UNIT=layout.unit,
        HEAD_STRIDES=layout.head_strides,
        EARLY_START=device_facts(call.device).since_sm_90,
        **more,
    )


def _launcher(kernel: Any, record: type, call: Call, tile: Tile, **more: Any) -> Launcher:
    early = device_facts(call.device).since_sm_90 or None
    return Launcher(kernel, record, call.device, num_warps=tile.warps, maxnreg=tile.registers, launch_pdl=early, **more)
