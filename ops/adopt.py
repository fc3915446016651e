"""The fused norms in a model that exists: in place of its own, and back.

    replace_norms(model)        h.0.ln_1: LayerNorm(768) → fused (LayerNorm, eps 1e-05)
    restore_norms(model)

A norm is recognised by what it computes (`recognise`). The module stays the same object with another class (`swap`), so
optimizers, checkpoints, hooks and references to it hold, and so do isinstance tests for what it was.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .functional import layer_norm_fn
from .modules import LayerNorm, RMSNorm
from .recognise import OUT_DTYPES, Formula, looks_like_a_norm, may_be_a_norm, recognise
from .swap import Swapped, original_class, swap, unswap


@dataclass(frozen=True)
class Site:
    """What became of one norm of a model."""

    name: str  # as model.named_modules() has it; of a shared module, its first
    was: str  # class and width
    fused: bool
    why: str  # the formula, or the reason why it was left alone

    def __str__(self) -> str:
        return f"{self.name}: {self.was} → {'fused' if self.fused else 'left alone'} ({self.why})"


def replace_norms(
    model: nn.Module, *, only: Callable[[str, nn.Module], bool] | None = None, verbose: bool = True
) -> list[Site]:
    """Lets every LayerNorm and RMSNorm of `model` run the fused kernels, in place.

    Taken are torch's own and every class that computes the same over the last dimension: Llama's, T5's and Qwen's RMSNorm,
    Gemma's with weight 1 + w. Which of them it is, and its eps, are measured on a clone; the module's name counts for nothing.
    Parameters stay the same objects under the same names. y has the dtype that the module gave it; inside, everything is fp32
    and rounded once. Calling it again changes nothing.

    A replaced norm also takes `residual` and `prenorm`, as `RMSNorm` does, and drops in training if its `dropout_p` is set.

    Args:
        model: any module, itself a norm perhaps; before DDP, FSDP or torch.compile are put around it, or after DDP.
        only: called with the name and the module of each norm; it is left alone if that returns False.
        verbose: print a line for each norm.

    Returns:
        A record for each norm, with those left alone and why. `str` of it is the printed line.

    Raises:
        TypeError: model is no module, or only no function.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"replace_norms: model must be a torch.nn.Module, got {type(model).__name__}")
    if only is not None and not callable(only):
        raise TypeError(f"replace_norms: only must be a function of a norm's name and module, got {only!r}")
    sites = [site for name, module in model.named_modules() if (site := _replace(name or "model", module, only)) is not None]
    return _told(sites, verbose)


