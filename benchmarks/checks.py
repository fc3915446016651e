"""Whether a contender computed what it is timed for: its first rows against float64."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case, Inputs, Setting

ROWS = 64  # compared; the reference of a whole problem would not fit beside it
# ‖out − reference‖ / ‖reference‖. Rounding to bf16 gives 2e-3, twice for libraries that round between add and norm; a wrong
# mean, a forgotten weight or a missing gradient gives 1e-1 and more.
TOLERANCE = 2e-2


class WrongResult(ValueError):
    """The contender is fast at something else."""


def check_forward(case: Case, setting: Setting, inputs: Inputs, outputs: tuple[Tensor, ...]) -> Tensor | None:
    """Raises WrongResult, or returns what dropout multiplied x by, [ROWS, width] (None without a residual stream)."""
    expected = 2 if case.add else 1
    if len(outputs) != expected:
        raise WrongResult(f"{len(outputs)} outputs, expected {expected}")
    _same("y", outputs[0], inputs.x)
    if not case.add:
        _near("y", outputs[0], _norm(case, setting, inputs, inputs.x[:ROWS].double()))
        return None

    assert inputs.residual is not None
    _same("residual stream", outputs[1], inputs.residual)
    x, residual, r = (t.detach()[:ROWS].double() for t in (inputs.x, inputs.residual, outputs[1]))
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
    _near("residual stream", r, residual + factor.nan_to_num(0) * x)
    _near("y", outputs[0], _norm(case, setting, inputs, r))
    return factor


def check_backward(
    case: Case,
    setting: Setting,
    inputs: Inputs,
    outputs: tuple[Tensor, ...],
    gradients: tuple[Tensor | None, ...],
    factor: Tensor | None,
) -> None:
    """Raises WrongResult. The gradients of x and the residual are compared, of the weights only that they are finite."""
    for leaf, gradient in zip(inputs.leaves, gradients, strict=True):
        if gradient is None or gradient.shape != leaf.shape or not gradient[:ROWS].isfinite().all():
            raise WrongResult(f"the gradient of an input of shape {tuple(leaf.shape)} is missing, misshapen or not finite")
    r = (outputs[1] if case.add else inputs.x).detach()[:ROWS].double().requires_grad_()
    (dz,) = torch.autograd.grad(_norm(case, setting, inputs, r), r, inputs.dy[:ROWS].double())
    if inputs.dr is not None:
        dz = dz + inputs.dr[:ROWS].double()
        _near("gradient of the residual", gradients[1], dz)
    dx = gradients[0]
    if factor is not None and dx is not None:
        scale = 1 / (1 - setting.dropout_p)
        dz = dz * torch.where(factor.isnan(), (dx[:ROWS] != 0) * scale, factor)
    _near("gradient of x", dx, dz)


def _norm(case: Case, setting: Setting, inputs: Inputs, r: Tensor) -> Tensor:
    weight = inputs.weight.detach().double()
    if case.rms or inputs.bias is None:
        return F.rms_norm(r, weight.shape, weight, setting.eps)
    return F.layer_norm(r, weight.shape, weight, inputs.bias.detach().double(), setting.eps)


def _same(name: str, out: Tensor, like: Tensor) -> None:
    if out.shape != like.shape or out.dtype != like.dtype:
        raise WrongResult(f"{name} is {out.dtype} {tuple(out.shape)}, expected {like.dtype} {tuple(like.shape)}")


def _near(name: str, out: Tensor | None, reference: Tensor) -> None:
    assert out is not None
    reference = reference.detach()
    error = ((out.detach()[:ROWS].double() - reference).norm() / reference.norm()).item()
    if not error <= TOLERANCE:
        raise WrongResult(f"{name} is off by {error:.1e} of its norm, at most {TOLERANCE:.0e} is rounding")
