"""Fused norms in place of a model's own, and back.

    replace_norms(model)        h.0.ln_1: LayerNorm(768) → fused (LayerNorm, eps 1e-05)
    restore_norms(model)

`recognise` finds norms by what they compute. A replaced norm stays the same object, with its Parameters, buffers, hooks, device
and training flag; only its class becomes a subclass of what it was. So optimizers, checkpoints and references to it hold, and
isinstance finds what it found before.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..functional import norm_fn
from ..modules import MODULES
from . import sums as sums  # sets up what Streams and Branches can do
from .lazy import Branch, Lazy, Stream
from .recognise import OUT_DTYPES, Formula, looks_like_a_norm, may_be_a_norm, recognise


@dataclass(frozen=True)
class Site:
    """What `replace_norms` did with one norm of a model."""

    name: str  # in model.named_modules(); of a shared module, its first name
    was: str  # class and width
    fused: bool
    why: str  # the formula, or the reason why the norm was left alone

    def __str__(self) -> str:
        return f"{self.name}: {self.was} → {'fused' if self.fused else 'left alone'} ({self.why})"


def replace_norms(
    model: nn.Module, *, only: Callable[[str, nn.Module], bool] | None = None, verbose: bool = True
) -> list[Site]:
    """Lets every LayerNorm and RMSNorm of `model` run the fused kernels, in place.

    Takes torch's own norms and every class that computes the same over the last dimension: Llama's, T5's and Qwen's RMSNorm,
    Gemma's with weight 1 + w. Formula and eps are measured on a clone of the module; its name does not count. Parameters stay
    the same objects under the same names. y has the dtype that the module gave it; the kernel computes in fp32 and rounds once.
    A second call changes nothing.

    A replaced norm also takes `residual` and `prenorm`, as `RMSNorm` does, and drops in training if its `dropout_p` is set.

    Args:
        model: any module, also a norm; before DDP, FSDP or torch.compile are put around it, or after DDP.
        only: a function of each norm's name and module; a norm is left alone if it returns False.
        verbose: print a line for each norm.

    Returns:
        A record for each norm, also for those left alone; `str` of it is the printed line.

    Raises:
        TypeError: model is no module, or only no function.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"replace_norms: model must be a torch.nn.Module, got {type(model).__name__}")
    if only is not None and not callable(only):
        raise TypeError(f"replace_norms: only must be a function of a norm's name and module, got {only!r}")
    sites = [site for name, module in model.named_modules() if (site := _replace(name or "model", module, only))]
    if verbose:
        print("".join(f"{line}\n" for line in sites), end="")
    return sites


def restore_norms(model: nn.Module, *, verbose: bool = True) -> list[str]:
    """Undoes `replace_norms` and `fuse_prenorm_block`; returns a line for each module that has its own forward again.

    Parameters keep their present values. `eps`, and what else came with the new class, is again what it was before.

    Raises:
        TypeError: model is no module.
        ValueError: since then another tool gave a module yet another class or forward. Modules before it are restored.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"restore_norms: model must be a torch.nn.Module, got {type(model).__name__}")
    lines = []
    for name, module in model.named_modules():
        take_hooks_off(module)
        if isinstance(module, Swapped):
            unswap(module)
            lines.append(f"{name or 'model'}: {type(module).__name__} as it was")
    if verbose:
        print("".join(f"{line}\n" for line in lines), end="")
    return lines


class Hook:
    """What blocks.py hangs on modules."""


def take_hooks_off(module: nn.Module) -> None:
    for hooks, with_kwargs in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key in [key for key, hook in hooks.items() if isinstance(hook, Hook)]:
            del hooks[key]
            with_kwargs.pop(key, None)


class Swapped(nn.Module):
    """First base of every class that is put in place of a module's own. Subclasses define forward."""

    _parts: tuple[type, ...]  # the class with the new forward, the module's own class, others for isinstance
    _before_swap: tuple[tuple[str, ...], dict[str, Any]]  # the attributes that `swap` set, and those there were before

    def __reduce_ex__(self, protocol):
        return _rebuild, self._parts, dict(self.__dict__)


