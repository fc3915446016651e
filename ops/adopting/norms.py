"""Fused norms in place of a model's own, and back.

    replace_norms(model)        h.0.ln_1: LayerNorm(768) → fused (LayerNorm, eps 1e-05)
    restore_norms(model)

`recognise` finds norms by what they compute.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..gated import GatedRMSNorm
from ..modulated import ModulatedNorm, modulated_norm_fn
from ..modules import MODULES
from ..norm import norm_fn
from ..records import Norm
from . import lazy
from .adopted import Adopted, Only, become, restore
from .blocks import AdoptedBlock
from .gated import AdoptedGatedNorm, GatedFormula, recognise_gated
from .lazy import Lazy, settled, take_ahead
from .recognise import OUT_DTYPES, Formula, looks_like_a_norm, may_be_a_norm, recognise

_LAYERNORM, _RMSNORM = Norm.layernorm, Norm.rmsnorm  # a look into an Enum takes long


@dataclass(frozen=True)
class Site:
    """What `replace_norms` did with one norm of a model."""

    name: str  # in model.named_modules(); of a shared module, its first name
    was: str  # class and width
    fused: bool
    why: str  # the formula, or the reason why the norm was left alone

    def __str__(self) -> str:
        return f"{self.name}: {self.was} → {'fused' if self.fused else 'left alone'} ({self.why})"


def replace_norms(model: nn.Module, *, only: Only = None, verbose: bool = True) -> list[Site]:
    """Lets every LayerNorm and RMSNorm of `model` run the fused kernels, in place.

    Takes torch's own norms and every class that computes the same over the last dimension: Llama's, T5's and Qwen's RMSNorm,
    Gemma's with weight 1 + w, and RMSNorm beside a gate, as in Qwen3-Next and Mamba-2 (`gated_rms_norm_fn`). Formula and eps
    are measured on a clone of the module; its name does not count. Parameters stay the same objects under the same names. y has
    the dtype that the module gave it; the kernel computes in fp32 and rounds once.
    A second call changes nothing.

    Args:
        model: any module, also a norm; before DDP, FSDP or torch.compile are put around it, or after DDP.
        only: a function of each norm's name and module; a norm is left alone if it returns False.
        verbose: print a line for each norm.

    Returns:
        A record for each norm, also for those left alone; `str` of it is the printed line.
    """
    sites = [site for name, module in model.named_modules() if (site := _replace(name or "model", module, only))]
    print("".join(f"{line}\n" for line in sites if verbose), end="")
    return sites


def _replace(name: str, module: nn.Module, only: Only) -> Site | None:
    is_ours = isinstance(module, (AdoptedNorm, AdoptedGatedNorm, GatedRMSNorm, ModulatedNorm, *MODULES.values()))
    if is_ours or {cls.__name__ for cls in type(module).__mro__} & {"_Fused", AdoptedNorm.__name__, AdoptedGatedNorm.__name__}:
        by = "" if is_ours else ", by another copy of this package"
        return Site(name, _described(module), False, f"it is fused already{by}")
    if not may_be_a_norm(module, name):
        return None
    was, formula = _described(module), recognise_gated(module) or recognise(module)
    if isinstance(formula, str):  # reported only where a reader of the lines would miss the norm
        return Site(name, was, False, formula) if looks_like_a_norm(module, name) else None
    if only is not None and not only(name, module):
        return Site(name, was, False, "`only` returned False for it")
    try:
        if isinstance(formula, GatedFormula):
            become(module, AdoptedGatedNorm, formula)
        else:
            become(module, AdoptedNorm, MODULES[formula.norm], **_shown(module, formula), formula=formula, eps=formula.eps)
    except TypeError as error:
        return Site(name, was, False, f"Python can't give its class a subclass: {error}")
    return Site(name, was, True, str(formula))


def _shown(module: nn.Module, formula: Formula) -> dict[str, Any]:
    """Attributes as torch's norms and ours have them; its own where it has them."""
    shown: dict[str, Any] = {"normalized_shape": () if formula.width is None else (formula.width,)}
    shown |= {"elementwise_affine": formula.weight is not None, "zero_centered_weight": formula.zero_centered_weight}
    return {name: vars(module).get(name, value) for name, value in shown.items()}


def _described(module: nn.Module) -> str:
    """LayerNorm(768): its class and width."""
    parameter = next(module.parameters(), None)
    shape: Any = getattr(module, "normalized_shape", None) if parameter is None or is_lazy(parameter) else parameter.shape
    return f"{type(module).__name__}({', '.join(map(str, shape)) if isinstance(shape, tuple) else ''})"


