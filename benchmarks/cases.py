"""What is measured: the norm cases, their tensors, the fewest bytes that each must move, and the check of results."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ops import Norm
from ops.reference import NORMS

FORWARD, BACKWARD = DIRECTIONS = ("forward", "backward")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

MODEL_WIDTHS = {  # of whose hidden state
    1152: "Gemma 3 1B", 1536: "Qwen2.5 1.5B", 2304: "Gemma 2 2B", 2560: "Qwen3 4B", 2880: "gpt-oss", 3072: "Llama 3.2 3B",
    3584: "Qwen2.5 7B", 4608: "Gemma 2 27B", 5120: "Qwen3 32B", 5376: "Gemma 3 27B", 6144: "Mixtral 8x22B",
    7168: "DeepSeek-V3", 8192: "Llama 3 70B", 14336: "BLOOM 176B",
}  # fmt: skip

# Widest problem, in elements: above it, fewer rows. At 2^29 one bf16 tensor is 1 GiB, and the tensors that seven libraries
# keep for backward, on two sets of inputs, still fit 140 GB.
MAX_ELEMENTS = 2**29


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
    def rms(self) -> bool:
        return self.norm == Norm.rmsnorm

    @property
    def plain(self) -> bool:
        """Whether it is one of the norms that other libraries have."""
        return self.branch == Norm.none and self.norm in (Norm.layernorm, Norm.rmsnorm)


def _by_name(*cases: Case) -> dict[str, Case]:
    return {case.name: case for case in cases}


CASES = _by_name(
    Case("ln", "LN", Norm.layernorm, add=False),
    Case("rms", "RMS", Norm.rmsnorm, add=False),
    Case("add_ln", "add+LN", Norm.layernorm),
    Case("add_rms", "add+RMS", Norm.rmsnorm),
    Case("dropout_add_ln", "dropout+add+LN", Norm.layernorm, dropout=True),
    Case("dropout_add_rms", "dropout+add+RMS", Norm.rmsnorm, dropout=True),
)
SITES = _by_name(
    Case("norm_add_norm", "norm+add+norm", Norm.rmsnorm, branch=Norm.rmsnorm),
    Case("norm_add", "norm+add", Norm.none, branch=Norm.rmsnorm),
    Case("dropout_norm_add", "norm+dropout+add", Norm.none, dropout=True, branch=Norm.rmsnorm),
    Case("ln_add_ln", "LN+add+LN", Norm.layernorm, branch=Norm.layernorm),
    Case("add_dyt", "add+DyT", Norm.dyt),
    Case("add_derf", "add+Derf", Norm.derf),
)


@dataclass(frozen=True)
class Setting:
    """Settings that all contenders of a cell share."""

    x_dtype: torch.dtype = torch.bfloat16  # of x, y and their gradients
    residual_dtype: torch.dtype | None = None  # of the residual stream; None where the case has none
    weight_dtype: torch.dtype = torch.bfloat16
    dropout_p: float = 0.1  # in cases with dropout
    eps: float = 1e-5


Parameters = tuple[Tensor | None, Tensor | None, Tensor | None]  # of a norm: weight, bias [width], learned scalars


@dataclass(frozen=True)
class Inputs:
    """One set of tensors, [rows, width] but for the parameters."""

    x: Tensor
    residual: Tensor | None
    of_norm: Parameters
    of_branch: Parameters
    dy: Tensor | None  # None where y is r
    dr: Tensor | None  # upstream gradient of the new residual stream
    seed: Tensor  # one int64: for the contender that is handed its dropout seed, as a model hands it out

    @property
    def weight(self) -> Tensor | None:
        return self.of_norm[0]

    @property
    def bias(self) -> Tensor | None:
        return self.of_norm[1]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that get gradients, in the order x, residual, weight, bias, scalars, those of the branch."""
        return tuple(t for t in (self.x, self.residual, *self.of_norm, *self.of_branch) if t is not None)

    @property
    def upstream(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.dy, self.dr) if t is not None)