class AdoptedNorm(Swapped):
    """A norm of somebody's model that runs `norm_fn`."""

    formula: Formula
    eps: float | None  # the formula's; may be set, as with torch's norms
    dropout_p: float

    def forward(
        self,
        x: Tensor | Lazy | None = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
        **by_name: Any,
    ) -> Any:
        """y (..., N), or with prenorm (y, the new residual stream); arguments as for `norm_fn`.

        x is a tensor, also under the name that it has in the model's own forward, or what fused blocks make of one: of a Stream
        the sum and the norm are computed together; the norm of a Branch is computed together with the sum that it goes into.
        """
        name, formula = type(self).__name__, self.formula
        x = by_name.pop(formula.argument, None) if x is None else x
        if x is None or by_name:
            raise TypeError(f"{name}: forward takes x, residual, prenorm, residual_in_fp32; got {[*by_name]}")
        if isinstance(x, Lazy):
            if residual is None and not prenorm and not (self.dropout_p and self.training):
                return self._of_lazy(x)
            x = x.tensor()
        elif not isinstance(x, Tensor):
            raise TypeError(f"{name}: x must be a tensor, got {type(x).__name__}")
        if x.is_nested:  # checked here: the messages of `norm_fn` name shapes, and a nested tensor has none
            raise ValueError(f"{name}: x is a nested tensor, expected a dense one; norm its values(), or restore this norm")
        weight, bias = self.weights()
        drops = self.dropout_p > 0.0 and self.training
        if residual is None and not prenorm and not drops:
            return self.of_tensor(x)
        return norm_fn(
            formula.norm, x, weight, bias, residual,
            dropout_p=self.dropout_p if drops else 0.0, prenorm=prenorm, residual_in_fp32=residual_in_fp32,
            out_dtype=self.out_dtype(x.dtype), **self.options(x.dtype),
        )  # fmt: skip

    def _of_lazy(self, x: Lazy) -> Any:
        if isinstance(x, Stream):
            return x.normed(self)
        bare = isinstance(x, Branch) and x._value is None and x.norm is None and x.more is None and not x._is_scaled()
        if not bare or self.out_dtype(x.dtype) != x.dtype or is_sharded(self):
            return self.of_tensor(x.tensor())
        return x.then(norm=self)

    def of_tensor(self, x: Tensor) -> Tensor:
        weight, bias = self.weights()
        y: Any = norm_fn(self.formula.norm, x, weight, bias, out_dtype=self.out_dtype(x.dtype), **self.options(x.dtype))
        if self.formula.keeps_strides and not x.is_contiguous():
            return torch.empty_like(x, dtype=y.dtype).copy_(y)
        return y

    def weights(self) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = self.formula.weight, self.formula.bias
        return None if weight is None else getattr(self, weight), None if bias is None else getattr(self, bias)

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        """Of `norm_fn`, for x of this dtype."""
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps if self.eps is None else self.eps
        return {"eps": eps, "zero_centered_weight": self.formula.zero_centered_weight}

    def out_dtype(self, dtype: torch.dtype) -> torch.dtype:
        weight, _ = self.weights()
        return OUT_DTYPES[self.formula.out_dtype](dtype, dtype if weight is None else weight.dtype)

    def goes_with(self, branch: Branch) -> bool:
        """Whether one kernel can norm the sum and do what is to be done to the branch: it has one eps and one offset."""
        if branch.norm is not None:
            return branch.norm.options(branch.x.dtype) == self.options(branch.x.dtype)
        return branch.weight is None or not self.formula.zero_centered_weight

    def reset_parameters(self) -> None:
        """As its own class does it, or else to the norm without weights."""
        own = getattr(_original_class(self), "reset_parameters", None)
        if own is not None:
            own(self)
            return
        weight, bias = self.weights()
        if weight is not None:
            nn.init.constant_(weight, 0.0 if self.formula.zero_centered_weight else 1.0)
        if bias is not None:
            nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        width = "any width" if self.formula.width is None else str(self.formula.width)
        return f"{width}, {replace(self.formula, eps=self.eps)}, dropout_p={self.dropout_p}"


