"""Which norm a module computes. It is found by trying: names and types prove nothing, as model code has hundreds of copies.

A clone with random weights gets rows of many sizes in fp32. Its output is compared in fp64 with the formulas of the norms in
`modules.MODULES`, with (weight + offset) and bias; offset is 0, or 1 as Gemma has it. eps follows from a row so small that the
root holds nothing else. The module itself is not run and not changed.
"""

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from itertools import permutations, product
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import kernels
from ..kernels import runs_kernels
from ..kit import forget
from ..modules import MODULES
from ..reference import NORMS, Norm
from .adopted import KEEPS, LeftAlone, raised
from .stand_ins import attributes

# Largest relative rms error of a row. fp32 arithmetic is good to 3e-7; an unbiased variance is off by 1/2N, which is more than
# this up to N = 160,000.
TOLERANCE = 3e-6
BF16_TOLERANCE = 0.1  # for bf16 input: an eps that depends on the dtype is off by a factor
GRADIENT_TOLERANCE = 1e-3  # of a whole tensor: a detached statistic or weight costs more
_SIZES = (1.0, 30.0, 1e-3, 1e-5, 3.0, 0.1)  # of rows
_TINY = 1e-8
_CLASSES = re.compile(r"(?i:norm)|RMS|LN(?![a-z])")  # LlamaRMSNorm, RMS, LN, FusedLN2d
_NAMES = re.compile(r"(?i:norms?_?\d*$)|(^|_)rms|(^|_)ln(?![a-z])|^lnf?\d*$")  # norm1, input_layernorm, ln_f, final_ln
_WIDTHS = (24, 40)  # tried on norms without weights, which take any width
_FP32_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Formula:
    """A norm over the last dimension."""

    norm: Norm
    eps: float | None  # None: as in torch.nn.RMSNorm(eps=None), the epsilon of the dtype it computes in
    zero_centered_weight: bool
    weight: str | None  # names of the module's parameters, or of buffers
    bias: str | None
    width: int | None  # None: any, there are no weights
    out_dtype: str  # a key of OUT_DTYPES
    argument: str  # the name of forward's input
    keeps_strides: bool = False  # y lies in memory as x does, as written-out norms have it

    def __str__(self) -> str:
        eps = "the dtype's" if self.eps is None else f"{self.eps:g}"
        return f"{MODULES[self.norm].__name__}{' with weight 1 + w' if self.zero_centered_weight else ''}, eps {eps}"


# The dtype of the output, from those of x and of the weight.
OUT_DTYPES = {
    "x": lambda x, weight: x,  # torch's norms
    "promoted": torch.promote_types,  # Llama: weight · x̂ in x's dtype
    "weight": lambda x, weight: weight,  # T5
    "float32": lambda x, weight: torch.float32,
}


def looks_like_a_norm(module: nn.Module, name: str = "") -> bool:
    """Whether a person would call it a norm, by its class or, if it has parameters, by its name in the model."""
    if _is_of_torch(module):
        return isinstance(module, nn.LayerNorm | nn.RMSNorm)
    by_class = _CLASSES.search(type(module).__name__) is not None
    by_name = _NAMES.search(name.rpartition(".")[2]) is not None and next(module.parameters(), None) is not None
    return (by_class or by_name) and next(module.children(), None) is None


def may_be_a_norm(module: nn.Module, name: str = "") -> bool:
    """Whether it is worth trying: it looks like a norm, or holds one or two vectors of one size and nothing else."""
    if looks_like_a_norm(module, name) or _is_of_torch(module) or next(module.children(), None) is not None:
        return looks_like_a_norm(module, name)
    parameters = list(module.parameters())
    vectors = all(not is_lazy(p) and p.dim() == 1 and p.shape == parameters[0].shape for p in parameters)
    return len(parameters) in (1, 2) and vectors and next(module.buffers(), None) is None


def _is_of_torch(module: nn.Module) -> bool:
    """Whether its class, or one that it is made from, is nn.BatchNorm2d or the like: one that nobody else wrote."""
    return any(cls.__module__.startswith("torch.nn.modules.") and cls is not nn.Module for cls in type(module).__mro__)


def recognise(module: nn.Module) -> Formula | str:
    """The formula that the module computes, or in words why it is none."""
    if obstacle := _obstacle(module):
        return obstacle
    vectors = _vectors(module)
    widths = getattr(module, "normalized_shape", _WIDTHS) if not vectors else (next(iter(vectors.values())).numel(),)
    with undisturbed(_device(module)):
        found = [_formula(module, width) for width in widths]
    obstacles = [formula for formula in found if isinstance(formula, str)]
    return [*obstacles, *found][0] if obstacles or len(set(found)) == 1 else "its eps depends on the width of the input"


