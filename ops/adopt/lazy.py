"""Sums that are not computed yet, so that one kernel can compute them together with the norm that follows.

A block's own forward runs as it is written. Only its operands differ: a `Lazy` is the value

    dropout(rowscale · scale · weight · N(x)) + x1 + residual          each where it is there

It is a *branch* without a residual, as what a sublayer gives, and a *stream* with one. Branch + stream is a stream. A replaced
norm that gets a stream computes the sum and the norm in one kernel, and the stream keeps the sum. In everything else that a
program does with a Lazy, its value takes part: it is computed then. So whatever a program does, it computes what it computed
with tensors; at worst nothing is saved. The functions at the end are what needs no value: additions, scales, dropout.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dropout import seeded_dropout
from ..functional import norm_fn
from ..philox import draw_seed
from ..reference import Norm
from ..torch_state import is_eager, register_container

TRACE: list[Any] | None = None  # where `trial` reads which norms and sums were computed, of what
_METADATA = {"shape", "device", "ndim", "size", "dim", "numel", "is_floating_point", "is_nested", "new_empty"}


@dataclass(eq=False, repr=False)  # in which FSDP finds the tensors
class Lazy:
    """Takes part in a program as the tensor that it stands for. Most fields are arguments of `norm_fn`, which adds them up."""

    x: Tensor | None = None  # (..., N), of a sublayer
    residual: Tensor | None = None  # x's shape
    branch_norm: Any = None  # an AdoptedNorm, of x
    branch_weight: Tensor | None = None  # (N,)
    rowscale: Tensor | None = None  # x's shape but for the last dimension
    scale: float = 1.0
    dropout_p: float = 0.0
    seed: Tensor | None = None  # there with dropout_p
    x1: Tensor | None = None  # a second branch

    def __post_init__(self) -> None:
        self._had_grad = torch.is_grad_enabled()  # whether autograd records it
        self._value = self.residual if self.x is None else None

    def then(self, **what: Any) -> "Lazy":
        return Lazy(**({name: getattr(self, name) for name in Lazy.__dataclass_fields__} | what))

    def tensor(self) -> Tensor:
        """The value, computed at the first call, with gradients if a tensor would have been computed with them."""
        if self._value is not None:
            return self._value
        if self._had_grad == torch.is_grad_enabled():
            return self._keep(self.peek())
        check_outside_function(self)
        with torch.set_grad_enabled(self._had_grad):
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
        assert self.x is not None
        if TRACE is not None and self.residual is not None:
            TRACE.append((None, self.then()))
        if self.is_plain():
            return self.x if self.residual is None else self.residual + self.x
        options = {} if self.branch_norm is None else self.branch_norm.options(self.x.dtype)
        options |= {"out_dtype": self.dtype, "residual_in_fp32": self.dtype == torch.float32}
        return norm_fn(Norm.none, **self.arguments(), **options)  # type: ignore[return-value]

    def normed(self, norm: Any) -> Tensor:
        """An AdoptedNorm of it. A stream holds its sum afterwards."""
        x, residual = self.x, self.residual
        if self._value is not None or x is None or residual is None or self._had_grad != torch.is_grad_enabled():
            return norm.of_tensor(self.tensor())
        if TRACE is not None:
            TRACE.append((norm, self.then()))
        parts = self
        if residual.dtype is torch.float64 or not norm.goes_with(self):
            parts = Lazy(self.then(residual=None).tensor(), residual)
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
            "x": self.x, "residual": self.residual, "x1": self.x1,
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

    def to(self, *args: Any, **kwargs: Any) -> Any:
        like, how = self.like(), (settled(args), settled(kwargs))
        return self if like.to(*how[0], **how[1]) is like else self.tensor().to(*how[0], **how[1])

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
        if function in _HANDLERS:
            return _HANDLERS[function](*args, **(kwargs or {}))
        return function(*settled(args), **settled(kwargs or {}))

    def __copy__(self) -> Tensor:
        return self.tensor()


class Pending(Lazy):
    """A stream between two blocks. It stays what it is, so that activation checkpointing can run the next block twice."""

    def _keep(self, value: Tensor) -> Tensor:
        self._value = value
        return value


for _container in (Lazy, Pending):  # torch's tree functions find the tensors in it, as FSDP of torch 2.11 does
    register_container(_container, [*Lazy.__dataclass_fields__])


def settled(x: Any) -> Any:
    """x, with tensors in place of what is lazy in it; tuples, lists and dicts are looked through, and transformers' outputs."""
    if isinstance(x, Lazy):
        return x.tensor()
    if type(x) in (tuple, list):
        return type(x)([settled(y) for y in x])
    if type(x) is dict:
        return {name: settled(y) for name, y in x.items()}
    if isinstance(x, dict):  # a ModelOutput
        for name, y in list(x.items()):
            if (tensors := settled(y)) is not y:
                x[name] = tensors
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


# ---- without computing it --------------------------------------------------------------------------------------------------


