"""The activation of a gated MLP and its product with the value, as in SwiGLU and GEGLU."""

from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import checks, kit


class Activation(IntEnum):
    gelu = 0  # z Φ(z) (arXiv:1606.08415)
    gelu_tanh = 1  # its approximation with tanh
    silu = 2  # z σ(z), also called swish


_ACTIVATIONS = {kind.name: kind for kind in Activation}  # Dynamo of PyTorch 2.11 doesn't look into an Enum


def gated_activation_fn(x: Tensor, value: Tensor | None = None, activation: str = "silu") -> Tensor:
    """φ(gate) · value, as in SwiGLU and GEGLU (arXiv:2002.05202), computed in fp32 and rounded once.

    Backward computes it again: nothing is kept but the inputs.

    Args:
        x: the gate (..., N), or with value=None gate and value side by side, (..., 2N). Its gradient then is one tensor too. In
            bf16, fp16 or fp32, or fp64, which PyTorch's operations compute. Read as it lies in memory where its rows lie at one
            distance, as those of a slice of columns do.
        value: the shape of x, of any of these dtypes.
        activation: "gelu", "gelu_tanh" or "silu".

    Returns:
        (..., N) in x's dtype, contiguous.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a shape, dtype, device or activation that is not as above.
    """
    return gated_activation.checked(_check, reference, (x, value), (activation,))[0]


def _check(inputs: tuple, activation: Any) -> tuple[tuple, "Options", bool]:
    name, (x, value) = "gated_activation_fn", inputs
    kernels, dtypes = checks.check_input(name, x, takes_fp64=True)
    if value is None and x.shape[-1] % 2:
        raise ValueError(f"{name}: without value, x is gate and value side by side; it has an odd {x.shape[-1]} columns")
    checks.check_operands(name, x, dtypes, (x.shape,), checks.SHAPE_OF_X, value=value)
    return inputs, Options(checks.as_choice(name, "activation", activation, _ACTIVATIONS)), kernels


def reference(i: tuple[Tensor, Tensor | None], o: "Options") -> kit.Output:
    """The same in PyTorch's own operations, in fp32, or in fp64 where one is fp64."""
    x, value = i
    gate, value = x.chunk(2, -1) if value is None else (x, value)
    wide = torch.promote_types(torch.promote_types(gate.dtype, value.dtype), torch.float32)
    z = gate.to(wide)
    if o.activation == Activation.silu:
        phi = F.silu(z)
    else:
        phi = F.gelu(z, approximate="tanh" if o.activation == Activation.gelu_tanh else "none")
    return kit.Output((phi * value.to(wide)).to(x.dtype))


# ---- operator ----------------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    x: Tensor  # (..., N), or (..., 2N): gate and value
    value: Tensor | None


class Options(NamedTuple):
    activation: Activation


class GatedActivation(kit.Op):
    name, Inputs, Options = "gated_activation", Inputs, Options

    def width(self, tensors):
        i = tensors[-2:]  # the inputs, with which Backward ends
        return i[0].shape[-1], *kit.steps(i)

    def outputs(self, i, o):
        return kit.Output(i[0].new_empty((*i[0].shape[:-1], _columns(i))))

    def start(self, i, o):
        kernels = kit.kernels("activation")
        return _run(kernels.gated_activation_kernel, kernels.Pointers, i, o, partial(self.outputs, o=o))

    def start_backward(self, b, o, wanted):
        kernels, allocated = kit.kernels("activation"), partial(self.gradients, o=o, wanted=wanted)
        return _run(kernels.gated_activation_backward_kernel, kernels.BackwardPointers, b[1:], o, allocated)


gated_activation = GatedActivation()

# ---- launch ------------------------------------------------------------------------------------------------------------------

WARPS = 4
TILE = 2  # vectors of a tensor in a thread


def _run(kernel: Any, record: type, i: Any, o: Options, allocated: Callable[[tuple], tuple]) -> kit.Run:
    """Of tensors that end with the inputs; `allocated` returns those that the kernel writes."""
    N, vector, width = _columns(i), 16 // max(t.itemsize for t in i if t is not None), i[0].shape[-1]
    block_n = min(1024, max(16, 1 << (N - 1).bit_length()))
    while block_n > 128 and -(-N // block_n) * block_n > 1.1 * N:  # columns of a tile that are not there
        block_n //= 2
    rows, blocks = max(1, 32 * WARPS * TILE * vector // block_n), -(-N // block_n)
    how = (int(o.activation), i[1] is None, rows, block_n, vector, *kit.steps(i))
    variant = kit.kernels("activation").ActivationVariant(N, *how)
    launch = kit.Launcher(kernel, record, i[0].device, strided=("x", "value"), num_warps=WARPS)

    def run(tensors: tuple) -> tuple:
        *before, x, value = tensors
        found, M = allocated(tensors), x.numel() // width
        (x, value), numbers = kit.placed((x, value))
        launch(-(-M // rows) * blocks, (*before, x, value, *found), M, *numbers[::2], variant)
        return found

    return run


def _columns(i: Any) -> int:
    """Of y."""
    return i[0].shape[-1] // (2 if i[1] is None else 1)