def y_is_r(case: Case, x_bytes: int, residual_bytes: int) -> bool:
    return case.norm == Norm.none and x_bytes == residual_bytes


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

    def parameters(norm: Norm) -> Parameters:
        """Near 1 and 0, as in training; exact ones and zeros would hide a forgotten weight from the check of results."""
        if norm == Norm.none:
            return None, None, None
        weight = 1 + 0.1 * normal((width,), torch.float32)
        bias = None if norm == Norm.rmsnorm else 0.1 * normal((width,), torch.float32)
        scalars = 0.5 + 0.1 * normal((norm.scalars,), torch.float32) if norm.scalars else None
        w, b, s = (None if t is None else t.to(setting.weight_dtype).requires_grad_() for t in (weight, bias, scalars))
        return w, b, s

    of_norm, of_branch, shape = parameters(case.norm), parameters(case.branch), (rows, width)
    residual_dtype = setting.residual_dtype if case.add else None
    same = residual_dtype is not None and y_is_r(case, setting.x_dtype.itemsize, residual_dtype.itemsize)
    return [
        Inputs(
            x=normal(shape, setting.x_dtype).requires_grad_(),
            residual=None if residual_dtype is None else normal(shape, residual_dtype).requires_grad_(),
            of_norm=of_norm,
            of_branch=of_branch,
            dy=None if same else normal(shape, setting.x_dtype),
            dr=None if residual_dtype is None else normal(shape, residual_dtype),
            seed=torch.full((1,), seed + index, dtype=torch.int64, device=device),
        )
        for index in range(sets)
    ]


def minimum_bytes(
    case: Case, direction: str, rows: int, width: int, x_bytes: int = 2, residual_bytes: int | None = None
) -> int:
    """Bytes that any implementation must move: each large tensor read once or written once.

        forward    x, y                            and with a residual stream: residual, r; y not where it is r
        backward   dy, r, dx                       without a residual stream (r is x)
                   dy, d residual_out, d residual   with one; r where it has a norm, x where the branch has one; dx is the same
                                                   tensor as d residual where the dtypes are equal, nothing is dropped and
                                                   the branch has no norm, otherwise one more; where y is r, d residual is
                                                   the one upstream gradient itself

    x, y, dy and dx take `x_bytes` an element; residual, r and their gradients `residual_bytes`. Weights, their gradients,
    statistics and dropout masks are not counted: a perfect kernel needs next to nothing for them.
    """
    if not case.add:
        return rows * width * x_bytes * (2 if direction == FORWARD else 3)
    stream = x_bytes if residual_bytes is None else residual_bytes
    y, branch = 0 if y_is_r(case, x_bytes, stream) else x_bytes, case.branch != Norm.none
    if direction == FORWARD:
        return rows * width * (x_bytes + 2 * stream + y)
    separate_dx = case.dropout or branch or stream != x_bytes
    of_stream = 3 if case.norm != Norm.none else 2 if y else 1
    return rows * width * (y + stream * of_stream + x_bytes * (branch + separate_dx))


@dataclass(frozen=True)
class Shape:
    """A case with its dtypes and sizes. Both directions share its inputs and compiled functions."""

    case: Case
    residual: str | None  # names of dtypes
    weights: str
    rows: int
    width: int
    asked_rows: int  # before the cap on elements

    @property
    def setting(self) -> Setting:
        residual = DTYPES[self.residual] if self.residual else None
        return Setting(residual_dtype=residual, weight_dtype=DTYPES[self.weights])

    def __str__(self) -> str:
        stream = f" {self.residual} stream" if self.residual else ""
        return f"{self.case.name} {self.rows}×{self.width}{stream}, {self.weights} weights"


# ---- is the result right? ---------------------------------------------------------------------------------------------------


ROWS = 64  # compared; the reference of a whole problem would not fit beside it
# ‖out − reference‖ / ‖reference‖. Rounding to bf16 gives 2e-3, twice for libraries that round between add and norm; a wrong
# mean, a forgotten weight or a missing gradient gives 1e-1 and more.
TOLERANCE = 2e-2


class WrongResult(ValueError):
    """The contender is fast at something else."""


