"""Gated norms in one kernel each way: RMSNorm beside a gate, in both orders, of all columns or of groups. Found by trial."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..gated import Gate, Options, gated_rms_norm_fn, reference
from .adopted import Adopted, is_known
from .recognise import GRADIENT_TOLERANCE, OUT_DTYPES, TOLERANCE, undisturbed
from .stand_ins import attributes, clone_of

_SIZES = (1.0, 30.0, 1e-2, 1e-3, 1e-4, 1e3)  # of rows: where eps counts much, little and nothing
_HALF, _FULL = torch.bfloat16, torch.float32
_DTYPES = (_HALF, _HALF, _HALF), (_HALF, _HALF, _FULL), (_FULL, _FULL, _HALF)  # of x, gate and weight
_OF_OTHER_GATES = (_HALF, _FULL, _HALF), (_FULL, _HALF, _FULL)


@dataclass(frozen=True)
class GatedFormula:
    options: Options  # all but out_dtype
    out_dtype: str  # a key of OUT_DTYPES
    arguments: tuple[str, ...]  # the names of the two inputs of forward
    weight: str  # the name of the parameter
    takes_any_gate: bool  # the output has that dtype also where the gate has another one than x

    def __str__(self) -> str:
        o, parts = self.options, ("RMSNorm", f"{self.options.activation.name} gate")
        return f"{' · '.join(parts if o.norm_before_gate else parts[::-1])}, groups of {o.group_size}, eps {o.eps:g}"


class AdoptedGatedNorm(Adopted):
    """A gated norm of somebody's model that runs `gated_rms_norm_fn`."""

    _how: GatedFormula

    @staticmethod
    def _ours(formula: GatedFormula, own: Callable) -> Callable:
        """The forward that runs in place of the module's own."""
        o = formula.options
        options = o.eps, o.norm_before_gate, o.group_size, o.activation.name, o.zero_centered_weight

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(formula.arguments, args, strict=False)), **kwargs}
            x, z = map(cast(Any, given).get, formula.arguments)
            if len(args) + len(kwargs) != 2 or not (is_known(x) and is_known(z)) or x.shape != z.shape:
                return own(self, *args, **kwargs)  # without a gate, or what it raises
            if x.dtype != z.dtype and not formula.takes_any_gate:
                return own(self, *args, **kwargs)
            if not x.is_contiguous() and not torch.empty_like(x, device="meta").is_contiguous():
                return own(self, *args, **kwargs)  # whose result lies in memory as x does, transposed
            weight = getattr(self, formula.weight)  # which a parametrization or FullyShardedDataParallel may compute
            return gated_rms_norm_fn(x, z, weight, *options, OUT_DTYPES[formula.out_dtype](x.dtype, weight.dtype))

        return forward


def recognise_gated(module: nn.Module) -> GatedFormula | None:
    """What the module computes, if that is a gated norm: a clone gives the same values and gradients."""
    weights, others = [*module.named_parameters(recurse=False)], [*module.buffers(), *module.children()]
    if len(weights) != 1 or others or "forward" in vars(module):
        return None
    ((name, weight),) = weights
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor or weight.dim() != 1:
        return None
    with undisturbed(torch.device("cpu")), torch.enable_grad():
        torch.default_generator.manual_seed(0)
        try:
            arguments = tuple(inspect.signature(type(module).forward).parameters)[1:]
            return _tried(module, name, weight.numel(), arguments) if len(arguments) == 2 else None
        except Exception:  # anybody's code
            return None


def _tried(module: nn.Module, name: str, width: int, arguments: tuple[str, ...]) -> GatedFormula | None:
    clone = clone_of(module, torch.zeros_like, lambda *_: None)

    def own(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        clone._parameters[name] = weight
        return type(clone).forward(clone, x, z)

    inputs = (
        (torch.randn(6, width) * torch.tensor(_SIZES)[:, None]).view(2, 3, width),
        torch.randn(2, 3, width),
        torch.randn(width),
    )
    found, before = [], attributes(clone)
    for training in (True, False):
        clone.train(training)
        found.append(_results(own, inputs))
    if attributes(clone) != before:
        return None
    whole = [value for value in vars(clone).values() if isinstance(value, int) and 0 < value <= width and width % value == 0]
    sizes = dict.fromkeys((width, *whole, *(width // count for count in whole)))  # of groups, or how many there are
    written = dict.fromkeys(value for value in vars(clone).values() if isinstance(value, float))
    for eps, size, gate, first, offset in product(written, sizes, Gate, (True, False), (False, True)):
        o = Options(eps, size, gate, first, offset, torch.float64)
        exact = _results(lambda *i, o=o: reference(i, o).y, [t.double() for t in inputs])
        if all(_same(one, exact) for one in found):
            rule = next((rule for rule in OUT_DTYPES if _has_dtype(own, inputs, rule, _DTYPES)), None)
            if rule is None:
                return None
            return GatedFormula(o, rule, arguments, name, _has_dtype(own, inputs, rule, _OF_OTHER_GATES))
    return None


def _results(function: Callable[..., Tensor], inputs: Any) -> list[Tensor]:
    """Values, and the gradients of x, z and the weight."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = function(*leaves)
    upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape) + y.detach()
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


def _same(found: list[Tensor], exact: list[Tensor]) -> bool:
    off = [float(((a - b).norm(dim=-1) / b.norm(dim=-1)).nan_to_num(math.inf).max()) for a, b in zip(found, exact, strict=True)]
    return off[0] < TOLERANCE and max(off) < GRADIENT_TOLERANCE


def _has_dtype(own: Callable[..., Tensor], inputs: Any, rule: str, of: tuple[tuple[torch.dtype, ...], ...]) -> bool:
    """Whether this rule gives the dtype of the output for inputs of these dtypes."""
    for dtypes in of:
        x, _, weight = dtypes
        if own(*[t.to(dtype) for t, dtype in zip(inputs, dtypes, strict=True)]).dtype != OUT_DTYPES[rule](x, weight):
            return False
    return True
