"""From records to launches: picks the tile, sets the flags, starts the kernels."""

from dataclasses import replace
from functools import lru_cache
from math import gcd, prod
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backward_kernels import finish_weight_gradients_kernel, norm_backward_kernel
from .dropout_kernels import dropout_kernel
from .forward_kernels import norm_forward_kernel
from .launcher import Launcher
from .philox import drop_threshold, keep_scale
from .records import BackwardInputs, BackwardOptions, Gradients, Inputs, Options, Outputs, by_name
from .tiling import (
    H200,
    Device,
    Tile,
    Work,
    backward_tile,
    bias_past_l1,
    forward_tile,
    packed,
    parts,
    prefetch_distance,
    registers,
    ring,
    span,
)

R = TypeVar("R", Inputs, BackwardInputs)

_TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def norm_forward(inputs: Inputs, outputs: Outputs, options: Options) -> None:
    """Fills the outputs that are there; they are contiguous."""
    shape, device = inputs.x.shape, inputs.x.device
    inputs, dtypes, strides = _dense(inputs)
    x, residual, x1, weight, bias, weight1, bias1, rowscale, rowscale1, seed = inputs
    y, r, y1, mask, mask1, stats = outputs
    in_place = r is not None and residual is not None and r.data_ptr() == residual.data_ptr()
    start, words = _forward(options, shape, device, dtypes, strides, in_place)
    start(
        x, x1, residual, rowscale, rowscale1, weight, bias, weight1, bias1, seed,
        y, y1, r, stats, mask, mask1, _board(x, words),
    )  # fmt: skip


class _Forward(NamedTuple):
    start: Launcher
    words: int  # on the board


@lru_cache(maxsize=1024)
def _forward(
    options: Options, shape: torch.Size, device: torch.device, dtypes: tuple, strides: tuple | None, in_place: bool
) -> _Forward:
    """dtypes: those of the inputs, None for an absent one; strides: as `_dense` gives them."""
    M, N = prod(shape[:-1]), shape[-1]
    stride, given = by_name(Inputs, _strides(N, dtypes, strides)), by_name(Inputs, dtypes)
    loaded = (given.x, given.x1, given.residual)
    work = Work(
        rms=options.is_rms_norm,
        residual=given.residual is not None,
        dropout=options.dropout_p > 0.0,
        vector=_vector(*loaded, options.out_dtype, options.residual_dtype),
        loaded_bytes=_bytes(*loaded),
        weight_bytes=0,  # forward reads its weights past the prefetch
        splittable=True,
        multiple=_multiple(N, *stride),
        light_weights=max(_bytes(w) for w in (given.weight, given.bias, given.weight1, given.bias1)) <= 2,
        one_norm=given.weight1 is None and given.bias1 is None,
    )
    facts = device_facts(device)
    tile = forward_tile(N, work, facts)
    tiles = triton.cdiv(M, tile.rows)
    programs = _programs(tile, tiles, device)
    start = Launcher(
        norm_forward_kernel,
        programs,
        (
            M, N, tiles, stride.x, stride.x1, stride.residual, N, N, N,  # the outputs are contiguous
            options.eps, drop_threshold(options.dropout_p), keep_scale(options.dropout_p),
            prefetch_distance(tile, programs, work, facts),
        ),
        device,
        RESIDUAL_DTYPE=_TRITON_DTYPE[options.residual_dtype], IS_RMS=options.is_rms_norm, DROPOUT=work.dropout,
        OFFSET=float(options.zero_centered_weight), IN_PLACE=in_place,
        PERSISTENT=tile.programs_per_sm > 0, EARLY=tile.early_weights,
        PREFETCH=tile.forward_prefetches(N),
        AT_ONCE=tile.asks_at_once(N) and _adjacent(N, loaded, (stride.x, stride.x1, stride.residual)),
        PACKED=packed(tile, options.residual_dtype.itemsize, facts),
        ONE_PASS=tile.one_pass and not options.is_rms_norm,
        PAST_L1=tile.past_l1,
        BIAS_PAST_L1=bias_past_l1(tile, N, _bytes(given.weight, given.bias, given.weight1, given.bias1)),
        **_constants(tile, M, N, work, facts),
    )  # fmt: skip
    return _Forward(start, _words(tile, work, facts, programs))


def norm_backward(inputs: BackwardInputs, gradients: Gradients, options: BackwardOptions) -> None:
    """Fills the gradients that are there; they are contiguous."""
    shape, device = inputs.r.shape, inputs.r.device
    inputs, dtypes, strides = _dense(inputs)
    dy, dy1, dr, r, x, x1, weight, weight1, rowscale, rowscale1, stats, seed = inputs
    dz, dx, dx1, drowscale, drowscale1, weights = gradients
    if r.numel() == 0:
        if weights is not None:
            weights.zero_()
        return
    if stats.data_ptr() % 8:  # they are read as words of 8 bytes, and hooks on saved tensors may bring them back to any place
        stats = stats.clone()
    launch = _backward(options, shape, device, dtypes, strides)
    dweight = dbias = dweight1 = dbias1 = None
    if weights is not None:
        partial = weights.new_empty(launch.partials, dtype=torch.float32)
        slots = (None, partial) if weights.dim() == 1 else (None, *partial.unbind(1))
        dweight, dbias, dweight1, dbias1 = [slots[i] for i in launch.slots]
    launch.gradients(
        dy, dy1, dr, r, x, x1, weight, weight1, rowscale, rowscale1, stats, seed,
        dz, dx, dx1, drowscale, drowscale1, dweight, dbias, dweight1, dbias1, _board(r, launch.words),
    )  # fmt: skip
    if weights is not None:
        launch.finish(partial, weights)