def check_forward(case: Case, setting: Setting, inputs: Inputs, outputs: tuple[Tensor, ...]) -> Tensor | None:
    """Returns the factor of dropout, [ROWS, width], or None without a residual stream. Raises WrongResult."""
    expected = len(inputs.upstream)
    if len(outputs) != expected:
        raise WrongResult(f"{len(outputs)} outputs, expected {expected}")
    if inputs.dy is not None:
        _same("y", outputs[0], inputs.x)
    if inputs.residual is None:
        near("y", outputs[0], _norm(case.norm, setting, inputs.of_norm, inputs.x.detach()[:ROWS].double()))
        return None

    _same("residual stream", outputs[-1], inputs.residual)
    x, residual, r = (t.detach()[:ROWS].double() for t in (inputs.x, inputs.residual, outputs[-1]))
    if case.branch != Norm.none:  # rounded to x's dtype by who computes it apart
        x = _norm(case.branch, setting, inputs.of_branch, x)
    factor = torch.ones_like(x)
    if case.dropout:
        scale = 1 / (1 - setting.dropout_p)
        # Beside a large residual a small x is rounded away, dropped or not: NaN for what forward can't tell.
        clear = scale * x.abs() > 2**-6 * residual.abs()
        kept = (r - residual).abs() > 0.5 * scale * x.abs()
        factor = torch.where(clear, kept.double() * scale, torch.nan)
        dropped, p = 1 - kept[clear].double().mean().item(), setting.dropout_p
        slack = 6 * (p * (1 - p) / kept.numel()) ** 0.5 + 0.01  # six standard deviations, and p in steps of 1/65536 or coarser
        if abs(dropped - p) > slack:
            raise WrongResult(f"{dropped:.3f} of x was dropped, expected {p} ± {slack:.3f}")
    near("residual stream", r, residual + factor.nan_to_num(0) * x)
    if inputs.dy is not None:
        near("y", outputs[0], _norm(case.norm, setting, inputs.of_norm, r))
    return factor


def check_backward(
    case: Case,
    setting: Setting,
    inputs: Inputs,
    outputs: tuple[Tensor, ...],
    gradients: tuple[Tensor | None, ...],
    factor: Tensor | None,
) -> None:
    """Compares the gradients of x and the residual; those of the parameters must be finite. Raises WrongResult."""
    for leaf, gradient in zip(inputs.leaves, gradients, strict=True):
        if gradient is None or gradient.shape != leaf.shape or not gradient[:ROWS].isfinite().all():
            raise WrongResult(f"the gradient of an input of shape {tuple(leaf.shape)} is missing, misshapen or not finite")
    dz = torch.zeros((), dtype=torch.float64, device=inputs.x.device)
    if inputs.dy is not None:
        r = (outputs[-1] if case.add else inputs.x).detach()[:ROWS].double().requires_grad_()
        y = _norm(case.norm, setting, inputs.of_norm, r)
        (dz,) = torch.autograd.grad(y, r, inputs.dy[:ROWS].double())
    if inputs.dr is not None:
        dz = dz + inputs.dr[:ROWS].double()
        near("gradient of the residual", gradients[1], dz)
    dx = gradients[0]
    if factor is not None and dx is not None:
        dz = dz * torch.where(factor.isnan(), (dx[:ROWS] != 0) / (1 - setting.dropout_p), factor)
    if case.branch != Norm.none:
        x = inputs.x.detach()[:ROWS].double().requires_grad_()
        (dz,) = torch.autograd.grad(_norm(case.branch, setting, inputs.of_branch, x), x, dz)
    if not case.dropout or case.branch == Norm.none:  # behind a norm, dx does not tell what forward could not
        near("gradient of x", dx, dz)


def _norm(norm: Norm, setting: Setting, parameters: Parameters, r: Tensor) -> Tensor:
    weight, bias, scalars = (None if t is None else t.detach().double() for t in parameters)
    return NORMS[norm](r, weight, bias, setting.eps, scalars)


def _same(name: str, out: Tensor, like: Tensor) -> None:
    if out.shape != like.shape or out.dtype != like.dtype:
        raise WrongResult(f"{name} is {out.dtype} {tuple(out.shape)}, expected {like.dtype} {tuple(like.shape)}")


def near(name: str, out: Tensor | None, reference: Tensor, tolerance: float = TOLERANCE) -> None:
    """Compares with a reference, which may be of the first rows alone. Raises WrongResult."""
    if out is None:
        raise WrongResult(f"{name} is missing")
    out, reference = out.detach(), reference.detach().double()
    out = out if out.shape == reference.shape else out[: len(reference)]
    error = ((out.double() - reference).norm() / reference.norm()).item()
    if not error <= tolerance:
        raise WrongResult(f"{name} is off by {error:.1e} of its norm, at most {tolerance:.0e} is rounding")