def compute(formula: Formula, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The formula in fp64, for x (..., N) and parameters (N,) of any dtype."""
    weight = None if formula.weight is None else values[formula.weight].double() + formula.zero_centered_weight
    bias = None if formula.bias is None else values[formula.bias].double()
    return NORMS[formula.norm](x.double(), weight, bias, _FP32_EPS if formula.eps is None else formula.eps)


def _obstacle(module: nn.Module) -> str:
    """What speaks against it without a trial; empty if nothing does."""
    if "forward" in module.__dict__:
        return "its forward is replaced on the instance, by a tool that wraps modules; replace norms before that"
    if next(module.children(), None) is not None:
        return "it has submodules (a parametrization?), and a norm of the last dimension has none"
    if held := [name for name, value in vars(module).items() if isinstance(value, Tensor)]:
        # the trial would not randomise them, and ones pass for no weight
        return f"its {' and '.join(held)}: no Parameter, as FullyShardedDataParallel leaves it; replace norms before that"
    parameters = list(_vectors(module).values())
    if any(map(is_lazy, parameters)):
        return "its weights have no shape yet; run the model once, then replace norms"
    for p in parameters:
        if type(p) not in (nn.Parameter, Tensor) or type(p.data) is not Tensor:
            kind = type(p.data).__name__
            return f"its weights are {kind}; replace norms before a model is sharded or quantised, where it may be on meta"
        if not p.is_floating_point() or p.dim() != 1 or p.shape != parameters[0].shape or len(parameters) > 2:
            shapes = ", ".join(str(tuple(p.shape)) for p in parameters)
            return f"its weights have shapes {shapes}; a norm has one or two vectors of one size"
        if p.dtype == torch.float64 and runs_kernels(p.device):
            return "its weights are float64, which the kernels don't take"
    return ""


def _vectors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers: a norm without a bias may have one of zeros."""
    return dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """No gradients, autocast, compilation, warnings or kernels; fp32 on the CPU by default; generators stay as they were."""
    dtype, interprets, threads = torch.get_default_dtype(), kernels.INTERPRET, torch.get_num_threads()
    with (
        torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), catch_warnings(),
        torch.autocast(device.type, enabled=False), torch.compiler.set_stance("force_eager"),
        nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"),
    ):  # fmt: skip
        simplefilter("ignore")
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)  # more take longer for so little
        kernels.INTERPRET = False
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            kernels.INTERPRET = interprets
            if interprets:
                forget()  # which calls are the reference's


def _formula(module: nn.Module, width: int) -> Formula | str:
    generator = torch.Generator().manual_seed(width)
    names = [*_vectors(module)]
    # Weights of both signs: |w| is another function.
    values = {name: torch.randn(width, generator=generator) for name in names}
    rows = torch.randn(len(_SIZES), width, generator=generator) + 0.5
    rows = torch.tensor(_SIZES)[:, None] * rows
    outliers = rows[:2].clone()  # show whether x or y is clamped
    outliers[:, 0] = 1000.0
    rows = torch.cat([rows, outliers])
    try:
        arguments = list(inspect.signature(type(module).forward).parameters)[1:]
        if len(arguments) != 1:
            return f"its forward takes {', '.join(arguments) or 'nothing'}; a norm takes one tensor"
        y = _run(module, values, rows)
        if y.shape != rows.shape:
            return f"it turns rows of {width} into {tuple(y.shape[-1:])}"
        trials = []
        roles = permutations([*names, None, None][:2], 2)
        for norm, zero_centered, (weight, bias) in product(MODULES, (False, True), roles):
            if weight is not None or not (names or zero_centered):
                formula = Formula(norm, 0.0, zero_centered, weight, bias, width if names else None, "x", arguments[0])
                formula = replace(formula, eps=_eps(module, formula, values, _TINY * rows[:1]))
                trials.append((_distance(y, compute(formula, values, rows)), formula))
        error, formula = min(trials, key=lambda trial: trial[0])
        if error > TOLERANCE:
            known = " nor ".join(kind.__name__ for kind in MODULES.values())
            return f"it is neither {known} of the last dimension: off by {error:.2g} from the nearer, relative"
        for training, lead in product((True, False), ((2, 4), (4, 1, 2))):
            again = _run(module, values, rows.view(*lead, width), training)
            if again.shape != (*lead, width) or _distance(again.flatten(0, -2), y) > TOLERANCE:
                return "it gives rows other values in training, or in a tensor of more dimensions"
        zeros = torch.zeros(1, width)
        if not torch.allclose(_run(module, values, zeros), compute(formula, values, zeros).float(), atol=1e-6, equal_nan=True):
            return "it gives rows of zeros another value than the formula (NaN where no eps is added to the variance)"
        wider = _attempt(module, values, torch.ones(2, 2 * width)) if names else None
        if wider is not None and wider.shape[-1] == 2 * width:  # one gain for all features, or a norm of each head of a row
            return f"it also takes rows of {2 * width}, as a norm of parts of a row does"
        if _has_other_gradients(module, formula, values, rows[[0, 4]]):
            return "it computes the formula, but its gradient is another: something in it is detached"
        permuted = rows.view(2, 4, width).permute(1, 0, 2)  # as it lies in memory after a transpose
        formula = replace(formula, keeps_strides=_run(module, values, permuted).stride() == permuted.stride())
        return _with_out_dtype(module, formula, values, rows)
    except LeftAlone as why:
        return str(why)
    except Exception as error:  # the module's code may raise anything; each is a reason to leave it alone
        image = _attempt(module, values, torch.ones(2, width, 3, 5))
        if image is not None and image.shape == (2, width, 3, 5):
            return f"it takes channels first, (batch, {width}, height, width); the kernels norm the last dimension"
        return f"trying it on {tuple(rows.shape)} {raised(error)}"


