"""RMSNorm beside a gate, as Mamba-2, gated DeltaNet and Kimi's linear attention end with it."""

from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import checks, kit
from .norm import bytes_of, finishing, vector_of
from .tiling import Device, Tile, Work, backward_tile, forward_tile


class Gate(IntEnum):
    silu = 0
    sigmoid = 1


GATES = {gate.name: gate for gate in Gate}  # Dynamo of PyTorch 2.11 doesn't look into an Enum


def gated_rms_norm_fn(
    x: Tensor, z: Tensor, weight: Tensor | None, eps: float = 1e-6, norm_before_gate: bool = True,
    group_size: int | None = None, activation: str = "silu", zero_centered_weight: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """RMSNorm(x) · weight · a(z), or with norm_before_gate=False RMSNorm(x · a(z)) · weight: in fp32, rounded once.

    Args:
        x, z: (..., N) in bf16, fp16 or fp32; an x in fp64 goes through PyTorch's operations. Read as they lie in memory where
            rows lie at one distance, or at two, as the heads in columns of a projection do. Backward computes all again.
        weight: (N,), of any of these dtypes; None is 1. Its gradient is summed up in fp32 and in a fixed order.
        eps: added to the mean square.
        norm_before_gate: True as in Qwen3-Next, False as in Mamba-2.
        group_size: so many neighbouring columns are normalised together, a divisor of N; None: all.
        activation: a, "silu" or "sigmoid".
        zero_centered_weight: the weight is stored as its distance from 1.
        out_dtype: by default x's dtype.

    Returns:
        x's shape, contiguous.

    Raises:
        ValueError, TypeError: an argument that is not as above.
    """
    request = (out_dtype, eps, norm_before_gate, group_size, activation, zero_centered_weight)
    return gated_norm.checked(_check, reference, (x, z, weight), request)[0]


def _check(inputs: tuple, out_dtype: Any, *request: Any) -> tuple[tuple, "Options", bool]:
    name, (x, z, weight) = "gated_rms_norm_fn", inputs
    kernels, dtypes = checks.check_input(name, x, takes_fp64=True)
    checks.check_tensor(name, "z", z)
    checks.check_operands(name, x, dtypes, (x.shape,), checks.SHAPE_OF_X, z=z)
    checks.check_operands(name, x, dtypes, (x.shape[-1:],), checks.LAST_OF_X, weight=weight)
    out_dtype = checks.as_out_dtype(name, out_dtype, x, dtypes)
    return inputs, _options(name, x.shape[-1], out_dtype, *request), kernels


def _options(name: str, width: int, out_dtype: Any, eps: Any, before: Any, group: Any, gate: Any, centred: Any) -> "Options":
    """width: how many columns x has; out_dtype: None where it is not yet known."""
    group = width if group is None else checks.as_size(name, "group_size", group, 1)
    if width % group:
        raise ValueError(f"{name}: group_size is {group}, expected a divisor of the {width} columns of x")
    gate = checks.as_choice(name, "activation", gate, GATES)
    flags = checks.as_flags(name, norm_before_gate=before, zero_centered_weight=centred)
    return Options(checks.as_eps(name, eps), group, gate, out_dtype=out_dtype, **flags)


class GatedRMSNorm(nn.Module):
    """`gated_rms_norm_fn` with a weight of hidden_size, called `weight` as in transformers; forward takes x and z."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, norm_before_gate: bool = True, group_size: int | None = None,
        activation: str = "silu", zero_centered_weight: bool = False, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden_size = checks.as_size("GatedRMSNorm", "hidden_size", hidden_size, 1)
        self.options: dict[str, Any] = {
            "eps": eps, "norm_before_gate": norm_before_gate, "group_size": group_size, "activation": activation,
            "zero_centered_weight": zero_centered_weight,
        }  # fmt: skip
        _options("GatedRMSNorm", hidden_size, None, *self.options.values())
        start = torch.zeros if zero_centered_weight else torch.ones
        self.weight = nn.Parameter(start(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return gated_rms_norm_fn(x, z, self.weight, **self.options)

    def extra_repr(self) -> str:
        return ", ".join([str(len(self.weight)), *[f"{name}={value}" for name, value in self.options.items()]])


def reference(i: tuple[Tensor, Tensor, Tensor | None], o: "Options") -> kit.Output:
    """The same in PyTorch's own operations, in fp32, or in fp64 where one is fp64."""
    x, z, weight = i
    wide = torch.float64 if torch.float64 in kit.dtypes_of(i) else torch.float32
    a = torch.sigmoid(z.to(wide)) if o.activation == Gate.sigmoid else nn.functional.silu(z.to(wide))
    h = x.to(wide) if o.norm_before_gate else x.to(wide) * a
    groups = h.unflatten(-1, (-1, o.group_size))
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + o.eps)).flatten(-2)
    y = y if weight is None else y * (weight.to(wide) + float(o.zero_centered_weight))
    return kit.Output((y * a if o.norm_before_gate else y).to(o.out_dtype))


