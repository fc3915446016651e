"""From tensors to the rotary kernels: allocates what is returned, picks the tile, starts the kernels.

What a launch needs besides its tensors follows from their shapes, strides and dtypes and the options. It is worked out once and
remembered.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import gcd, prod
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .kernels import rotary as kernels
from .kernels.rotary import BackwardPointers, ForwardPointers, Variant, WeightGradients
from .launch import device_facts
from .rotary_operators import Inputs, Options, Upstream, empty_gradients, empty_outputs


class Tile(NamedTuple):
    """How much of the work a program takes at a time."""

    elements: int  # rows times the features of a row, rounded up to a power of two
    warps: int
    stages: int = 1  # backward: tiles in flight, the one at work included
    programs_per_sm: int = 0  # backward: persistent programs; 0: a program for each tile
    registers: int = 0  # most of a thread, so that all those programs fit a multiprocessor; 0: the compiler's choice


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


class ForwardLaunch(NamedTuple):
    """Called with tensors like those that it was made for."""

    kernel: "Launch"
    copies: bool  # tensors are made contiguous first

    def __call__(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
        """q and k, contiguous, in the dtype of x."""
        if self.copies:
            inputs = Inputs(*_contiguous(inputs))
        outputs = empty_outputs(inputs, options)
        self.kernel.start(ForwardPointers(*inputs, *outputs))
        return outputs


_FOUND: dict[tuple, ForwardLaunch] = {}
MOST = 1024  # remembered: new shapes must not fill memory


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    return prepare(inputs, options)(inputs, options)


def find(inputs: Inputs, options: Options) -> ForwardLaunch | None:
    """What `prepare` has made for a call like this one."""
    try:
        return _FOUND.get(_like(inputs, options))
    except (AttributeError, RuntimeError, TypeError):  # not tensors with strides: what is wrong will be said
        return None


def prepare(inputs: Inputs, options: Options) -> ForwardLaunch:
    found = _FOUND.get(key := _like(inputs, options))
    if found is None:
        if len(_FOUND) >= MOST:
            del _FOUND[next(iter(_FOUND))]  # the oldest
        device, described = inputs.x.device, _described(inputs)
        kernel = _forward_launch(options, device, *described)
        copies = kernel is None
        if kernel is None:
            kernel = _forward_launch(options, device, *map(_copied, described))
        assert kernel is not None
        _FOUND[key] = found = ForwardLaunch(kernel, copies)
    return found


def _like(inputs: Inputs, options: Options) -> tuple:
    """Equal for calls of which either all are right or all are wrong, and which start the same kernel."""
    return (options, *[None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in inputs])


def _forward_launch(options: Options, device: torch.device, *described: "Description") -> "Launch | None":
    """described: of Inputs. None where tensors must be made contiguous first."""
    x, k, *small = described
    packed = k is None
    rows = [_rows(x, packed, options), _rows(k, False, options)]
    if None in rows or not _dense(small):
        return None
    assert x is not None
    work = _work(options, x, packed, small)
    tile = forward_tile(x[2].itemsize)
    how = _variant(options, work, tile, x, small, rows, device, PACKED=packed)
    q_tiles, k_tiles = (_tiles(work, tile, heads) for heads in (options.heads, options.kv_heads))
    numbers = (work.T, q_tiles, work.table_rows, options.eps, *_strides(rows))
    return Launch(kernels.rotary_forward_kernel, (q_tiles + k_tiles,), numbers, how, tile, device)


def backward(upstream: Upstream, inputs: Inputs, options: Options, wanted: tuple[bool, ...]) -> list[Tensor]:
    """The gradients that `empty_gradients` lists.

    inputs: as of forward, but without a norm x and k may be None. wanted: of q_weight, q_bias, k_weight, k_bias.
    """
    plan = _backward_plan(options, wanted, upstream.dq.device, *_described(upstream), *_described(inputs))
    if plan is None:
        return backward(Upstream(*_contiguous(upstream)), Inputs(*_contiguous(inputs)), options, wanted)
    gradients = empty_gradients(upstream, inputs, options, wanted)
    if upstream.dq.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    x, k, cos, sin, positions, q_weight, _, k_weight, _ = inputs
    dx, dk_in, sums = gradients[0], None, gradients[1:]
    if upstream.dv is None:
        dk_in, *sums = sums
    partials = dx.new_empty(plan.partials, dtype=torch.float32) if plan.finish else None
    plan.gradients.start(BackwardPointers(*upstream, x, k, cos, sin, positions, q_weight, k_weight, dx, dk_in, partials))
    if plan.finish:
        given = iter(sums)
        plan.finish.start(partials, WeightGradients(*[next(given) if wants else None for wants in wanted]))
    return gradients


class _BackwardPlan(NamedTuple):
    partials: int  # fp32 elements
    gradients: "Launch"
    finish: "Launch | None"


@lru_cache(maxsize=1024)
def _backward_plan(
    options: Options, wanted: tuple[bool, ...], device: torch.device, *described: "Description"
) -> _BackwardPlan | None:
    """described: of Upstream, then of Inputs. None where tensors must be made contiguous first."""
    dq, dk, dv, x, k, *small = described
    packed = dv is not None
    rows = [*(_rows(t, False, options) for t in (dq, dk, dv)), _rows(x, packed, options), _rows(k, False, options)]
    if None in rows or not _dense(small):
        return None
    assert dq is not None
    work = _work(options, dq, False, small)
    tile = backward_tile(dq[2].itemsize, options.norm >= 0, pads=2 * _row_block(work) > work.D)
    sums = (wanted[0] or wanted[2], wanted[1] or wanted[3])
    how = _variant(options, work, tile, dq, small, rows, device, PACKED=packed, STAGES=tile.stages, WANTED=sums)

    q_parts, k_parts = (options.heads, options.kv_heads) if work.per_head else (1, 1)
    q_programs = _tiles(work, tile, options.heads) // q_parts
    k_programs = _tiles(work, tile, options.kv_heads) // k_parts
    facts = device_facts(device)
    if tile.programs_per_sm:
        # As many for each part as its share of the tiles, so that all end at the same time.
        share = facts.multiprocessors * tile.programs_per_sm / max(1, q_parts * q_programs + k_parts * k_programs)
        q_programs, k_programs = (min(n, max(1, round(n * share))) for n in (q_programs, k_programs))
    programs = q_parts * q_programs + k_parts * k_programs
    numbers = (work.B, work.T, q_programs, k_programs, work.table_rows, options.eps, *_strides(rows))
    gradients = Launch(kernels.rotary_backward_kernel, (programs,), numbers, how, tile, device)
    if not any(sums):
        return _BackwardPlan(0, gradients, None)
    count, block = sum(sums), 16
    grid = ((q_parts + k_parts) * count, triton.cdiv(work.D, block))
    finish = Launch(kernels.finish_rotary_weights_kernel, grid, (q_programs, k_programs, 256, block), how, Tile(0, 4), device)
    return _BackwardPlan(programs * count * work.D, gradients, finish)


class Launch:
    """A kernel with all its arguments but the pointers."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple, how: Variant, tile: Tile, device: torch.device
    ) -> None:
        self.kernel, self.grid, self.rest = kernel, grid, (*numbers, how)
        self.options = {"num_warps": tile.warps} | ({"maxnreg": tile.registers} if tile.registers else {})
        self.index = device.index if device.type == "cuda" else None
        if device_facts(device).since_sm_90:
            self.options["launch_pdl"] = True

    def start(self, *pointers: Any) -> None:
        """Starts the kernel on the current stream of its device."""
        if 0 in self.grid:
            return
        # Triton launches on the current device, which need not be the tensors'.
        if self.index is not None and self.index != torch.cuda.current_device():
            with torch.cuda.device(self.index):
                return self.start(*pointers)
        self.kernel[self.grid](*pointers, *self.rest, **self.options)