def _replace(name: str, module: nn.Module, only: Callable[[str, nn.Module], bool] | None) -> Site | None:
    was = _described(module)
    if isinstance(module, (AdoptedNorm, *MODULES.values())):
        return Site(name, was, False, "it is fused already")
    if any(cls.__name__ in (AdoptedNorm.__name__, "_Fused") for cls in type(module).__mro__):
        return Site(name, was, False, "it is fused already, by another copy of this package")
    if isinstance(module, Swapped) or not may_be_a_norm(module, name):
        return None
    formula = recognise(module)
    if isinstance(formula, str):  # reported only where a reader of the lines would miss the norm
        return Site(name, was, False, formula) if looks_like_a_norm(module, name) else None
    if only is not None and not only(name, module):
        return Site(name, was, False, "`only` returned False for it")
    shown = {
        "normalized_shape": () if formula.width is None else (formula.width,),
        "elementwise_affine": formula.weight is not None, "zero_centered_weight": formula.zero_centered_weight,
    }  # fmt: skip
    try:
        swap(
            module, AdoptedNorm, MODULES[formula.norm], formula=formula, eps=formula.eps, dropout_p=0.0,
            **{name: value for name, value in shown.items() if name not in vars(module)},
        )  # fmt: skip
    except TypeError as error:
        return Site(name, was, False, f"Python can't give its class a subclass: {error}")
    return Site(name, was, True, str(formula))


def is_sharded(module: nn.Module) -> bool:
    """Whether fully_shard was called on it: its weights are there during its own forward alone."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


def _described(module: nn.Module) -> str:
    """LayerNorm(768): its class and width."""
    parameter = next(module.parameters(), None)
    shape: Any = getattr(module, "normalized_shape", None) if parameter is None or is_lazy(parameter) else parameter.shape
    return f"{_original_class(module).__name__}({', '.join(map(str, shape)) if isinstance(shape, tuple) else ''})"


def swap(module: nn.Module, forward: type[Swapped], *others: type, **attributes: Any) -> None:
    """Gives `module` a class made of `forward`, its own and `others`. Raises TypeError where Python can't, as with slots."""
    parts: list[Any] = [forward, type(module), *others]
    module.__class__ = _swapped_class(*parts)
    before = {name: value for name, value in module.__dict__.items() if name in attributes}
    module.__dict__.update(attributes, _before_swap=(tuple(attributes), before))


def unswap(module: Swapped) -> None:
    """Undoes `swap`. Raises ValueError if another tool has changed the class or the forward since."""
    original = _original_class(module)
    changed = "its forward" if "forward" in module.__dict__ else f"its class, to {type(module).__name__}"
    if "forward" in module.__dict__ or type(module) is not _swapped_class(*module._parts):
        raise ValueError(
            f"restore_norms: after a {original.__name__} was replaced, another tool changed {changed} (fully_shard, a "
            "parametrization, module.forward = …); undo that first"
        )
    names, before = module.__dict__.pop("_before_swap")
    for name in names:
        module.__dict__.pop(name, None)
    module.__dict__.update(before)
    module.__class__ = original


def _original_class(module: nn.Module) -> type:
    return module._parts[1] if isinstance(module, Swapped) else type(module)


@cache
def _swapped_class(forward: type, original: type, *others: type) -> type:
    # The original's methods go first, but a class can't stand before its own subclasses.
    first = [other for other in others if issubclass(other, original)] or [original]
    last = [other for other in others if not issubclass(other, original)]
    body = {
        "_parts": (forward, original, *others),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": forward.__doc__,
    }
    return types.new_class(original.__name__, (forward, *first, *last), {}, lambda space: space.update(body))


def _rebuild(*parts: type) -> Any:
    """A swapped module without attributes, for copies and pickles."""
    return object.__new__(_swapped_class(*parts))
