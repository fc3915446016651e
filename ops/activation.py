"""The activation of an MLP: the bias of the linear layer before it, the function, and of a gated one the product."""

from enum import IntEnum
from math import gcd, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import checks, kit
from .kernels import runs_kernels
from .torch_state import transformed_by_func


class Activation(IntEnum):
    gelu = 0  # z Φ(z) (arXiv:1606.08415)
    gelu_tanh = 1  # its approximation with tanh, as in GPT-2
    silu = 2  # z σ(z), also called swish
    relu2 = 3  # max(z, 0)² (arXiv:2109.08668)


_ACTIVATIONS = {kind.name: kind for kind in Activation}  # Dynamo of PyTorch 2.11 doesn't look into an Enum


def activation_fn(x: Tensor, bias: Tensor | None = None, activation: str = "gelu_tanh") -> Tensor:
    """φ(x + bias), computed in fp32 and rounded once. Backward computes it again: nothing is kept but x and the bias.

    Args:
        x: (..., N) in bf16, fp16 or fp32, or fp64, which PyTorch's operations compute. Read as it lies in memory where its rows
            lie at one distance, as those of a slice of columns do.
        bias: (N,), of any of these dtypes: of the linear layer before, which then has none. Its gradient is summed up in fp32
            and in a fixed order, by the kernel that computes x's.
        activation: "gelu", "gelu_tanh", "silu" or "relu2".

    Returns:
        x's shape and dtype, contiguous.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a shape, dtype, device or activation that is not as above.
    """
    return _activation("activation_fn", x, None, bias, None, activation, gated=False)