# ---- what follows from shapes, strides and dtypes ---------------------------------------------------------------------------

Description = tuple[torch.Size, tuple[int, ...], torch.dtype] | None  # shape, strides, dtype; None for an absent tensor


def _described(tensors: Iterable[Tensor | None]) -> list[Description]:
    return [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors]


def _contiguous(tensors: Iterable[Tensor | None]) -> list[Any]:
    return [None if t is None else t.contiguous() for t in tensors]


def _copied(described: Description) -> Description:
    """Of the tensor that `contiguous` gives."""
    if described is None:
        return None
    shape, _, dtype = described
    return shape, torch.empty(shape, device="meta").stride(), dtype


class _Rows(NamedTuple):
    """Distances in elements."""

    batch: int
    token: int
    head: int


def _rows(described: Description, packed: bool, options: Options) -> _Rows | None:
    """Where the rows of a tensor lie; zeros for an absent one. None if no three numbers tell.

    packed: the heads of a token lie side by side in the last dimension.
    """
    if described is None:
        return _Rows(0, 0, 0)
    shape, strides, _ = described
    if strides[-1] != 1:
        return None
    behind = 2 if packed else 3  # dimensions from the tokens on
    head = shape[-1] // (options.heads + 2 * options.kv_heads) if packed else strides[-2]
    leading = [(n, s) for n, s in zip(shape[:-behind], strides[:-behind], strict=True) if n != 1]
    for (_, outer), (n, inner) in pairwise(leading):
        if outer != n * inner:
            return None
    return _Rows(leading[-1][1] if leading else 0, strides[-behind] if shape[-behind] != 1 else 0, head)