def restore_norms(model: nn.Module, *, verbose: bool = True) -> list[str]:
    """Undoes `replace_norms`, and what `fuse_prenorm_block` did to blocks.

    Parameters keep their present values; `eps` is again what it was before, and so is whatever else came with the new class.

    Returns:
        A line for each module that has its own forward again.

    Raises:
        TypeError: model is no module.
        ValueError: another tool gave a module yet another class or forward since. Those before it in the model are restored.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"restore_norms: model must be a torch.nn.Module, got {type(model).__name__}")
    lines = []
    for name, module in model.named_modules():
        if isinstance(module, Swapped):
            unswap(module)
            lines.append(f"{name or 'model'}: {type(module).__name__} as it was")
    return _told(lines, verbose)


class Pending(NamedTuple):
    """What blocks in the (hidden, residual) form hand on where others hand on one tensor: their sum, not added up yet."""

    hidden: Tensor  # (..., N), the last sublayer's output
    residual: Tensor  # (..., N), the stream so far
    dropout_p: float  # what is still to be dropped of hidden

    def __getitem__(self, index: Any) -> Any:
        # Loops and hooks that take output[0] of whatever is a tuple would go on with half a stream, and nobody would know.
        raise TypeError(f"[{index!r}] {_NO_TENSOR}")

    def __add__(self, other: Any) -> Any:  # a tuple would take these for its own
        raise TypeError(f"+ {_NO_TENSOR}")

    def __radd__(self, other: Any) -> Any:
        return self + other

    def __mul__(self, other: Any) -> Any:
        raise TypeError(f"* {_NO_TENSOR}")

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f".{name} {_NO_TENSOR}" if hasattr(Tensor, name) else f"Pending has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{getattr(function, '__name__', function)} {_NO_TENSOR}")


_NO_TENSOR = (
    "of a Pending, which a fused block hands on: its stream is hidden + residual, not added up yet. Let the next fused block "
    "or a replaced norm have it: fuse every block of the stack, and replace_norms the model, whose final norm adds it up "
    "(output_hidden_states needs blocks that are not fused: restore_norms)"
)


class AdoptedNorm(Swapped):
    """A norm of somebody's model that runs `layer_norm_fn`."""

    formula: Formula
    eps: float | None  # the formula's, until somebody sets it, as with torch's norms
    dropout_p: float

    def forward(
        self,
        x: "Tensor | Pending | None" = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
        **by_name: Any,
    ) -> Any:
        """y (..., N), or with prenorm (y, the new residual stream).

        Args:
            x: (..., N), also under the name that the model's own forward had; or a Pending, which is dropped, added and normed.
            residual, prenorm, residual_in_fp32: as for `layer_norm_fn`.
        """
        formula = self.formula
        if x is None and formula.argument in by_name:
            x = by_name.pop(formula.argument)
        if x is None or by_name:
            raise TypeError(f"{type(self).__name__}: forward takes x, residual, prenorm, residual_in_fp32; got {[*by_name]}")
        dropout_p = self.dropout_p if self.training else 0.0
        if isinstance(x, Pending):
            if residual is not None:
                raise TypeError(f"{type(self).__name__}: x is a Pending, which has a residual, and residual was given")
            x, residual, dropout_p = x
        elif not isinstance(x, Tensor):
            raise TypeError(
                f"{type(self).__name__}: x must be a tensor or a Pending, got {type(x).__name__}"
                + "; reentrant activation checkpointing takes a Pending apart: pass use_reentrant=False" * isinstance(x, tuple)
            )
        if x.is_nested:  # whose shape not even a message could name
            raise ValueError(
                f"{type(self).__name__}: x is a nested tensor, expected a dense one; norm its values(), or restore this norm"
            )
        weight = None if formula.weight is None else getattr(self, formula.weight)
        return layer_norm_fn(
            x,
            weight,
            None if formula.bias is None else getattr(self, formula.bias),
            residual=residual,
            eps=torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps,
            dropout_p=dropout_p,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=formula.zero_centered_weight,
            is_rms_norm=formula.is_rms_norm,
            out_dtype=OUT_DTYPES[formula.out_dtype](x.dtype, x.dtype if weight is None else weight.dtype),
        )

    def extra_repr(self) -> str:
        width = "any width" if self.formula.width is None else str(self.formula.width)
        return f"{width}, {replace(self.formula, eps=self.eps)}, dropout_p={self.dropout_p}"


def _replace(name: str, module: nn.Module, only: Callable[[str, nn.Module], bool] | None) -> Site | None:
    if isinstance(module, AdoptedNorm | LayerNorm | RMSNorm):
        return Site(name, _described(module), False, "it is fused already")
    if isinstance(module, Swapped) or not may_be_a_norm(module, name):
        return None
    formula = recognise(module)
    if isinstance(formula, str):  # whoever reads the lines misses what looks like a norm, and nothing else
        return Site(name, _described(module), False, formula) if looks_like_a_norm(module, name) else None
    if only is not None and not only(name, module):
        return Site(name, _described(module), False, "`only` returned False for it")
    was = _described(module)
    attributes = {
        "normalized_shape": () if formula.width is None else (formula.width,),
        "eps": formula.eps,
        "elementwise_affine": formula.weight is not None,
        "zero_centered_weight": formula.zero_centered_weight,
        "dropout_p": 0.0,
    }
    try:
        swap(module, AdoptedNorm, RMSNorm if formula.is_rms_norm else LayerNorm, formula=formula, **attributes)
    except TypeError as error:
        return Site(name, was, False, f"Python can't give its class a subclass: {error}")
    return Site(name, was, True, str(formula))


def _described(module: nn.Module) -> str:
    """LayerNorm(768): its class and width."""
    parameter = next(module.parameters(), None)
    shape = getattr(module, "normalized_shape", None) if parameter is None else parameter.shape
    sizes = ", ".join(map(str, shape)) if isinstance(shape, tuple) else ""
    return f"{original_class(module).__name__}({sizes})"


def _told(lines: list, verbose: bool) -> list:
    if verbose:
        for line in lines:
            print(line)
    return lines
