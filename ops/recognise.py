"""Which norm a module computes, found by trying it: names and types prove nothing, and model code has hundreds of copies.

A clone with random weights is fed rows of many sizes, in fp32, and compared with the formulas in fp64:

    y = (x − mean(x)) / √(var(x) + eps) · (weight + offset) + bias        LayerNorm
    y =             x / √(mean(x²) + eps) · (weight + offset)             RMSNorm        offset: 0, or 1 as Gemma has it

eps follows from a row so small that it is all there is under the root. The module itself is not run and not changed.
"""

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn

from .backend import runs_kernels

# rms of the error of a row, relative. fp32 arithmetic is good to 3e-7; the unbiased variance is off by 1/2N, so more than this
# up to N = 160,000.
TOLERANCE = 3e-6
# The same in bf16, for modules that compute in it: eps written for one dtype is off by a factor in another.
BF16_TOLERANCE = 0.1
GRADIENT_TOLERANCE = 1e-3  # of a whole tensor: what is detached is missing, and more of it
_SIZES = (1.0, 30.0, 1e-3, 1e-5, 3.0, 0.1)  # of rows
_TINY = 1e-8
_CLASSES = re.compile(r"(?i:norm)|RMS|LN(?![a-z])")  # LlamaRMSNorm, RMS, LN, FusedLN2d
_NAMES = re.compile(r"(?i:norms?_?\d*$)|(^|_)rms|(^|_)ln(?![a-z])|^lnf?\d*$")  # norm1, input_layernorm, ln_f, final_ln
_FEATURES = (24, 40)  # tried on norms without weights, which take any width
_FP32: Any = {"dtype": torch.float32, "device": "cpu"}  # what is fed, whatever torch's defaults have been set to


@dataclass(frozen=True)
class Formula:
    """A norm over the last dimension."""

    is_rms_norm: bool
    eps: float | None  # None: as in torch.nn.RMSNorm(eps=None), the epsilon of the dtype it computes in
    zero_centered_weight: bool
    weight: str | None  # names of the module's parameters
    bias: str | None
    width: int | None  # None: any, there are no weights
    out_dtype: str  # a key of OUT_DTYPES
    argument: str  # what forward calls its input

    def __str__(self) -> str:
        words = "RMSNorm" if self.is_rms_norm else "LayerNorm"
        eps = "the dtype's" if self.eps is None else f"{self.eps:g}"
        return f"{words}{' with weight 1 + w' if self.zero_centered_weight else ''}, eps {eps}"


# What the dtype of the output follows from, where x and the weight have different ones: x is torch's way.
OUT_DTYPES = {
    "x": lambda x, weight: x,
    "promoted": torch.promote_types,  # Llama: weight · x̂ in x's dtype
    "weight": lambda x, weight: weight,  # T5
    "float32": lambda x, weight: torch.float32,
}


def looks_like_a_norm(module: nn.Module, name: str = "") -> bool:
    """Whether a person would call it one, and would want to know why it was left alone.

    Args:
        name: what its model calls it; a module with parameters may be one by that alone.
    """
    if is_torch_norm(module):
        return True
    called_so = _CLASSES.search(type(module).__name__) is not None
    if not called_so and next(module.parameters(), None) is not None:
        called_so = _NAMES.search(name.rpartition(".")[2]) is not None
    return called_so and next(module.children(), None) is None


def may_be_a_norm(module: nn.Module, name: str = "") -> bool:
    """Whether it is worth trying: it looks like a norm, or has one or two vectors of one size and nothing else."""
    if looks_like_a_norm(module, name):
        return True
    parameters = list(module.parameters())
    leaf = next(module.children(), None) is None and next(module.buffers(), None) is None
    return leaf and len(parameters) in (1, 2) and all(p.dim() == 1 and p.shape == parameters[0].shape for p in parameters)


def is_torch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm | nn.RMSNorm)


def recognise(module: nn.Module) -> Formula | str:
    """The formula, or in words why there is none."""
    obstacle = _obstacle(module)
    if obstacle:
        return obstacle
    argument, obstacle = _argument(module)
    if obstacle:
        return obstacle
    with _quiet(_device(module)):
        found = [_formula(module, width, argument) for width in _widths(module)]
    obstacles = [one for one in found if isinstance(one, str)]
    if obstacles or len(set(found)) == 1:
        return [*obstacles, *found][0]
    return "its eps depends on the width of the input"