def gated_activation_fn(
    x: Tensor,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """φ(gate + bias) · (value + value_bias), as in SwiGLU and GEGLU (arXiv:2002.05202); else as `activation_fn`.

    Args:
        x: the gate (..., N), or with value=None gate and value side by side, (..., 2N). Its gradient then is one tensor too.
        value: the shape of x.
        bias: of x's last dimension.
        value_bias: (N,), with value only.
        activation: "gelu", "gelu_tanh", "silu" or "relu2".

    Returns:
        (..., N) in x's dtype.
    """
    return _activation("gated_activation_fn", x, value, bias, value_bias, activation, gated=True)


def _activation(name: str, x: Any, value: Any, bias: Any, value_bias: Any, activation: str, gated: bool) -> Tensor:
    checks.check_input(name, x, checks.REFERENCE_DTYPES)
    kernels = runs_kernels(x.device) and x.dtype != torch.float64 and not transformed_by_func()
    dtypes = checks.KERNEL_DTYPES if kernels else checks.REFERENCE_DTYPES
    if gated and value is None:  # x holds gate and value
        if x.shape[-1] % 2:
            raise ValueError(f"{name}: without value, x is gate and value side by side; it has an odd {x.shape[-1]} columns")
        if value_bias is not None:
            raise ValueError(f"{name}: value_bias is for a value of its own; without value, bias is that of all columns of x")
    checks.check_operands(name, x, dtypes, (x.shape,), checks.SHAPE_OF_X, value=value)
    checks.check_operands(name, x, dtypes, (x.shape[-1:],), checks.LAST_OF_X, bias=bias, value_bias=value_bias)
    kind = _ACTIVATIONS.get(activation) if isinstance(activation, str) else None
    if kind is None:
        raise ValueError(f"{name}: activation is {activation!r}, accepted: {', '.join(_ACTIVATIONS)}")
    if not kernels:
        return reference(x, value, bias, value_bias, kind, gated)
    return mlp_activation(Inputs(x, value, bias, value_bias), Options(kind, gated))[0]


def reference(
    x: Tensor, value: Tensor | None, bias: Tensor | None, value_bias: Tensor | None, kind: Activation, gated: bool
) -> Tensor:
    """The same in PyTorch's own operations, in fp32, or in fp64 where one is fp64."""
    dtype, wide = x.dtype, torch.float32
    for t in (x, value, bias, value_bias):
        wide = wide if t is None else torch.promote_types(wide, t.dtype)
    z = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    factor = None if value is None else value.to(wide) if value_bias is None else value.to(wide) + value_bias.to(wide)
    if gated and factor is None:
        z, factor = z.chunk(2, -1)
    if kind == Activation.relu2:
        y = F.relu(z).square()
    elif kind == Activation.silu:
        y = F.silu(z)
    else:
        y = F.gelu(z, approximate="tanh" if kind == Activation.gelu_tanh else "none")
    return (y if factor is None else y * factor).to(dtype)


# ---- operator ----------------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    x: Tensor  # (..., N), or (..., 2N): gate and value
    value: Tensor | None
    bias: Tensor | None  # of x's last dimension
    value_bias: Tensor | None


class Options(NamedTuple):
    activation: Activation
    gated: bool


class Outputs(NamedTuple):
    y: Tensor  # (..., N)


class Backward(NamedTuple):
    dy: Tensor
    x: Tensor
    value: Tensor | None
    bias: Tensor | None
    value_bias: Tensor | None


class MlpActivation(kit.Op):
    name, Inputs, Options, Outputs, Backward = "activation", Inputs, Options, Outputs, Backward

    def function(self, given, o):
        return "gated_activation_fn" if o.gated else "activation_fn"

    def width(self, tensors):
        x, value, _, _ = tensors[-4:]  # the inputs, with which Backward ends
        return x.shape[-1], _step(x), value is None or _step(value)

    def outputs(self, i, o):
        return Outputs(i.x.new_empty((*i.x.shape[:-1], _columns(i, o))))

    def gradients(self, b, o, wanted):
        return self.Gradients(*[dtype and t.new_empty(t.shape, dtype=dtype) for t, dtype in zip(b[1:], wanted, strict=True)])

    def start(self, i, o):
        kernels, N = kit.kernels("activation"), _columns(i, o)
        variant, blocks = _variant(i, o, N, max(t.itemsize for t in i[:2] if t is not None))
        launch = kit.Launcher(kernels.activation_kernel, kernels.Pointers, i.x.device, strided=("x", "value"), num_warps=WARPS)
        tile_rows, steps = _plain(variant.ROWS), _steps(variant)

        def run(i):
            x, value, bias, value_bias = i
            y = x.new_empty((*x.shape[:-1], N))
            M = y.numel() // N
            (x, value), numbers = steps(x, value)
            launch(-(-M // tile_rows) * blocks, (x, value, bias, value_bias, y), M, *numbers, variant)
            return (y,)

        return run

    def start_backward(self, b, o, wanted):
        kernels, N, device = kit.kernels("activation"), b.dy.shape[-1], b.dy.device
        packed = o.gated and b.value is None
        sums = (wanted.dbias is not None, (wanted.dbias if packed else wanted.dvalue_bias) is not None)
        itemsize = max(t.itemsize for t in b[:3] if t is not None)
        variant, blocks = _variant(Inputs(*b[1:]), o, N, itemsize, WANTED=sums)
        launch = kit.Launcher(
            kernels.activation_backward_kernel, kernels.BackwardPointers, device, strided=("x", "value"), num_warps=WARPS,
            maxnreg=MOST_REGISTERS if any(sums) else None,
        )  # fmt: skip
        most_groups = max(1, kit.device_facts(device).multiprocessors * PROGRAMS // blocks)
        tile_rows, steps = _plain(variant.ROWS), _steps(variant)

        def run(b):
            dy, x, value, bias, value_bias = b
            dx = wanted.dx and x.new_empty(x.shape, dtype=wanted.dx)
            dvalue = wanted.dvalue and value.new_empty(value.shape, dtype=wanted.dvalue)
            M = dy.numel() // N
            tiles = -(-M // tile_rows)
            groups = min(tiles, most_groups) if any(sums) else tiles
            partials = dy.new_empty((groups, sum(sums), N), dtype=torch.float32) if any(sums) else None
            (x, value), numbers = steps(x, value)
            tensors = (dy, x, value, bias, value_bias, dx, dvalue, partials)
            launch(groups * blocks, tensors, M, *numbers, tiles, groups, variant)
            if partials is None:
                return dx, dvalue, None, None
            totals = partials.sum(0)  # of all rows; without any, zeros
            dbias = wanted.dbias and (totals.flatten() if packed else totals[0]).to(wanted.dbias)
            return dx, dvalue, dbias, wanted.dvalue_bias and totals[-1].to(wanted.dvalue_bias)

        return run


mlp_activation = MlpActivation()

# ---- launch ------------------------------------------------------------------------------------------------------------------

WARPS = 4
TILE = 2  # vectors of a tensor in a thread
# Of a backward that sums up, on each multiprocessor, where all must find registers at once: what comes later is as long again.
PROGRAMS = 4
MOST_REGISTERS = 128


def _variant(i: Inputs, o: Options, N: int, itemsize: int, **more: Any) -> tuple[Any, int]:
    """itemsize: of the widest tensor; with the variant, how many blocks of columns there are."""
    vector = 16 // itemsize
    block_n = min(1024, max(16, 1 << (N - 1).bit_length()))
    while block_n > 128 and -(-N // block_n) * block_n > 1.1 * N:  # columns of a tile that are not there
        block_n //= 2
    sums = any(more.get("WANTED", ()))
    tile = 2 * TILE if sums and not o.gated else TILE
    rows = max(1, 32 * WARPS * tile * vector // block_n)
    steps = (_step(i.x), 1 if i.value is None else _step(i.value))
    packed = o.gated and i.value is None
    variant = kit.kernels("activation").ActivationVariant(
        N, int(o.activation), o.gated, packed, rows, block_n, vector, *steps, **more
    )
    return variant, -(-N // block_n)


def _columns(i: Any, o: Options) -> int:
    """Of y."""
    return i.x.shape[-1] // (2 if o.gated and i.value is None else 1)


def _as_it_lies(t: Tensor) -> Tensor | None:
    """[M, N] without a copy; None where its rows do not lie at one distance."""
    N = t.shape[-1]
    if N > 1 and t.stride(-1) != 1:
        return None
    try:
        return t.view(prod(t.shape[:-1]), N)
    except RuntimeError:
        return None


def _rows(t: Tensor) -> Tensor:
    found = _as_it_lies(t)
    return checks.as_rows(t.contiguous()) if found is None else found


def _step(t: Tensor) -> int:
    """So many elements, or a multiple, are from a row to the next; of a few that decide how the compiler reads them."""
    found = None if t.is_contiguous() else _as_it_lies(t)
    return gcd(t.shape[-1] if found is None else found.stride(0), 8)


def _steps(variant: Any) -> Any:
    """A function of x and value: both as rows, and how many steps are between those."""
    x_step, value_step = _plain(variant.X_STEP), _plain(variant.VALUE_STEP)

    def steps(x: Tensor, value: Tensor | None) -> tuple[tuple[Tensor, Tensor | None], tuple[int, int]]:
        x, value = _rows(x), None if value is None else _rows(value)
        return (x, value), (x.stride(0) // x_step, 0 if value is None else value.stride(0) // value_step)

    return steps


def _plain(constant: Any) -> int:
    return getattr(constant, "value", constant)