def add(a: Any, b: Any, *, alpha: Any = 1, out: Any = None) -> Any:
    if out is not None or alpha != 1 or not (_addable(a) and _addable(b)) or a.shape != b.shape:
        return torch.add(settled(a), settled(b), alpha=alpha, **({} if out is None else {"out": out}))
    a, b = _open(a), _open(b)
    if not isinstance(a, Lazy) and not isinstance(b, Lazy):
        return a + b
    if _kind(b) > _kind(a):
        a, b = b, a
    if _kind(a) == _BRANCH and _are_plain(a, b):
        return a.then(x1=b.x)
    stream = a if _kind(a) == _STREAM else Lazy(residual=settled(a))
    branch = b if _kind(b) == _BRANCH else Lazy(settled(b))
    if torch.promote_types(branch.dtype, stream.dtype) != stream.dtype:
        return stream.tensor() + branch.tensor()
    if stream.x is not None and _are_plain(stream, branch):
        return stream.then(x1=branch.x)
    return branch.then(residual=stream.tensor())


def _addable(x: Any) -> bool:
    return isinstance(x, Lazy) or (isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0)


def _open(x: Any) -> Any:
    """x, or its tensor where that is known, or where it was made with gradients and is used without, or the other way round."""
    if not isinstance(x, Lazy) or (x._had_grad == torch.is_grad_enabled() and (x._value is None or x.x is None)):
        return x
    return x.tensor()


_BRANCH, _TENSOR, _STREAM = range(3)


def _kind(x: Any) -> int:
    return _TENSOR if not isinstance(x, Lazy) else _BRANCH if x.residual is None else _STREAM


def _are_plain(a: Lazy, b: Lazy) -> bool:
    """Whether the kernel can add the branches of both to a residual."""
    return a.is_plain() and b.is_plain() and a.x.dtype == b.x.dtype  # type: ignore[union-attr]


def multiply(a: Any, b: Any, *, out: Any = None) -> Any:
    a, b = (_open(a), b) if isinstance(a, Lazy) else (_open(b), a)
    if _kind(a) == _BRANCH and out is None and a.x1 is None:
        if isinstance(b, int | float) and not isinstance(b, bool) and math.isfinite(b):
            return a.then(scale=a.scale * b)
        if isinstance(b, Tensor) and b.is_floating_point() and b.device == a.device:
            if b.shape == a.shape[-1:] and not a.holds_weights():
                return a.then(branch_weight=b)
            of_rows = b.dim() == a.ndim and b.shape[-1] == 1 < a.shape[-1]
            if of_rows and a.rowscale is None and all(n in (1, m) for n, m in zip(b.shape, a.shape, strict=True)):
                return a.then(rowscale=b.squeeze(-1))
    return torch.mul(settled(a), settled(b), **({} if out is None else {"out": out}))


def divide(a: Any, b: Any, *, rounding_mode: Any = None) -> Any:
    if isinstance(b, int | float) and not isinstance(b, bool) and b != 0 and rounding_mode is None:
        return multiply(a, 1.0 / b)
    return torch.div(settled(a), settled(b), rounding_mode=rounding_mode)


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, seed: Tensor | None = None) -> Any:
    """seed: for `trial`. It is drawn here, so that everybody who computes the value drops the same elements."""
    if not training or p == 0.0:
        return input
    input = _open(input)
    if _kind(input) == _BRANCH and input.dropout_p == 0.0 and input.x1 is None and p < 1.0:
        return input.then(dropout_p=p, seed=draw_seed(input.device, is_eager((input.x,))) if seed is None else seed)
    return F.dropout(settled(input), p) if seed is None else seeded_dropout(settled(input), p, seed)


# Functions of torch that leave things uncomputed. add_ and mul_ are not among them: what they change in place is the value.
# `+=` gives its name another value in any case.
_HANDLERS: dict[Any, Callable] = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__), add),
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply), multiply),
    **dict.fromkeys((Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__), multiply),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__, Tensor.__itruediv__), divide),
    F.dropout: dropout,
    torch.reshape: lambda x, shape: x.reshape(shape) if isinstance(x, Lazy) else torch.reshape(x, settled(shape)),
}
_OPERATORS = """
add radd iadd sub rsub mul rmul imul truediv itruediv rtruediv floordiv mod pow rpow matmul rmatmul and or xor neg pos abs
invert eq ne lt le gt ge getitem setitem len iter bool int float index contains array deepcopy reduce_ex
"""


def _operator(name: str) -> Callable:
    handler = _HANDLERS.get(getattr(Tensor, name))
    return handler or (lambda self, *operands: getattr(self.tensor(), name)(*settled(operands)))


for _name in _OPERATORS.split():
    setattr(Lazy, f"__{_name}__", _operator(f"__{_name}__"))
Lazy.add, Lazy.mul, Lazy.multiply, Lazy.div = add, multiply, multiply, divide  # type: ignore[attr-defined]