def _obstacle(module: nn.Module) -> str:
    """What can be seen without trying it; empty if nothing."""
    if "forward" in module.__dict__:
        return "its forward is replaced on the instance, by a tool that wraps modules; replace norms before that"
    if next(module.children(), None) is not None:
        return "it has submodules (a parametrization?)"
    if isinstance(module, nn.GroupNorm | nn.modules.batchnorm._NormBase):
        return "it norms channels; the kernels norm the last dimension"
    if next(module.buffers(), None) is not None:
        return "it has buffers, and a norm of the last dimension has none"
    held = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
    if held:  # of ones they pass for no weight at all
        return (
            f"its {' and '.join(held)} {'is a tensor and no Parameter' if len(held) == 1 else 'are tensors and no Parameters'}"
            ", as FullyShardedDataParallel leaves them; replace norms before that"
        )
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, list | tuple | torch.Size) and len(shape) != 1:
        return f"it normalises over the last {len(shape)} dimensions, {tuple(shape)}; the kernels over one"
    parameters = list(module.parameters())
    for p in parameters:
        if type(p) is not nn.Parameter or type(p.data) is not Tensor:
            return (
                f"its weights are {type(p.data).__name__}; replace norms before a model is sharded, quantised or materialised"
            )
        if p.device.type == "meta":
            return "its weights are on meta and have no values yet; load them, then replace norms"
        if not p.is_floating_point() or p.dim() != 1 or p.shape != parameters[0].shape:
            return (
                f"its weights have shapes {', '.join(str(tuple(p.shape)) for p in parameters)}; a norm has vectors of one size"
            )
        if p.dtype == torch.float64 and runs_kernels(p.device):
            return "its weights are float64, which the kernels don't take"
    if len(parameters) > 2:
        return f"it has {len(parameters)} parameters; a norm has two at most"
    if parameters and parameters[0].numel() < 2:
        return f"its width is {parameters[0].numel()}, where norms can't be told apart"
    return ""


def _argument(module: nn.Module) -> tuple[str, str]:
    """The name of forward's one argument; and what speaks against it."""
    try:
        parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    except (TypeError, ValueError):
        return "", "its forward has no signature that Python could read"
    if len(parameters) != 1:
        return "", f"its forward takes {', '.join(parameters) or 'nothing'}; a norm takes one tensor"
    return parameters[0], ""


def _widths(module: nn.Module) -> tuple[int, ...]:
    """Sizes of the last dimension to try."""
    shape = getattr(module, "normalized_shape", _FEATURES)
    parameter = next(module.parameters(), None)
    return tuple(shape) if parameter is None else (parameter.numel(),)


