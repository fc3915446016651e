"""From records to kernels: allocates what is returned, picks the tile, starts the kernels.

What a launch needs besides its tensors follows from their shapes, dtypes and the options. It is worked out once and remembered.
"""

from collections.abc import Callable
from functools import lru_cache
from math import gcd, prod
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from .kernels import backward as backward_kernels
from .kernels import forward as forward_kernels
from .kernels.backward import finish_weight_gradients_kernel, norm_backward_kernel
from .kernels.dropout import dropout_kernel
from .kernels.forward import norm_forward_kernel
from .kernels.norms import centres
from .kernels.nvidia import RING, turn_words
from .kernels.rows import Strides, Variant
from .philox import drop_threshold, keep_scale
from .records import BackwardInputs, BackwardOptions, Gradients, Inputs, Options, Outputs, empty_gradients, empty_outputs
from .tiling import H200, Device, Tile, Work, backward_tile, forward_tile, most_registers

R = TypeVar("R", Inputs, BackwardInputs)

_TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def forward(inputs: Inputs, options: Options, y: Tensor | None = None, r: Tensor | None = None) -> Outputs:
    """y, r: contiguous buffers for those outputs; r may be the residual itself."""
    outputs = empty_outputs(inputs, options, y, r)
    shape, device = inputs.x.shape, inputs.x.device
    inputs, dtypes, strides = _dense(inputs)
    launch = _forward_launcher(options, shape, device, dtypes, strides)
    launch(forward_kernels.Pointers(*inputs[:9], *outputs), inputs.seed)
    return outputs


@lru_cache(maxsize=1024)
def _forward_launcher(
    options: Options, shape: torch.Size, device: torch.device, dtypes: Inputs, strides: Inputs | None
) -> "Launcher":
    """dtypes: of the inputs, None for an absent one; strides: as `_dense` gives them."""
    M, N = prod(shape[:-1]), shape[-1]
    rows = (dtypes.x, dtypes.residual, dtypes.x1)
    weights = (dtypes.weight, dtypes.bias, dtypes.weight1, dtypes.bias1)
    work = Work(
        vector=_vector(*rows, options.out_dtype, options.residual_dtype),
        row_bytes=_bytes(*rows),
        weights=sum(weight is not None for weight in weights),
        weight_bytes=_bytes(*weights),
        drops=options.dropout_p > 0,
    )
    facts = device_facts(device)
    tile = forward_tile(N, work, facts)
    unit, stride = _in_units(strides)
    stream_dtype = _TRITON_DTYPE[options.residual_dtype]
    how = _variant(N, options, work, tile, STRIDE_UNIT=unit, STREAM_DTYPE=stream_dtype, EARLY_START=facts.since_sm_90)
    numbers = forward_kernels.Numbers(
        M, options.eps, drop_threshold(options.dropout_p), keep_scale(options.dropout_p), tile.prefetch_programs
    )
    return Launcher(
        norm_forward_kernel,
        triton.cdiv(M, tile.rows),
        device,
        (stride, *numbers, how),
        num_warps=tile.warps,
        launch_pdl=facts.since_sm_90,
    )


def backward(inputs: BackwardInputs, options: BackwardOptions) -> Gradients:
    gradients = empty_gradients(inputs, options)
    weights = gradients.weights
    shape, device = inputs.r.shape, inputs.r.device
    inputs, dtypes, strides = _dense(inputs)
    if inputs.r.numel() == 0:
        if weights is not None:
            weights.zero_()
        return gradients
    if inputs.stats.data_ptr() % 8:  # they are read as words of 8 bytes, and hooks on saved tensors may bring them to any place
        inputs = inputs._replace(stats=inputs.stats.clone())
    launch = _backward_launch(options, shape, device, dtypes, strides)
    partials = board = None
    if weights is not None:
        partials = weights.new_empty(launch.partials, dtype=torch.float32)
    if launch.words:
        board = torch.full((launch.words,), -1, dtype=torch.int64, device=device)
    launch.gradients(backward_kernels.Pointers(*inputs[:11], *gradients[:5], partials, board), inputs.seed)
    if weights is not None:
        launch.finish(backward_kernels.Sums(partials, weights))
    return gradients


class _BackwardLaunch(NamedTuple):
    partials: int  # fp32 elements: of each group of programs that share a row, a sum for each weight gradient
    words: int  # int64, of the board on which programs that share a row exchange sums
    gradients: "Launcher"
    finish: "Launcher"