def restore_norms(model: nn.Module, *, verbose: bool = True) -> list[str]:
    """Undoes `replace_norms` and `fuse_prenorm_block`; returns a line for each module that has its own forward again.

    Parameters keep their present values. `eps`, and what else came with the new class, is again what it was before.

    Raises:
        ValueError: since then another tool gave a norm or block yet another class or forward. Then nothing is restored.
    """
    lines = restore("restore_norms", model, AdoptedNorm, AdoptedGatedNorm, AdoptedBlock)
    print("".join(f"{line}\n" for line in lines if verbose), end="")
    return lines


class AdoptedNorm(Adopted):
    """A norm of somebody's model that runs `norm_fn`."""

    formula: Formula
    eps: float | None  # the formula's; may be set, as with torch's norms

    def forward(self, x: Any = None, **by_name: Any) -> Any:
        """x: also under the name that it has in the model's own forward."""
        y = take_ahead(self, x) if isinstance(x, Tensor) else None
        if y is None:
            x = by_name.pop(self.formula.argument, None) if x is None else x
            if x is None or by_name:
                raise TypeError(f"{type(self).__name__}: forward takes {self.formula.argument}; got {[*by_name]}")
            y = self._of(x)
        if lazy.WATCH is not None:
            lazy.WATCH(self, x, y)
        return y

    def _of(self, x: Any) -> Any:
        if not self.has_own_forward():
            return self._own.forward(self, settled(x))
        if isinstance(x, Lazy) and not x.parts and x.is_branch() and self.out_dtype(x.x.dtype) == x.x.dtype:
            return x.then(branch_norm=self)  # in a fused block
        return self.of_tensor(settled(x))

    def of_tensor(self, x: Tensor) -> Tensor:
        y: Any = norm_fn(self.formula.norm, x, *self.weights(), out_dtype=self.out_dtype(x.dtype), **self.options(x.dtype))
        if self.formula.keeps_strides and not x.is_contiguous():
            return torch.empty_like(x, dtype=y.dtype).copy_(y)
        return y

    def modulated(self, x: Tensor, *modulation: Tensor | None, **what: Any) -> Any:
        """`modulated_norm_fn` with these arguments and the norm's own; scale is the whole factor."""
        formula, (weight, bias) = self.formula, self.weights()
        if formula.zero_centered_weight and weight is not None:
            weight = weight.float() + 1
        what |= {"weight": weight, "bias": bias, "eps": self.eps_of(x.dtype), "zero_centered_scale": False}
        return modulated_norm_fn(x, *modulation, is_rms_norm=formula.norm is _RMSNORM, **what)

    def can_be_modulated(self) -> bool:
        return self.formula.norm in (_LAYERNORM, _RMSNORM)

    def weights(self) -> tuple[Tensor | None, Tensor | None]:
        formula, own = self.formula, self._parameters  # where a look takes a third of a look into the module
        weight, bias = formula.weight, formula.bias
        return (
            None if weight is None else own[weight] if weight in own else getattr(self, weight),
            None if bias is None else own[bias] if bias in own else getattr(self, bias),
        )

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        """Of `norm_fn`, for x of this dtype."""
        return {"eps": self.eps_of(dtype), "zero_centered_weight": self.formula.zero_centered_weight}

    def eps_of(self, dtype: torch.dtype) -> float:
        return torch.finfo(torch.promote_types(dtype, torch.float32)).eps if self.eps is None else self.eps

    def out_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if self.formula.out_dtype == "x":
            return dtype
        weight, _ = self.weights()
        return OUT_DTYPES[self.formula.out_dtype](dtype, dtype if weight is None else weight.dtype)

    def goes_with(self, stream: Lazy) -> bool:
        """Whether one kernel can norm the sum and do what is to be done to its branch: it has one eps and one offset."""
        norm = stream.parts.get("branch_norm")
        if norm is not None:
            return norm.options(stream.x.dtype) == self.options(stream.x.dtype)
        return not self.formula.zero_centered_weight or stream.parts.keys().isdisjoint(("branch_weight", "scale"))

    def reset_parameters(self) -> None:
        """As its own class does it, or else to the norm without weights."""
        weight, bias = self.weights()
        if own := getattr(self._own, "reset_parameters", None):
            return own(self)
        if weight is not None:
            nn.init.constant_(weight, 0.0 if self.formula.zero_centered_weight else 1.0)
        if bias is not None:
            nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        return f"{self.formula.width or 'any width'}, {replace(self.formula, eps=self.eps)}"
