"""Sums that are not computed yet, so that one kernel can compute them together with the norm that follows.

A block's own forward runs as it is written. Only its operands differ: a `Lazy` is the value

    dropout(rowscale · scale · weight · N(x)) + x1 + residual_scale · residual          each where it is there

It is a *branch* without a residual, as what a sublayer gives, and a *stream* with one. Branch + stream is a stream. A replaced
norm that gets a stream computes the sum and the norm in one kernel, and the stream keeps the sum. In everything else that a
program does with a Lazy, its value takes part: it is computed then. So whatever a program does, it computes what it computed
with tensors; at worst nothing is saved. `sums` says what needs no value.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..functional import norm_fn
from ..reference import Norm
from ..torch_state import register_container

TRACE: list[Any] | None = None  # where `trial` reads which norms and sums were computed, of what
HANDLERS: dict[Any, Callable] = {}  # functions of torch that leave things uncomputed, from `sums`
_METADATA = {"shape", "device", "ndim", "size", "dim", "numel", "is_floating_point", "is_nested", "new_empty"}


@dataclass(eq=False, repr=False)  # in which FSDP finds the tensors
class Lazy:
    """Takes part in a program as the tensor that it stands for. Most fields are arguments of `norm_fn`, which adds them up."""

    x: Tensor | None = None  # (..., N), of a sublayer
    residual: Tensor | None = None  # x's shape
    residual_scale: float = 1.0
    branch_norm: Any = None  # an AdoptedNorm, of x
    branch_weight: Tensor | None = None  # (N,)
    rowscale: Tensor | None = None  # x's shape but for the last dimension
    scale: float = 1.0
    dropout_p: float = 0.0
    seed: Tensor | None = None  # there with dropout_p
    x1: Tensor | None = None  # a second branch

    def __post_init__(self) -> None:
        self._had_grad = torch.is_grad_enabled()  # whether autograd records it
        self._value = self.residual if self.x is None and self.residual_scale == 1.0 else None

    def then(self, **what: Any) -> "Lazy":
        return Lazy(**({name: getattr(self, name) for name in Lazy.__dataclass_fields__} | what))

    def tensor(self) -> Tensor:
        """The value, computed at the first call, with gradients if a tensor would have been computed with them."""
        if self._value is not None:
            return self._value
        if self._had_grad != torch.is_grad_enabled():
            check_outside_function(self)
            with torch.set_grad_enabled(self._had_grad):
                return self._keep(self.peek())
        return self._keep(self.peek())

    def _keep(self, value: Tensor) -> Tensor:
        if self.residual is not None:  # what was added up is not held any longer
            Lazy.__init__(self, residual=value)
        self._value = value
        return value

    def peek(self) -> Tensor:
        """The value, which is computed once more later: for a hook that wants to see it and change nothing."""
        if self._value is not None:
            return self._value
        if self.x is None:
            assert self.residual is not None
            return self.residual * self.residual_scale
        if TRACE is not None and self.residual is not None:
            TRACE.append((None, self.then()))
        if not self.is_plain():
            options = {} if self.branch_norm is None else self.branch_norm.options(self.x.dtype)
            options |= {"out_dtype": self.dtype, "residual_in_fp32": self.dtype == torch.float32}
            return norm_fn(Norm.none, **self.arguments(), **options)  # type: ignore[return-value]
        if self.residual is None:
            return self.x
        return (self.residual if self.residual_scale == 1.0 else self.residual * self.residual_scale) + self.x

    def normed(self, norm: Any) -> Tensor:
        """An AdoptedNorm of it. A stream holds its sum afterwards."""
        x, residual = self.x, self.residual
        if self._value is not None or x is None or residual is None or self._had_grad != torch.is_grad_enabled():
            return norm.of_tensor(self.tensor())
        if TRACE is not None:
            TRACE.append((norm, self.then()))
        parts = self
        if residual.dtype is torch.float64 or not norm.goes_with(self):
            x = self.then(residual=None).tensor()
            parts = Lazy(x, residual, self.residual_scale)
        follows_x = torch.is_autocast_enabled(x.device.type) or residual.dtype == torch.float32 != x.dtype
        weight, bias = norm.weights()
        normed: Any = norm_fn(
            norm.formula.norm, **parts.arguments(), weight=weight, bias=bias, prenorm=True,
            out_dtype=norm.out_dtype(x.dtype if follows_x else residual.dtype), **norm.options(x.dtype),
        )  # fmt: skip
        y, value = normed
        self._keep(value)
        return y

    def arguments(self) -> dict[str, Any]:
        """Of `norm_fn`, which adds it up."""
        assert self.x is not None
        rowscale = self.rowscale
        if self.scale != 1.0:
            rowscale = self.x.new_ones(self.x.shape[:-1], dtype=torch.float32) if rowscale is None else rowscale
            rowscale = rowscale * self.scale
        found = {
            "x": self.x, "residual": self.residual, "residual_scale": self.residual_scale, "x1": self.x1,
            "rowscale": None if rowscale is None else rowscale.expand(self.x.shape[:-1]),
            "branch_weight": self.branch_weight, "dropout_p": self.dropout_p, "seed": self.seed,
        }  # fmt: skip
        if self.branch_norm is not None:
            weight, bias = self.branch_norm.weights()
            found |= {"branch_norm": self.branch_norm.formula.norm, "branch_weight": weight, "branch_bias": bias}
        return found

    def is_plain(self) -> bool:
        """Whether nothing is to be done to x before the add."""
        scaled = self.holds_weights() or self.rowscale is not None or self.scale != 1.0
        return not scaled and self.dropout_p == 0.0 and self.x1 is None

    def holds_weights(self) -> bool:
        return self.branch_norm is not None or self.branch_weight is not None

    @property
    def dtype(self) -> torch.dtype:
        if self.residual is not None:
            return self.residual.dtype
        dtypes = [t.dtype for t in (self.x, self.branch_weight, self.rowscale) if t is not None]
        return reduce(torch.promote_types, dtypes)

    def like(self) -> Tensor:
        """A tensor of its shape, dtype and device."""
        found = self.x if self.residual is None else self.residual
        return found if found is not None and found.dtype == self.dtype else self.tensor()

    def contiguous(self) -> Any:
        return self

    def view(self, *shape: Any, **how: Any) -> Any:
        if shape and isinstance(shape[0], torch.dtype):
            return self.tensor().view(*shape)
        return self.reshape(*shape, **how)

    def reshape(self, *shape: Any, **how: Any) -> Any:
        """Rows stay rows."""
        here = self.like()
        rows = here.reshape(*shape, **how)
        if rows.shape[-1:] != here.shape[-1:] or (self._value is not None and self._value is not self.residual):
            return self.tensor().reshape(*shape, **how)
        parts = {name: getattr(self, name) for name in ("x", "residual", "x1")}
        changed = {name: t if t is None else t.reshape(rows.shape) for name, t in parts.items()}
        if self.rowscale is not None:
            changed["rowscale"] = self.rowscale.expand(here.shape[:-1]).reshape(rows.shape[:-1])
        return self.then(**changed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, and neither has a tensor")
        return getattr(self.like() if name in _METADATA else self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in HANDLERS:
            return HANDLERS[function](*args, **(kwargs or {}))
        return function(*settled(args), **settled(kwargs or {}))

    def __copy__(self) -> Tensor:
        return self.tensor()


def _by_value(name: str) -> Callable:
    def operator(self: Lazy, *operands: Any) -> Any:
        return getattr(self.tensor(), name)(*settled(operands))

    return operator


_OPERATORS = """
sub rsub rtruediv floordiv mod pow rpow matmul rmatmul and or xor neg pos abs invert eq ne lt le gt ge getitem setitem len iter
bool int float index contains array deepcopy reduce_ex
"""
for _name in _OPERATORS.split():
    setattr(Lazy, f"__{_name}__", _by_value(f"__{_name}__"))


class Pending(Lazy):
    """A stream between two blocks. It stays what it is, so that activation checkpointing can run the next block twice."""

    def _keep(self, value: Tensor) -> Tensor:
        self._value = value
        return value


for _kind in (Lazy, Pending):  # torch's tree functions find the tensors in it, as FSDP of torch 2.11 does
    register_container(_kind, [*Lazy.__dataclass_fields__])


def settled(x: Any) -> Any:
    """x, with tensors in place of what is lazy in it; tuples, lists and dicts are looked through."""
    if isinstance(x, Lazy):
        return x.tensor()
    if type(x) in (tuple, list):
        return type(x)([settled(y) for y in x])
    if type(x) is dict:
        return {name: settled(y) for name, y in x.items()}
    return x


def check_outside_function(lazy: Lazy) -> None:
    """Raises TypeError in the forward of an autograd.Function that got it from outside: its gradient would be lost."""
    if torch.is_grad_enabled() or not lazy._had_grad or torch.compiler.is_compiling():
        return
    apply = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not apply:
        frame = frame.f_back
    if frame is not None:
        raise TypeError(
            f"an autograd.Function got a {type(lazy).__name__}, of which it would lose the gradient. Activation checkpointing "
            "around fused blocks needs use_reentrant=False; give any other Function the .tensor() of it, or restore_norms"
        )
