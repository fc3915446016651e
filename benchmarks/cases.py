"""The norm cases that are measured: their tensors, and the fewest bytes that each must move."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ops import Norm

FORWARD, BACKWARD = DIRECTIONS = ("forward", "backward")
BOTH = "both"  # the direction of what does forward and backward in one call
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
X_DTYPE, EPS, DROPOUT_P = torch.bfloat16, 1e-5, 0.1  # of all norm cases; x, y and their gradients have this dtype

MODEL_WIDTHS = {  # of whose hidden state
    1152: "Gemma 3 1B", 1536: "Qwen2.5 1.5B", 2304: "Gemma 2 2B", 2560: "Qwen3 4B", 2880: "gpt-oss", 3072: "Llama 3.2 3B",
    3584: "Qwen2.5 7B", 4608: "Gemma 2 27B", 5120: "Qwen3 32B", 5376: "Gemma 3 27B", 6144: "Mixtral 8x22B",
    7168: "DeepSeek-V3", 8192: "Llama 3 70B", 14336: "BLOOM 176B",
}  # fmt: skip

# Above it, fewer rows: what six libraries keep for backward, on two sets of inputs with a stream in fp32, fits 80 GB.
MOST_ELEMENTS = 2**28


@dataclass(frozen=True)
class TensorSet:
    """What a function is called with, and a gradient for each of its outputs."""

    args: tuple[Tensor | None, ...]
    upstream: tuple[Tensor, ...]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The arguments that get gradients."""
        return tuple(t for t in self.args if t is not None and t.requires_grad)


Function = Callable[..., tuple[Tensor, ...]]  # of `args`


def drawn(
    draw: Callable[[Callable[..., Tensor]], tuple[Sequence[Tensor | None], Sequence[Tensor]]], sets: int, device: torch.device
) -> list[TensorSet]:
    """So many sets of random tensors. Those arguments that are no integers get gradients.

    draw: given a function like torch.randn, of bf16 by default, the arguments, and a gradient for each output.
    """
    # not PyTorch's own generator: a capture that failed in the cell before leaves it unusable
    generator = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, device=device, dtype=X_DTYPE, generator=generator)
    found = []
    for _ in range(sets):
        args, upstream = draw(normal)
        leaves = [t if t is None else t.detach().requires_grad_(t.is_floating_point()) for t in args]
        found.append(TensorSet(tuple(leaves), tuple(upstream)))
    return found


@dataclass(frozen=True)
class Case:
    """y = N(x), or prenorm: r = residual + dropout(B(x)), y = N(r), both returned, or r alone where y is the same."""

    name: str
    label: str
    norm: Norm
    add: bool = True
    dropout: bool = False
    branch: Norm = Norm.none

    @property
    def plain(self) -> bool:
        """Whether it is one of the norms that other libraries have."""
        return self.branch == Norm.none and self.norm in (Norm.layernorm, Norm.rmsnorm)


_NORMS = (
    Case("ln", "LN", Norm.layernorm, add=False),
    Case("rms", "RMS", Norm.rmsnorm, add=False),
    Case("add_ln", "add+LN", Norm.layernorm),
    Case("add_rms", "add+RMS", Norm.rmsnorm),
    Case("dropout_add_ln", "dropout+add+LN", Norm.layernorm, dropout=True),
    Case("dropout_add_rms", "dropout+add+RMS", Norm.rmsnorm, dropout=True),
)
_SITES = (
    Case("norm_add_norm", "norm+add+norm", Norm.rmsnorm, branch=Norm.rmsnorm),
    Case("norm_add", "norm+add", Norm.none, branch=Norm.rmsnorm),
    Case("dropout_norm_add", "norm+dropout+add", Norm.none, dropout=True, branch=Norm.rmsnorm),
    Case("ln_add_ln", "LN+add+LN", Norm.layernorm, branch=Norm.layernorm),
    Case("add_dyt", "add+DyT", Norm.dyt),
    Case("add_derf", "add+Derf", Norm.derf),
)
CASES, SITES = ({case.name: case for case in of} for of in (_NORMS, _SITES))


@dataclass(frozen=True)
class Shape:
    """A case with its dtypes and sizes. Both directions share its inputs and compiled functions."""

    case: Case
    residual: str | None  # dtype of the residual stream; None where the case has none
    weights: str  # their dtype
    rows: int
    width: int

    @property
    def y_is_r(self) -> bool:
        return self.case.norm == Norm.none and self.residual is not None and DTYPES[self.residual] == X_DTYPE


def make_inputs(shape: Shape, sets: int, device: torch.device) -> list[TensorSet]:
    """`sets` sets of random tensors.

    The arguments are x, residual [rows, width]; weight, bias [width] and learned scalars of the norm, then those of the branch.
    Gradients come for y, unless it is r, and then for r.
    """
    case, size = shape.case, (shape.rows, shape.width)

    def draw(normal: Callable[..., Tensor]) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
        def parameters(norm: Norm) -> tuple[Tensor | None, ...]:
            """Near 1 and 0, as in training; exact ones and zeros would hide a forgotten weight from the check of results."""
            if norm == Norm.none:
                return None, None, None
            weight = 1 + 0.1 * normal(shape.width, dtype=torch.float32)
            bias = None if norm == Norm.rmsnorm else 0.1 * normal(shape.width, dtype=torch.float32)
            scalars = 0.5 + 0.1 * normal(norm.scalars, dtype=torch.float32) if norm.scalars else None
            return tuple(None if t is None else t.to(DTYPES[shape.weights]) for t in (weight, bias, scalars))

        learned, x, dy = (*parameters(case.norm), *parameters(case.branch)), normal(*size), normal(*size)
        if shape.residual is None:
            return (x, None, *learned), (dy,)
        # Smaller than x, so that the check sees what was dropped: beside a large residual, x is often rounded away.
        residual, dr = (normal(*size, dtype=DTYPES[shape.residual]) for _ in range(2))
        return (x, residual.div_(16), *learned), (dr,) if shape.y_is_r else (dy, dr)

    return drawn(draw, sets, device)


def minimum_bytes(shape: Shape, direction: str) -> int:
    """What any implementation must read and write, each large tensor once.

        forward    x → y                           and with a residual stream: x, residual → y, r; y not where it is r
        backward   dy, r → dx                      without a residual stream (r is x)
                   dy, d residual_out → d residual  with one; it reads r where it has a norm, and x where the branch has one;
                                                   dx is the same tensor as d residual where the dtypes are equal, nothing is
                                                   dropped and the branch has no norm, otherwise one more; where y is r,
                                                   d residual is the one upstream gradient itself

    Weights, their gradients, statistics and dropout masks are not counted: a perfect kernel needs next to nothing for them.
    """
    case, elements, x = shape.case, shape.rows * shape.width, X_DTYPE.itemsize
    if shape.residual is None:
        return elements * x * (2 if direction == FORWARD else 3)
    stream, y = DTYPES[shape.residual].itemsize, 0 if shape.y_is_r else x
    if direction == FORWARD:
        return elements * (x + stream + y + stream)
    r = stream if case.norm != Norm.none else 0
    of_branch = x if case.branch != Norm.none else 0
    d_residual = stream if y else 0
    separate_dx = x if case.dropout or of_branch or stream != x else 0
    return elements * (y + stream + r + of_branch + d_residual + separate_dx)