@lru_cache(maxsize=1024)
def _backward_launch(
    options: BackwardOptions, shape: torch.Size, device: torch.device, dtypes: BackwardInputs, strides: BackwardInputs | None
) -> _BackwardLaunch:
    """dtypes: of the inputs, None for an absent one; strides: as `_dense` gives them."""
    M, N = prod(shape[:-1]), shape[-1]
    rows = (dtypes.dy, dtypes.dy1, dtypes.dr, dtypes.r, dtypes.x, dtypes.x1)
    work = Work(
        vector=_vector(*rows, options.dz_dtype, options.dx_dtype, options.dx1_dtype),
        row_bytes=_bytes(*rows),
        weights=(2 if centres(options.norm) else 1) * (1 if dtypes.dy1 is None else 2),
        written_bytes=_bytes(options.dz_dtype, options.dx_dtype, options.dx1_dtype),
        splittable=dtypes.dy is not None and dtypes.dy1 is None and dtypes.x is None and dtypes.x1 is None,
    )
    facts = device_facts(device)
    tile = backward_tile(N, work, facts)
    tiles = triton.cdiv(M, tile.rows)
    groups = min(tiles, facts.multiprocessors * tile.programs_per_sm // tile.slices)
    unit, stride = _in_units(strides)
    split = tile.slices > 1
    early = facts.since_sm_90 and not split  # a cooperative launch cannot be early
    count = sum(options.wanted)
    how = _variant(N, options, work, tile, STRIDE_UNIT=unit, STREAM_DTYPE=None, EARLY_START=early, WANTED=options.wanted)
    numbers = backward_kernels.Numbers(M, tiles, drop_threshold(options.dropout_p), keep_scale(options.dropout_p))
    gradients = Launcher(
        norm_backward_kernel,
        groups * tile.slices,
        device,
        (stride, *numbers, how),
        num_warps=tile.warps,
        launch_pdl=early,
        launch_cooperative_grid=split,
        maxnreg=most_registers(tile) if split else None,
    )
    # As many partial sums at once as there are on a large batch: with fewer, a small kernel waits for memory several times.
    block_p = min(512, triton.next_power_of_2(max(1, facts.multiprocessors * tile.programs_per_sm // tile.slices)))
    block_n = max(8, min(256, 4096 // block_p))
    finish = Launcher(
        finish_weight_gradients_kernel,
        triton.cdiv(count * N, block_n),
        device,
        (groups, count * N, block_p, block_n, facts.since_sm_90),
        num_warps=4,
        launch_pdl=facts.since_sm_90,
    )
    words = groups * RING.value * turn_words(tile.slices) if split else 0
    return _BackwardLaunch(groups * count * N, words, gradients, finish)


def dropout(x: Tensor | None, y: Tensor, seed: Tensor, p: float, stream: int) -> Tensor:
    """y [M, N], contiguous, filled with dropout(x); or, without x, with the mask: True where kept."""
    M, N = y.shape
    if x is not None and x.stride(-1) != 1:
        x = x.contiguous()
    block_n = min(1024, max(16, triton.next_power_of_2(N)))
    rows = max(1, 2048 // block_n)
    constants = (M, 0 if x is None else x.stride(0), drop_threshold(p), keep_scale(p), N, stream, rows, block_n)
    Launcher(dropout_kernel, triton.cdiv(M, rows) * triton.cdiv(N, block_n), y.device, constants, num_warps=4)((x, y), seed)
    return y


class Launcher:
    """A kernel with all its arguments but the tensors, for one set of tensor dtypes (or absences) on one device.

    From call to call only the pointers differ, and all that a compiled variant can depend on in a pointer is whether it is
    16-byte aligned. So the variant for aligned pointers is kept, and `prepared` starts it without Triton's look at arguments.
    """

    def __init__(self, kernel: Any, programs: int, device: torch.device, rest: tuple, **options: Any) -> None:
        """rest: the arguments behind the tensors; options: of the launch."""
        self.kernel, self.programs, self.rest = kernel, programs, rest
        self.options = {name: value for name, value in options.items() if value}
        self.index = device.index if device.type == "cuda" else None
        self.compiled: CompiledKernel | None = None

    def __call__(self, tensors: tuple[Tensor | None, ...], *seed: Tensor | None) -> None:
        """Starts the kernel on the current stream of its device. A seed, of any alignment, is an argument of its own."""
        if self.programs == 0:
            return
        # Triton launches on the current device, which need not be the tensors'.
        if self.index is not None and self.index != torch.cuda.current_device():
            with torch.cuda.device(self.index):
                return self(tensors, *seed)
        compiled = self.kernel[(self.programs,)](tensors, *seed, *self.rest, **self.options)
        if isinstance(compiled, CompiledKernel) and all(t is None or t.data_ptr() % 16 == 0 for t in tensors):
            self.compiled = compiled


def stream_getter() -> Callable[[int], int]:
    """Of Triton: a device's index to its current stream."""
    return driver.active.get_current_stream


def observed() -> bool:
    """Whether a profiler wants to hear of launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _variant(N: int, options: Options | BackwardOptions, work: Work, tile: Tile, **more: Any) -> Variant:
    return Variant(
        N,
        NORM=int(options.norm),
        DROPOUT=options.dropout_p > 0.0,
        OFFSET=float(options.zero_centered_weight),
        ROWS=tile.rows,
        BLOCK_N=tile.block_n,
        VECTOR=work.vector,
        LOOPED=tile.looped,
        SLICES=tile.slices,
        STAGES=tile.stages,
        EARLY_WEIGHTS=tile.early_weights,
        PREFETCH=tile.prefetch,
        **more,
    )


def _dense(record: R) -> tuple[R, R, R | None]:
    """The tensors as the kernels read them, their dtypes, and the distances between their rows, or None if all are contiguous.

    Rows may lie apart; the elements of a row (or of a weight) may not, and the leading dimensions must fold into one. What has
    no field in Strides is small and read from end to end.
    """
    make: Callable = type(record)._make
    dtypes = make([None if t is None else t.dtype for t in record])
    for t in record:
        if t is not None and not t.is_contiguous():
            break
    else:
        return record, dtypes, None
    tensors: list[Tensor | None] = []
    strides: list[int | None] = []
    for name, t in zip(record._fields, record, strict=True):
        if t is None or name not in Strides._fields:
            tensors.append(t if t is None else t.contiguous())
            strides.append(None)
        else:
            rows = t.reshape(-1, t.shape[-1])
            rows = rows if rows.stride(1) == 1 else rows.contiguous()
            tensors.append(rows)
            strides.append(rows.stride(0))
    return make(tensors), dtypes, make(strides)


def _in_units(strides: Inputs | BackwardInputs | None) -> tuple[int, Strides]:
    """A power of two up to 16 that divides the strides, and the strides in it.

    Of an argument Triton knows whether 16 divides it and no more. Rows that lie 1000 apart would be read two bytes at a time.
    """
    given: list[int | None] = [getattr(strides, name, None) for name in Strides._fields]
    unit = gcd(16, *[stride for stride in given if stride is not None])
    return unit, Strides(*[None if stride is None else stride // unit for stride in given])


def _vector(*dtypes: Any) -> int:
    """Elements in 16 bytes of the widest."""
    return 16 // max(dtype.itemsize for dtype in dtypes if dtype is not None)


def _bytes(*dtypes: Any) -> int:
    return sum(dtype.itemsize for dtype in dtypes if dtype is not None)


@lru_cache
def device_facts(device: torch.device) -> Device:
    """Cached: asking the driver costs more than a launch."""
    if device.type != "cuda":
        # The interpreter: two multiprocessors, so that partial sums are really summed; its programs run one after another.
        return H200._replace(multiprocessors=2, cooperative=False, since_sm_90=False)
    facts = torch.cuda.get_device_properties(device)
    return Device(
        multiprocessors=facts.multi_processor_count,
        shared_memory=getattr(facts, "shared_memory_per_block_optin", 0) or facts.shared_memory_per_block,
        bandwidth=2000 * facts.memory_clock_rate * facts.memory_bus_width / 8,  # kHz, two transfers a clock; bits
        warp_size=facts.warp_size,
        cooperative=torch.version.hip is None,
        since_sm_90=torch.version.hip is None and facts.major >= 9,
    )


def forget() -> None:
    """Drops the remembered launches; for tests, which change what they were made of."""
    _forward_launcher.cache_clear()
    _backward_launch.cache_clear()
