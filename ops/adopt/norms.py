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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..functional import norm_fn
from ..modules import MODULES
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
        if isinstance(module, Swapped):
            unswap(module)
            lines.append(f"{name or 'model'}: {type(module).__name__} as it was")
    if verbose:
        print("".join(f"{line}\n" for line in lines), end="")
    return lines


class Pending(NamedTuple):
    """A residual stream whose last sum is not computed yet: fused blocks hand it on where other blocks hand on a tensor."""

    hidden: Tensor  # (..., N), the last sublayer's output
    residual: Tensor  # (..., N), the stream so far
    dropout_p: float  # to be dropped of hidden before it is added

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f".{name} {_NO_TENSOR}" if hasattr(Tensor, name) else f"Pending has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{getattr(function, '__name__', function)} {_NO_TENSOR}")

    def _refuse(self, *operands: Any) -> Any:
        raise TypeError(f"[], + and * {_NO_TENSOR}")

    # A tuple has these: code that expects a tensor, or a tuple of one, would go on with half a stream.
    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = _refuse  # type: ignore[misc]


_NO_TENSOR = (
    "of a Pending, which a fused block hands on: its stream is hidden + residual, not added up yet. Let the next fused block "
    "or a replaced norm have it: fuse every block of the stack, and replace_norms the model, whose final norm adds it up "
    "(output_hidden_states needs blocks that are not fused: restore_norms)"
)


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
        x: "Tensor | Pending | None" = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
        **by_name: Any,
    ) -> Any:
        """y (..., N), or with prenorm (y, the new residual stream); arguments as for `norm_fn`.

        x is a tensor, also under the name that it has in the model's own forward, or a Pending: dropped, added and normed.
        """
        name, formula = type(self).__name__, self.formula
        x = by_name.pop(formula.argument, None) if x is None else x
        if x is None or by_name:
            raise TypeError(f"{name}: forward takes x, residual, prenorm, residual_in_fp32; got {[*by_name]}")
        dropout_p = self.dropout_p if self.training else 0.0
        if isinstance(x, Pending):
            if residual is not None:
                raise TypeError(f"{name}: x is a Pending, which has a residual, and residual was given")
            x, residual, dropout_p = x
        elif not isinstance(x, Tensor):
            raise TypeError(
                f"{name}: x must be a tensor or a Pending, got {type(x).__name__}"
                + "; reentrant activation checkpointing takes a Pending apart: pass use_reentrant=False" * isinstance(x, tuple)
            )
        if x.is_nested:  # checked here: the messages of `norm_fn` name shapes, and a nested tensor has none
            raise ValueError(f"{name}: x is a nested tensor, expected a dense one; norm its values(), or restore this norm")
        weight, bias = (None if p is None else getattr(self, p) for p in (formula.weight, formula.bias))
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        out_dtype = OUT_DTYPES[formula.out_dtype](x.dtype, x.dtype if weight is None else weight.dtype)
        return norm_fn(
            formula.norm, x, weight, bias, residual,
            eps=eps, dropout_p=dropout_p, prenorm=prenorm, residual_in_fp32=residual_in_fp32,
            zero_centered_weight=formula.zero_centered_weight, out_dtype=out_dtype,
        )  # fmt: skip

    def extra_repr(self) -> str:
        width = "any width" if self.formula.width is None else str(self.formula.width)
        return f"{width}, {replace(self.formula, eps=self.eps)}, dropout_p={self.dropout_p}"


def _replace(name: str, module: nn.Module, only: Callable[[str, nn.Module], bool] | None) -> Site | None:
    was = _described(module)
    if isinstance(module, (AdoptedNorm, *MODULES.values())):
        return Site(name, was, False, "it is fused already")
    if isinstance(module, Swapped) or not may_be_a_norm(module, name):
        return None
    formula = recognise(module)
    if isinstance(formula, str):  # reported only where a reader of the lines would miss the norm
        return Site(name, was, False, formula) if looks_like_a_norm(module, name) else None
    if only is not None and not only(name, module):
        return Site(name, was, False, "`only` returned False for it")
    try:
        swap(
            module, AdoptedNorm, MODULES[formula.norm], formula=formula, eps=formula.eps, dropout_p=0.0,
            normalized_shape=() if formula.width is None else (formula.width,),
            elementwise_affine=formula.weight is not None, zero_centered_weight=formula.zero_centered_weight,
        )  # fmt: skip
    except TypeError as error:
        return Site(name, was, False, f"Python can't give its class a subclass: {error}")
    return Site(name, was, True, str(formula))


def _described(module: nn.Module) -> str:
    """LayerNorm(768): its class and width."""
    parameter = next(module.parameters(), None)
    shape = getattr(module, "normalized_shape", None) if parameter is None else parameter.shape
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
    body = {"_parts": (forward, original, *others), "__module__": forward.__module__, "__doc__": forward.__doc__}
    return types.new_class(f"Fused{original.__name__}", (forward, *first, *last), {}, lambda space: space.update(body))


def _rebuild(*parts: type) -> Any:
    """A swapped module without attributes, for copies and pickles."""
    return object.__new__(_swapped_class(*parts))