def _dense(described: Sequence[Description]) -> bool:
    """Whether all are contiguous."""
    for t in described:
        if t is not None:
            shape, strides, _ = t
            step = 1
            for n, stride in zip(reversed(shape), reversed(strides), strict=True):
                if n != 1 and stride != step:
                    return False
                step *= n
    return True


MOST_ROWS = 2**30  # of a sequence: the kernels count them in 32 bits, and those of the tiles behind its end


class _Work(NamedTuple):
    B: int  # sequences
    T: int  # tokens in each
    D: int
    R: int
    table_rows: int
    per_head: bool


def _work(options: Options, x: Any, packed: bool, small: Sequence[Any]) -> _Work:
    """x: the description of the packed tensor, or of q or dq; small: of cos, sin, positions, weights and biases."""
    shape, behind = x[0], 2 if packed else 3
    D = shape[-1] // (options.heads + 2 * options.kv_heads) if packed else shape[-1]
    cos, _, _, *weights = small
    rows, pairs = (0, 0) if cos is None else cos[0]
    per_head = any(t is not None and len(t[0]) == 2 for t in weights)
    if shape[-behind] * max(options.heads, options.kv_heads) >= MOST_ROWS:
        raise ValueError(
            f"rotary: {shape[-behind]} tokens in a sequence times {options.heads} heads, accepted: less than {MOST_ROWS}"
        )
    return _Work(prod(shape[:-behind]), shape[-behind], D, 2 * pairs, rows, per_head)


def _row_block(work: _Work) -> int:
    """Pairs of a row in a tile."""
    return triton.next_power_of_2(work.D // 2)


def _tile_rows(work: _Work, tile: Tile) -> int:
    return max(1, tile.elements // (2 * _row_block(work)))


def _tiles(work: _Work, tile: Tile, heads: int) -> int:
    """Of a tensor with so many heads."""
    rows = _tile_rows(work, tile)
    if work.per_head:
        return heads * work.B * triton.cdiv(work.T, rows)
    return work.B * triton.cdiv(work.T * heads, rows)


def _unit(rows: Sequence[Any]) -> int:
    """A power of two up to 16 that divides the strides. Of an argument Triton would know whether 16 divides it and no more."""
    return gcd(16, *[stride for each in rows for stride in each[:2]])


def _strides(rows: Sequence[Any]) -> list[int]:
    """As the kernels take them."""
    unit = _unit(rows)
    return [stride // unit for each in rows for stride in each[:2]]


def _variant(
    options: Options,
    work: _Work,
    tile: Tile,
    x: Any,
    small: Sequence[Any],
    rows: Sequence[Any],
    device: torch.device,
    **more: Any,
) -> Variant:
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
        VECTOR=gcd(16 // x[2].itemsize, work.D // 2, work.R // 2),
        UNIT=_unit(rows),
        HEAD_STRIDES=tuple(each.head for each in rows),
        EARLY_START=device_facts(device).since_sm_90,
        **more,
    )


def forget() -> None:
    """Drops the remembered launches; for tests, which change what they were made of."""
    _FOUND.clear()
    _backward_plan.cache_clear()