# ---- operator ----------------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    x: Tensor
    z: Tensor
    weight: Tensor | None


class Options(NamedTuple):
    eps: float
    group_size: int
    activation: Gate
    norm_before_gate: bool
    zero_centered_weight: bool
    out_dtype: torch.dtype


class GatedNorm(kit.Op):
    name, Inputs, Options = "gated_rms_norm", Inputs, Options

    def width(self, tensors):
        x, z, _ = tensors[-3:]  # the inputs, with which Backward ends
        inner = _inner(x, z)
        return x.shape[-1], inner > 1, *kit.steps((x, z), inner)

    def start(self, i, o):
        kernels, facts, rows = kit.kernels("gated"), kit.device_facts(i.x.device), i[:2]
        work = Work(vector_of(*rows, o.out_dtype), bytes_of(*rows), 1, bytes_of(i.weight))
        tile = forward_tile(o.group_size, work, facts)
        launch, groups, variant = _launch(kernels.gated_norm_kernel, kernels.Pointers, i, o, tile)

        def run(i):
            x, z, weight = i
            (y,) = outputs = self.outputs(i, o)
            M, inner = y.numel() // y.shape[-1], _inner(x, z)
            (x, z), apart = kit.placed((x, z), inner)
            launch(-(-M // tile.rows) * groups, (x, z, weight, y), M, o.eps, inner, *apart, variant)
            return outputs

        return run

    def start_backward(self, b, o, wanted):
        kernels, facts, N = kit.kernels("gated"), kit.device_facts(b.x.device), b.x.shape[-1]
        rows, written, sums = b[:3], wanted[:2], wanted.dweight is not None
        tile = _backward_tile(o.group_size, vector_of(*rows, *written), bytes_of(*rows), bytes_of(*written), facts)
        launch, groups, variant = _launch(
            kernels.gated_norm_backward_kernel, kernels.BackwardPointers, b, o, tile, STAGES=tile.stages, WANTED=(sums,)
        )
        most = max(1, facts.multiprocessors * tile.programs_per_sm // groups)
        finish = finishing(b.x.device, N, int(sums), most)

        def run(b):
            dy, x, z, weight = b
            dx, dz, dweight = gradients = self.gradients(b, o, wanted)
            M, inner = dy.numel() // N, _inner(x, z)
            if M == 0:
                return kit.zeroed(gradients)
            tiles = -(-M // tile.rows)
            programs = min(tiles, most)
            partials = dy.new_empty(programs * N, dtype=torch.float32) if sums else None
            (x, z), apart = kit.placed((x, z), inner)
            tensors = (dy, x, z, weight, dx, dz, partials)
            launch(programs * groups, tensors, M, o.eps, inner, *apart, tiles, variant)
            if sums:
                finish(programs, (partials, dweight, *[None] * 5))
            return gradients

        return run


gated_norm = GatedNorm()


def _backward_tile(n: int, vector: int, row_bytes: int, written_bytes: int, facts: Device) -> Tile:
    """That of a norm with a branch, whose second x̂ takes as many registers as the gate; with two tiles ahead, as one takes
    a third more time (4096 columns, H100), and at most 24 columns in a thread."""
    work = Work(vector, row_bytes, 2, written_bytes=written_bytes, splittable=False, branch=True)
    tile = backward_tile(n, work, facts)
    ahead = 2 * tile.programs_per_sm * tile.rows * -(-n // tile.block_n) * tile.block_n * row_bytes
    if tile.looped or ahead + 4096 > facts.shared_memory:
        return tile
    return replace(tile, warps=tile.warps * (2 if n > 24 * 32 * tile.warps else 1), stages=max(3, tile.stages))


def _launch(kernel: Any, record: type, i: Any, o: Options, tile: Tile, **more: Any) -> tuple[kit.Launcher, int, Any]:
    """For Inputs or Backward: what starts the kernel, how many groups there are, the variant."""
    early, groups = kit.device_facts(i.x.device).since_sm_90, i.x.shape[-1] // o.group_size
    _, two_levels, x_step, z_step = gated_norm.width(i)  # in steps: these divide the distances between rows
    variant = kit.kernels("gated").GatedVariant(
        o.group_size, groups, o.norm_before_gate, o.activation == Gate.sigmoid, float(o.zero_centered_weight), tile.rows,
        tile.block_n, vector_of(i.x, i.z, o.out_dtype), x_step, z_step, two_levels, tile.looped, EARLY_START=early,
        AGAIN=tile.warps > 8 and not tile.looped, **more,
    )  # fmt: skip
    return kit.Launcher(kernel, record, i.x.device, ("x", "z"), early=True, num_warps=tile.warps), groups, variant


def _inner(x: Tensor, z: Tensor) -> int:
    """How many rows lie at the inner of two distances."""
    flat = x.dim() < 3 or x.numel() == 0 or (kit.distances(x, 1)[0] and kit.distances(z, 1)[0])
    return 1 if flat else x.shape[-2]
