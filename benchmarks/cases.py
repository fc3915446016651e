"""What is measured: the norm cases, their tensors, and the fewest bytes that each must move."""

from dataclasses import dataclass

import torch
from torch import Tensor

FORWARD, BACKWARD = DIRECTIONS = ("forward", "backward")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Widest problem, in elements: above it, fewer rows. At 2^29 one bf16 tensor is 1 GiB, and the tensors that seven libraries
# keep for backward, on two sets of inputs, still fit 140 GB.
MAX_ELEMENTS = 2**29


@dataclass(frozen=True)
class Case:
    """y = norm(x), or prenorm: r = residual + dropout(x), y = norm(r), both returned."""

    name: str
    label: str
    rms: bool
    add: bool
    dropout: bool


CASES = {
    case.name: case
    for case in (
        Case("ln", "LN", rms=False, add=False, dropout=False),
        Case("rms", "RMS", rms=True, add=False, dropout=False),
        Case("add_ln", "add+LN", rms=False, add=True, dropout=False),
        Case("add_rms", "add+RMS", rms=True, add=True, dropout=False),
        Case("dropout_add_ln", "dropout+add+LN", rms=False, add=True, dropout=True),
        Case("dropout_add_rms", "dropout+add+RMS", rms=True, add=True, dropout=True),
    )
}


@dataclass(frozen=True)
class Setting:
    """What is the same for all contenders of a cell."""

    x_dtype: torch.dtype = torch.bfloat16  # of x, y and their gradients
    residual_dtype: torch.dtype | None = None  # of the residual stream; None where the case has none
    weight_dtype: torch.dtype = torch.bfloat16
    dropout_p: float = 0.1  # in cases with dropout
    eps: float = 1e-5


@dataclass(frozen=True)
class Inputs:
    """One set of tensors, [rows, width] but for the weights."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None  # LayerNorm only
    dy: Tensor
    dr: Tensor | None  # upstream gradient of the new residual stream
    seed: Tensor  # one int64: for the contender that is handed its dropout seed, as a model hands it out

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What backward gives gradients of, in the order x, residual, weight, bias."""
        return tuple(t for t in (self.x, self.residual, self.weight, self.bias) if t is not None)

    @property
    def upstream(self) -> tuple[Tensor, ...]:
        return (self.dy,) if self.dr is None else (self.dy, self.dr)


def capped_rows(rows: int, width: int, most: int = MAX_ELEMENTS) -> int:
    """Fewer rows where `rows` × `width` would be more than `most`."""
    return max(1, min(rows, most // width))


def make_inputs(
    case: Case, setting: Setting, rows: int, width: int, sets: int, device: torch.device, seed: int = 0
) -> list[Inputs]:
    """`sets` sets of random tensors; the weights, which are small, are the same in all of them."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    # Near 1 and 0, as in training; exact ones and zeros would hide a forgotten weight from the check of results.
    weight = (1 + 0.1 * normal((width,), torch.float32)).to(setting.weight_dtype).requires_grad_()
    bias = None if case.rms else (0.1 * normal((width,), torch.float32)).to(setting.weight_dtype).requires_grad_()
    shape = (rows, width)
    residual_dtype = setting.residual_dtype if case.add else None
    return [
        Inputs(
            x=normal(shape, setting.x_dtype).requires_grad_(),
            residual=None if residual_dtype is None else normal(shape, residual_dtype).requires_grad_(),
            weight=weight,
            bias=bias,
            dy=normal(shape, setting.x_dtype),
            dr=None if residual_dtype is None else normal(shape, residual_dtype),
            seed=torch.full((1,), seed + index, dtype=torch.int64, device=device),
        )
        for index in range(sets)
    ]


def minimum_bytes(
    case: Case, direction: str, rows: int, width: int, x_bytes: int = 2, residual_bytes: int | None = None
) -> int:
    """Bytes that any implementation must move: each large tensor read once or written once.

        forward    x, y                            and with a residual stream: residual, r
        backward   dy, r, dx                       without a residual stream (r is x)
                   dy, r, d residual_out, d residual   with one; dx is the same tensor as d residual where the dtypes are
                                                   equal and nothing is dropped, otherwise one more

    x, y, dy and dx take `x_bytes` an element; residual, r and their gradients `residual_bytes`. Weights, their gradients,
    statistics and dropout masks are not counted: a perfect kernel needs next to nothing for them.
    """
    if residual_bytes is None:
        residual_bytes = x_bytes
    if direction == FORWARD:
        per_element = 2 * x_bytes + (2 * residual_bytes if case.add else 0)
    elif not case.add:
        per_element = 3 * x_bytes
    else:
        separate_dx = case.dropout or residual_bytes != x_bytes
        per_element = x_bytes + 3 * residual_bytes + (x_bytes if separate_dx else 0)
    return rows * width * per_element