def _run(module: nn.Module, values: dict[str, Tensor], x: Tensor, training: bool = False) -> Tensor:
    """The output of the module's forward for x with these weights, without its hooks; on the CPU."""
    device = _device(module)
    clone: nn.Module = object.__new__(type(module))
    clone.__dict__ |= {name: copy(value) if type(value) in (list, dict, set) else value for name, value in vars(module).items()}
    weights = {name: value.to(device, copy=True) for name, value in values.items()}
    clone.__dict__ |= {"_parameters": {**module._parameters, **weights}, "_buffers": {}, "training": training}
    before = attributes(clone)
    y = type(module).forward(clone, x.to(device, copy=True)).cpu()
    if attributes(clone) != before:
        raise LeftAlone(KEEPS)
    return y


def _attempt(module: nn.Module, values: dict[str, Tensor], x: Tensor) -> Tensor | None:
    """The output, or None where the module does not take x."""
    try:
        return _run(module, values, x)
    except Exception:  # anybody's code
        return None


def _device(module: nn.Module) -> torch.device:
    """Where to try it: where its weights are, if they are anywhere."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _eps(module: nn.Module, formula: Formula, values: dict[str, Tensor], x: Tensor) -> float | None:
    """eps, if the module computes `formula`: t / √(v + eps) with a statistic v that is next to nothing beside eps = 1."""
    if formula.bias is not None:
        values = values | {formula.bias: torch.zeros_like(values[formula.bias])}
    t = compute(replace(formula, eps=1.0), values, x)
    v = float(t.square().sum() / compute(formula, values, x).square().sum())
    k = float((_run(module, values, x).double() * t).sum() / t.square().sum())
    found = 1.0 / k**2 - v if k > 0.0 else 0.0  # otherwise it computes something else
    if found < 1e-3 * v:
        return 0.0
    if getattr(module, "eps", 0.0) is None and math.isclose(found, _FP32_EPS, rel_tol=1e-3):
        return None
    written = (value for value in vars(module).values() if isinstance(value, float))
    return next((value for value in written if math.isclose(value, found, rel_tol=1e-3)), float(f"{found:.3g}"))


def _distance(y: Tensor, expected: Tensor) -> float:
    """The largest relative error of a row; infinite if it is no number."""
    errors = (y.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    return float(errors.nan_to_num(math.inf, math.inf).max())


def _has_other_gradients(module: nn.Module, formula: Formula, values: dict[str, Tensor], x: Tensor) -> bool:
    """Whether the gradients of x and of the weights are not those of the formula. A module without gradients may get ours."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [t.clone().requires_grad_() for t in (x, *values.values())]
        weights = dict(zip(values, leaves[1:], strict=True))
        try:
            outputs = _run(module, weights, leaves[0], training=True).double(), compute(formula, weights, leaves[0])
            # Upstream gradients contain some y: in those of noise, a detached statistic would hardly show.
            upstream = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view_as(x) + outputs[1].detach()
            found, wanted = (torch.autograd.grad(y, leaves, upstream, materialize_grads=True) for y in outputs)
        except RuntimeError:  # made for inference, or overwrites what its own gradient needs
            return False
    # Relative to the upstream gradient too: with two columns, the gradient of x is next to nothing.
    size = upstream.norm().item()
    return any((a - b).norm() > GRADIENT_TOLERANCE * max(b.norm().item(), size) for a, b in zip(found, wanted, strict=True))


def _with_out_dtype(module: nn.Module, formula: Formula, values: dict[str, Tensor], rows: Tensor) -> Formula | str:
    half, full = torch.bfloat16, torch.float32
    seen = {}
    for x, weight in ((half, half), (half, full), (full, half)) if values else ((half, half),):
        rounded = {name: value.to(weight) for name, value in values.items()}
        y = _attempt(module, rounded, rows.to(x))
        if y is None:  # it takes no such mix, so any dtype will do
            continue
        seen[x, weight] = y.dtype
        if _distance(y, compute(formula, rounded, rows.to(x))) > BF16_TOLERANCE:
            return f"it computes something else of {x} than of float32"
    for name, rule in OUT_DTYPES.items():
        if all(rule(*dtypes) == dtype for dtypes, dtype in seen.items()):
            return replace(formula, out_dtype=name)
    return f"the dtype of its output follows no rule known here: {', '.join(f'{k} → {v}' for k, v in seen.items())}"