@contextmanager
def _quiet(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast, no warnings about inputs that nobody gave, and the random generators left as they were."""
    cuda = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=cuda), torch.autocast(device.type, enabled=False), catch_warnings():
        simplefilter("ignore")
        with torch.compiler.set_stance("force_eager"):  # a forward that is compiled would be for each of these inputs
            yield


def _formula(module: nn.Module, width: int, argument: str) -> Formula | str:
    generator = torch.Generator().manual_seed(width)
    names = [name for name, _ in module.named_parameters(recurse=False)]
    # Weights of both signs: |w| is another function.
    values = {name: torch.randn(width, generator=generator, **_FP32) for name in names}
    rows = torch.randn(len(_SIZES), width, generator=generator, **_FP32) + 0.5
    rows = torch.tensor(_SIZES, **_FP32)[:, None] * rows
    outliers = rows[:2].clone()  # what clamps x or y would clamp them
    outliers[:, 0] = 1000.0
    rows = torch.cat([rows, outliers])
    try:
        y = _run(module, values, rows)
        if y.shape != rows.shape:
            return f"it turns rows of {width} into {tuple(y.shape[-1:])}"
        trials = []
        for is_rms_norm, zero_centered, (weight, bias) in product((False, True), (False, True), _roles(names)):
            if weight is not None or not zero_centered:
                formula = Formula(is_rms_norm, 0.0, zero_centered, weight, bias, width if names else None, "x", argument)
                formula = replace(formula, eps=_eps(module, formula, values, _TINY * rows[:1]))
                trials.append((_distance(y, compute(formula, values, rows)), formula))
        error, formula = min(trials, key=lambda trial: trial[0])
        if error > TOLERANCE:
            return f"it is neither LayerNorm nor RMSNorm of the last dimension: off by {error:.2g} from the nearer, relative"
        for training, lead in product((True, False), ((2, 4), (4, 1, 2))):
            again = _run(module, values, rows.view(*lead, width), training)
            if again.shape != (*lead, width) or _distance(again.flatten(0, -2), y) > TOLERANCE:
                return "it gives rows other values in training, or in a tensor of more dimensions"
        zeros = torch.zeros(1, width, **_FP32)
        if not torch.allclose(_run(module, values, zeros), compute(formula, values, zeros).float(), atol=1e-6, equal_nan=True):
            return "it gives rows of zeros another value than the formula (NaN where no eps is added to the variance)"
        if _has_other_gradients(module, formula, values, rows[[0, 4]]):
            return "it computes the formula, but its gradient is another: something in it is detached"
        return _with_out_dtype(module, formula, values, rows)
    except Exception as error:  # whatever their code raises is a reason to leave it alone
        message = (str(error).splitlines() or ["without a message"])[0]
        return f"trying it on {tuple(rows.shape)} raised {type(error).__name__}: {message}"


def _roles(names: list[str]) -> list[tuple[str | None, str | None]]:
    """Which parameter may be the weight, and which the bias; the ones named so first."""
    if len(names) < 2:
        return [(name, None) for name in names] or [(None, None)]
    first, second = names
    return [(second, first), (first, second)] if "bias" in first else [(first, second), (second, first)]


def _run(
    module: nn.Module, values: dict[str, Tensor], x: Tensor, training: bool = False, weight_dtype: torch.dtype = torch.float32
) -> Tensor:
    """What the module's forward makes of x with these weights, without its hooks."""
    device = _device(module)
    weights = {name: nn.Parameter(value.to(device, weight_dtype, copy=True)) for name, value in values.items()}
    return _forward(module, weights, x.to(device, copy=True), training).cpu()


def _forward(module: nn.Module, weights: Mapping[str, nn.Parameter], x: Tensor, training: bool) -> Tensor:
    clone = object.__new__(type(module))
    clone.__dict__.update(module.__dict__)
    clone.__dict__ |= {"_parameters": {**module._parameters, **weights}, "training": training}
    return type(module).forward(clone, x)


def _device(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _has_other_gradients(module: nn.Module, formula: Formula, values: dict[str, Tensor], x: Tensor) -> bool:
    """Whether the gradients of x and of the weights are not those of the formula. A module that has none may get ours."""
    found = []
    with torch.inference_mode(False), torch.enable_grad():
        for device, exact in ((_device(module), False), (torch.device("cpu"), True)):
            dtype = torch.float64 if exact else torch.float32
            weights = {name: nn.Parameter(value.to(device, dtype, copy=True)) for name, value in values.items()}
            leaf = x.to(device, dtype, copy=True).requires_grad_()
            try:
                # A copy, as a leaf can't be changed in place.
                y = compute(formula, weights, leaf) if exact else _forward(module, weights, leaf.clone(), training=True)
                if not y.requires_grad:
                    return False
                # Upstream gradients that have something of y: those of noise have little of what a detached statistic loses.
                upstream = torch.linspace(-1, 1, y.numel(), dtype=dtype, device=device).view_as(y) + y.detach()
                inputs = [leaf, *weights.values()]
                gradients = torch.autograd.grad(y, inputs, upstream, allow_unused=True, materialize_grads=True)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # made for inference, or overwrites what its own gradient needs
                return False
            found.append([gradient.double().cpu() for gradient in gradients])
    # Beside the upstream gradient too: of two columns, that of x is next to nothing.
    size = upstream.double().norm().item()
    return any((a - b).norm() > GRADIENT_TOLERANCE * max(b.norm().item(), size) for a, b in zip(*found, strict=True))


def compute(formula: Formula, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The formula in fp64, for x (..., N) and parameters (N,) of any dtype."""
    x = x.double()
    if not formula.is_rms_norm:
        x = x - x.mean(-1, keepdim=True)
    eps = torch.finfo(torch.float32).eps if formula.eps is None else formula.eps
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    if formula.weight is not None:
        y = y * (values[formula.weight].double() + formula.zero_centered_weight)
    return y if formula.bias is None else y + values[formula.bias].double()


def _eps(module: nn.Module, formula: Formula, values: dict[str, Tensor], x: Tensor) -> float | None:
    """eps, if the module computes `formula`: y = t / √(v + eps) for t = x · weight, with v next to nothing."""
    if formula.bias is not None:
        values = values | {formula.bias: torch.zeros_like(values[formula.bias])}
    t = x.double() if formula.is_rms_norm else x.double() - x.double().mean(-1, keepdim=True)
    v = float(t.square().mean())
    if formula.weight is not None:
        t = t * (values[formula.weight].double() + formula.zero_centered_weight)
    k = float((_run(module, values, x).double() * t).sum() / t.square().sum())
    if not k > 0.0:
        return 0.0  # not this formula
    found = 1.0 / k**2 - v
    if found < 1e-3 * v:
        return 0.0
    if getattr(module, "eps", 0.0) is None and math.isclose(found, torch.finfo(torch.float32).eps, rel_tol=1e-3):
        return None
    written = [value for value in vars(module).values() if isinstance(value, float)]
    exact = [value for value in written if math.isclose(value, found, rel_tol=1e-3)]
    return exact[0] if exact else float(f"{found:.3g}")


def _distance(y: Tensor, expected: Tensor) -> float:
    """Largest error of a row, relative; infinite if it is no number."""
    errors = (y.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    worst = float(errors.max())
    return worst if math.isfinite(worst) else math.inf


def _with_out_dtype(module: nn.Module, formula: Formula, values: dict[str, Tensor], rows: Tensor) -> Formula | str:
    half, full = torch.bfloat16, torch.float32
    seen = {}
    for x, weight in ((half, half), (half, full), (full, half)) if values else ((half, half),):
        try:
            y = _run(module, values, rows.to(x), weight_dtype=weight)
        except RuntimeError:  # it takes no such mix: whatever ours does with it is right
            continue
        seen[x, weight] = y.dtype
        rounded = {name: value.to(weight) for name, value in values.items()}
        if _distance(y, compute(formula, rounded, rows.to(x))) > BF16_TOLERANCE:
            return f"it computes something else of {x} than of float32"
    for name, rule in OUT_DTYPES.items():
        if all(rule(*dtypes) == found for dtypes, found in seen.items()):
            return replace(formula, out_dtype=name)
    return f"the dtype of its output follows no rule known here: {', '.join(f'{k} → {v}' for k, v in seen.items())}"
