"""From records to kernels: allocates what is returned, picks the tile, starts the kernels.

What a launch needs besides its tensors and the number of rows follows from widths, dtypes and options. It is worked out once.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernels import backward as backward_kernels
from .kernels import forward as forward_kernels
from .kernels.backward import norm_backward_kernel
from .kernels.exchange import RING, turn_words
from .kernels.forward import norm_forward_kernel
from .kernels.rows import Variant, Weights
from .kernels.weight_gradients import WeightGradients, finish_weight_gradients_kernel
from .philox import drop_threshold, keep_scale
from .records import (
    BackwardOptions,
    Options,
    empty_gradients,
    empty_outputs,
    names_of,
    outputs_of,
    picker,
    shapes_of,
)
from .reference import Norm
from .tiling import Tile, Work, backward_tile, forward_tile, most_registers
from .kit import Launcher, device_facts

TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@lru_cache(maxsize=1024)
def forward_call(options: Options, N: int, device: torch.device, of: Any) -> Callable[..., list[Tensor]]:
    """For rows of N, with all worked out that follows: a function of the inputs that are there, which returns the outputs that
    options ask for, in the order of Outputs.

    of: Inputs, with dtypes in the place of tensors.
    """
    rows = (of.x, of.residual, of.x1)
    weights = [getattr(of, name) for name in Weights._fields]
    work = Work(
        vector=_vector(*rows, options.out_dtype, options.residual_dtype),
        row_bytes=_bytes(*rows),
        weights=sum(weight is not None for weight in weights),
        weight_bytes=_bytes(*weights),
        drops=options.dropout_p > 0,
    )
    facts = device_facts(device)
    tile = forward_tile(N, work, facts)
    early = facts.since_sm_90
    variant = _variant(N, options, work, tile, STREAM_DTYPE=TRITON_DTYPE[options.residual_dtype], EARLY_START=early)
    numbers = (options.eps, *_dropout_numbers(options), tile.prefetch_programs, variant)
    start = Launcher(norm_forward_kernel, forward_kernels.Pointers, device, num_warps=tile.warps, launch_pdl=early or None)
    rows_of_tile, drops = tile.rows, of.seed is not None
    outputs = outputs_of(names_of(of), options)
    kinds = [*outputs.values()]
    pointers = picker(forward_kernels.Pointers._fields, [*names_of(of), *outputs])

    def run(inputs: Sequence[Tensor], buffers: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        """buffers: contiguous, for y and r; that for r may be the residual itself."""
        x = inputs[0]
        M = x.numel() // N
        if buffers is None:
            written = empty_outputs(x, kinds, M, x.is_contiguous())
        else:
            written = [buffers[name] if name in buffers else empty_outputs(x, [kind], M)[0] for name, kind in outputs.items()]
        start(-(-M // rows_of_tile), pointers((*inputs, *written, None)), inputs[-1] if drops else None, M, *numbers)
        return written

    return run


@lru_cache(maxsize=1024)
def backward_call(call: BackwardOptions, N: int, device: torch.device, of: Any) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Like `forward_call`, of BackwardInputs; returns the gradients that are wanted, in the order of Gradients."""
    options, asked = call
    norm, branch_norm = Norm(options.norm), Norm(options.branch_norm)
    wanted = Weights(*[getattr(asked, f"d{name}") is not None for name in Weights._fields])
    reads_r = bool(norm != Norm.none or wanted.weight or wanted.weight1)
    rows = (of.dy, of.dy1, of.dr, of.r if reads_r else None, of.x, of.x1)
    written = (asked.dz, asked.dx, asked.dx1)
    work = Work(
        vector=_vector(*rows, *written),
        row_bytes=_bytes(*rows),
        weights=(1 + norm.has_bias) * reads_r * (1 if of.dy1 is None else 2) + (1 + branch_norm.has_bias) * options.branch,
        written_bytes=_bytes(*written),
        branch=options.branch,
        # The sums over a row that its programs would exchange are those of one norm with a statistic.
        splittable=of.dy is not None and of.dy1 is None and of.x is None and of.x1 is None and norm.statistics > 0,
    )
    facts = device_facts(device)
    tile = backward_tile(N, work, facts)
    split = tile.slices > 1
    early = facts.since_sm_90 and not split  # a cooperative launch cannot be early
    variant = _variant(N, options, work, tile, STREAM_DTYPE=None, EARLY_START=early, WANTED=wanted)
    cooperative, most = (True, most_registers(tile)) if split else (None, None)
    start = Launcher(
        norm_backward_kernel, backward_kernels.Pointers, device, num_warps=tile.warps, launch_pdl=early or None,
        launch_cooperative_grid=cooperative, maxnreg=most,
    )  # fmt: skip
    most_groups = facts.multiprocessors * tile.programs_per_sm // tile.slices
    # As many partial sums at once as there are on a large batch: with fewer, a small kernel waits for memory several times.
    block_p = min(512, triton.next_power_of_2(max(1, most_groups)))
    block_n = max(8, min(256, 4096 // block_p))
    pdl = facts.since_sm_90 or None
    finish = Launcher(finish_weight_gradients_kernel, WeightGradients, device, num_warps=4, launch_pdl=pdl)
    sums = sum(wanted)
    scalars = norm.scalars * (asked.dscalars is not None)
    scalars += branch_norm.scalars * (asked.dbranch_scalars is not None)

    numbers = (*_dropout_numbers(options), variant)
    finish_blocks, finish_numbers = sums * -(-N // block_n), (block_p, block_n, facts.since_sm_90)
    rows_of_tile, slices, sums_N = tile.rows, tile.slices, sums * N
    names, gradients = names_of(of), names_of(asked)
    shapes, place_of_r, drops = shapes_of(asked, names), names.index("r"), of.seed is not None
    scratch_names = [name for name, used in (("partials", sums), ("scalar_partials", scalars), ("board", split)) if used]
    all_names = [*names, *gradients, *scratch_names]
    pointers, finish_pointers = (picker(record._fields, all_names) for record in (backward_kernels.Pointers, WeightGradients))

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        r = inputs[place_of_r]
        M = r.numel() // N
        written = empty_gradients(inputs, shapes, N)
        if M == 0:
            return [gradient.zero_() for gradient in written]  # those of weights have elements
        tiles = -(-M // rows_of_tile)
        groups = min(tiles, most_groups)
        scratch = []
        if sums:
            scratch.append(r.new_empty(groups * sums_N, dtype=torch.float32))
        if scalars:
            scratch.append(r.new_empty(groups, scalars, dtype=torch.float32))
        if split:
            words = groups * RING.value * turn_words(slices)
            scratch.append(torch.full((words,), -1, dtype=torch.int64, device=device))
        tensors = (*inputs, *written, *scratch, None)
        start(groups * slices, pointers(tensors), inputs[-1] if drops else None, M, tiles, *numbers)
        if sums:
            finish(finish_blocks, finish_pointers(tensors), groups, N, *finish_numbers)
        if scalars:
            found = scratch[1 if sums else 0].sum(0)
            for name, part in (("dscalars", found[: norm.scalars]), ("dbranch_scalars", found[-branch_norm.scalars :])):
                if name in gradients:
                    written[gradients.index(name)].copy_(part)
        return written

    return run


def _dropout_numbers(options: Options) -> tuple[int, float]:
    return drop_threshold(options.dropout_p), keep_scale(options.dropout_p)


def _variant(N: int, options: Options, work: Work, tile: Tile, **more: Any) -> Variant:
    of_tile = ("rows", "block_n", "looped", "slices", "stages", "early_weights", "prefetch")
    return Variant(
        N,
        NORM=int(options.norm),
        BRANCH=options.branch,
        BRANCH_NORM=int(options.branch_norm),
        RESIDUAL_SCALE=options.residual_scale,
        DROPOUT=options.dropout_p > 0.0,
        OFFSET=float(options.zero_centered_weight),
        VECTOR=work.vector,
        **{name.upper(): getattr(tile, name) for name in of_tile},
        **more,
    )


def _vector(*dtypes: Any) -> int:
    """Elements in 16 bytes of the widest."""
    return 16 // max(dtype.itemsize for dtype in dtypes if dtype is not None)


def _bytes(*dtypes: Any) -> int:
    return sum(dtype.itemsize for dtype in dtypes if dtype is not None)