class _Backward(NamedTuple):
    partials: tuple[int, int, int]  # groups of programs that share a row, each with a sum of its own; weight gradients; N
    slots: list[int]  # which of the weight gradients is dweight, dbias, dweight1, dbias1, counted from 1; 0: not asked for
    words: int  # on the board
    gradients: Launcher
    finish: Launcher


@lru_cache(maxsize=1024)
def _backward(
    options: BackwardOptions, shape: torch.Size, device: torch.device, dtypes: tuple, strides: tuple | None
) -> _Backward:
    """dtypes: those of the inputs, None for an absent one; strides: as `_dense` gives them."""
    M, N = prod(shape[:-1]), shape[-1]
    stride = by_name(BackwardInputs, _strides(N, dtypes, strides))
    given = by_name(BackwardInputs, dtypes)
    loaded = (given.dy, given.dy1, given.dr, given.r, given.x, given.x1)
    work = Work(
        rms=options.is_rms_norm,
        residual=given.dr is not None,
        dropout=options.dropout_p > 0.0,
        vector=_vector(*loaded, options.dz_dtype, options.dx_dtype, options.dx1_dtype),
        loaded_bytes=_bytes(*loaded),
        weight_bytes=_bytes(given.weight),
        # The programs of a split row exchange the sums of one upstream gradient, and of nothing else.
        splittable=given.dy is not None and given.dy1 is None and given.x is None and given.x1 is None,
        multiple=_multiple(N, *stride),
        light_weights=_bytes(given.weight) <= 2,
    )
    facts = device_facts(device)
    tile = backward_tile(N, work, facts)
    tiles = triton.cdiv(M, tile.rows)
    programs = _programs(tile, tiles, device)
    count = sum(options.wanted)
    width = count * N
    early_finish = facts.since_sm_90 and width > 0
    gradients = Launcher(
        norm_backward_kernel,
        programs,
        (
            M, N, tiles, stride.dy, stride.dy1, stride.dr, stride.r, stride.x, stride.x1, width,
            drop_threshold(options.dropout_p), keep_scale(options.dropout_p),
        ),
        device,
        EARLY_FINISH=early_finish, IS_RMS=options.is_rms_norm, OFFSET=float(options.zero_centered_weight),
        DROPOUT=work.dropout, DRAWS_FIRST=work.dropout and tile.draws_first, PREFETCH=tile.prefetch_l2,
        **_constants(tile, M, N, work, facts),
    )  # fmt: skip
    groups = programs // tile.slices
    # As many partial sums at once as there are on a large batch: fewer, and a small kernel waits for memory several times.
    partials = facts.multiprocessors * tile.programs_per_sm // tile.slices
    block_p = min(512, triton.next_power_of_2(partials))
    if partials > block_p and width <= 16 * facts.multiprocessors:
        # It waits several times, so more at once in each program, as long as no multiprocessor gets two of them.
        block_n, warps = 8 if width <= 8 * facts.multiprocessors else 16, 16
    else:
        block_n, warps = max(8, min(256, 4096 // block_p)), 4
    finish = Launcher(
        finish_weight_gradients_kernel,
        triton.cdiv(width, block_n),
        (groups, width),
        device,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        MULTIPLE=_multiple(width),
        num_warps=warps,
        **early_start(facts.since_sm_90),
    )
    slots = [sum(options.wanted[: i + 1]) if wanted else 0 for i, wanted in enumerate(options.wanted)]
    return _Backward((groups, count, N), slots, _words(tile, work, facts, programs), gradients, finish)


def _constants(tile: Tile, M: int, N: int, work: Work, device: Device) -> dict[str, Any]:
    """The constexprs and launch options that both kernels take from the tile."""
    constants = {
        "ROWS": tile.rows,
        "BLOCK_N": tile.block_n,
        "TAIL_N": tile.tail_n,
        "SLICES": tile.slices,
        "PARTS": parts(tile, work, device),
        "LAG": tile.lag,
        "RING": ring(tile),
        "LONG": M + tile.rows >= 2**31,
        "LOOPED": tile.looped(N),
        "EVEN_N": N % tile.width == 0,
        "MULTIPLE": work.multiple,
        "VECTOR": tile.columns or work.vector,
        "STAGES": tile.stages,
        "HOLD": tile.hold_weights and tile.programs_per_sm > 0,
        "num_warps": tile.warps,
        # From this width on a block repeats itself over the threads.
        "SPAN": span(tile, work, device),
    }
    if tile.slices > 1:
        constants["launch_cooperative_grid"] = True
    constants |= early_start(device.since_sm_90 and tile.slices == 1)  # a cooperative launch cannot be early
    if (most := registers(tile)) is not None:
        constants["maxnreg"] = most
    return constants


def early_start(pdl: bool) -> dict[str, bool]:
    """For a kernel that starts before the end of the one ahead is reported: the launch option, and that it waits by itself."""
    return {"EARLY_START": pdl} | ({"launch_pdl": True} if pdl else {})


def _programs(tile: Tile, tiles: int, device: torch.device) -> int:
    if tile.programs_per_sm == 0:
        return tiles
    groups = device_facts(device).multiprocessors * tile.programs_per_sm // tile.slices
    return min(tiles, groups) * tile.slices


def _words(tile: Tile, work: Work, device: Device, programs: int) -> int:
    """Words on the board of the programs that share rows: for each group of them int64 [ring, rows, slices · parts]."""
    return programs * ring(tile) * tile.rows * parts(tile, work, device) if tile.slices > 1 else 0


def _board(like: Tensor, words: int) -> Tensor | None:
    """The board, −1 where nothing is written yet."""
    if words == 0:
        return None
    return torch.full((words,), -1, dtype=torch.int64, device=like.device)


def _vector(*dtypes: torch.dtype | None) -> int:
    """Elements in 16 bytes of the widest."""
    return 16 // max(dtype.itemsize for dtype in dtypes if dtype is not None)


def _multiple(*numbers: int) -> int:
    """The largest power of two up to 16 that divides all of them."""
    return gcd(16, *numbers)


def _adjacent(N: int, dtypes: tuple[torch.dtype | None, ...], strides: tuple[int, ...]) -> bool:
    """Whether nothing lies between the rows of any tensor that is there."""
    return all(stride == N for dtype, stride in zip(dtypes, strides, strict=True) if dtype is not None)


def _bytes(*dtypes: torch.dtype | None) -> int:
    return sum(dtype.itemsize for dtype in dtypes if dtype is not None)


def dropout(x: Tensor | None, y: Tensor, seed: Tensor, p: float, stream: int) -> None:
    """y [M, N] = dropout(x), or the mask of what is kept where there is no x."""
    M, N = y.shape
    block_n = min(1024, max(16, triton.next_power_of_2(N)))
    rows = max(1, 2048 // block_n)
    stride = 0 if x is None else x.stride(0)
    launch = Launcher(
        dropout_kernel,
        triton.cdiv(M, rows) * triton.cdiv(N, block_n),
        (M, N, stride, drop_threshold(p), keep_scale(p)),
        y.device,
        STREAM=stream, ROWS=rows, BLOCK_N=block_n, MULTIPLE=_multiple(N, stride), num_warps=4,
    )  # fmt: skip
    launch(x, y, seed)


# The fields that are read row by row; the others are small and read from end to end.
_ROWS = {"x", "x1", "residual", "dy", "dy1", "dr", "r"}


def _dense(record: R) -> tuple[R, tuple[torch.dtype | None, ...], tuple[int, ...] | None]:
    """The tensors as the kernels read them, their dtypes, and the distances between their rows, or None if all are contiguous.

    Rows may lie apart; the elements of a row (or of a weight) may not, and the leading dimensions must fold into one.
    """
    dtypes: list[torch.dtype | None] = []
    contiguous = True
    for t in record:
        if t is None:
            dtypes.append(None)
        else:
            dtypes.append(t.dtype)
            contiguous = contiguous and t.is_contiguous()
    if contiguous:
        return record, tuple(dtypes), None
    tensors: list[Tensor | None] = []
    strides = []
    for name, t in zip(record._fields, record, strict=True):
        if t is None or name not in _ROWS:
            tensors.append(t if t is None else t.contiguous())
            strides.append(0)
        else:
            rows = t.reshape(-1, t.shape[-1])
            rows = rows if rows.stride(1) == 1 else rows.contiguous()
            tensors.append(rows)
            strides.append(rows.stride(0))
    return by_name(type(record), tensors), tuple(dtypes), tuple(strides)


def _strides(N: int, dtypes: tuple[torch.dtype | None, ...], strides: tuple[int, ...] | None) -> tuple[int, ...]:
    return strides or tuple(0 if dtype is None else N for dtype in dtypes)


@lru_cache
def device_facts(device: torch.device) -> Device:
    """Cached: asking the driver costs more than a launch."""
    if device.type != "cuda":
        # The interpreter: two multiprocessors, so that partial sums are really summed; its programs run one after another.
        return replace(H200, multiprocessors=2, cooperative=False, since_sm_90=False)
    facts = torch.cuda.get_device_properties(device)
    return Device(
        multiprocessors=facts.multi_processor_count,
        shared_memory=getattr(facts, "shared_memory_per_block_optin", 0) or facts.shared_memory_per_block,
        threads=facts.max_threads_per_multi_processor,
        warp_size=facts.warp_size,
        cooperative=torch.version.hip is None,
        since_sm_90=torch.version.hip is None and facts.major >= 9,
    )


def forget() -> None:
    """Drops the remembered launches; for tests and the tuner, which change what they were made of."""
    _forward.cache_clear()
    _backward.cache_clear()
