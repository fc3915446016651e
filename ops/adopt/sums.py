"""What can be done with Streams and Branches without computing them: additions, scales, dropout. Importing it sets them up."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .lazy import HANDLERS, Branch, Lazy, Stream, settled


def add(a: Any, b: Any, *, alpha: Any = 1, out: Any = None) -> Any:
    if out is not None or alpha != 1 or not (_addable(a) and _addable(b)) or a.shape != b.shape:
        return torch.add(settled(a), settled(b), alpha=alpha, **({} if out is None else {"out": out}))
    a, b = _of_this_mode(a), _of_this_mode(b)
    if not isinstance(a, Lazy) and not isinstance(b, Lazy):
        return a + b
    if isinstance(a, Branch) and isinstance(b, Branch):
        pair = _pair(a, b)
        return Stream(b.tensor(), a) if pair is None else pair
    if isinstance(b, Stream) and not isinstance(a, Stream):
        a, b = b, a  # the stream first
    elif isinstance(b, Branch):
        a, b = (Stream(a), b) if isinstance(a, Tensor) else (a, b)
    if isinstance(a, Branch):
        a, b = Stream(b), a
    if isinstance(a, Stream) and isinstance(b, Stream) and a.branch is None and b.branch is not None and b.factor == 1.0:
        a, b = b, a
    branch = b if isinstance(b, Branch) else Branch(b.tensor() if isinstance(b, Lazy) else b)
    dtype = a.residual.dtype
    if branch.dtype != dtype and torch.promote_types(branch.dtype, dtype) != dtype:
        return a.tensor() + branch.tensor()
    if a._value is None and a.branch is not None and not a.in_fp32 and (pair := _pair(a.branch, branch)) is not None:
        return Stream(a.residual, pair, a.factor)
    if a._value is None and a.branch is None and not a.in_fp32:  # scaled
        return Stream(a.residual, branch, a.factor)
    return Stream(a.tensor(), branch)


def _of_this_mode(x: Any) -> Any:
    """x, or its tensor if it was made where gradients were recorded and is used where they are not, or the other way round."""
    return x if not isinstance(x, Lazy) or x._had_grad == torch.is_grad_enabled() else x.tensor()


def _pair(a: Branch, b: Branch) -> Branch | None:
    """Both in one, where the kernel can add both to a residual."""
    plain = all((c.norm is None and c.more is None and not c._is_scaled()) or c._value is not None for c in (a, b))
    if not plain or a.dtype != b.dtype:
        return None
    return Branch(a.x if a._value is None else a._value, more=b.x if b._value is None else b._value)


def _addable(x: Any) -> bool:
    return isinstance(x, Lazy) or (isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0)


def multiply(a: Any, b: Any, *, out: Any = None) -> Any:
    a, b = (_of_this_mode(a), b) if isinstance(a, Lazy) else (_of_this_mode(b), a)
    number = isinstance(b, int | float) and not isinstance(b, bool) and math.isfinite(b)
    if isinstance(a, Stream) and number and out is None and a.branch is None and not a.in_fp32:
        return Stream(a.residual, factor=a.factor * b)
    if isinstance(a, Branch) and out is None and a._value is None and a.more is None:
        if number:
            return a.then(factor=a.factor * b)
        if isinstance(b, Tensor) and b.is_floating_point() and b.device == a.x.device:
            if b.shape == a.shape[-1:] and a.weight is None and a.norm is None:
                return a.then(weight=b)
            if b.dim() == a.ndim and b.shape[-1] == 1 < a.shape[-1] and a.rowscale is None and _expands(b, a):
                return a.then(rowscale=b.squeeze(-1))
    return torch.mul(settled(a), settled(b), **({} if out is None else {"out": out}))


def _expands(b: Tensor, a: Branch) -> bool:
    return all(n in (1, m) for n, m in zip(b.shape, a.shape, strict=True))


def divide(a: Any, b: Any, *, rounding_mode: Any = None) -> Any:
    if isinstance(b, int | float) and not isinstance(b, bool) and b != 0 and rounding_mode is None:
        return multiply(a, 1.0 / b)
    return torch.div(settled(a), settled(b), rounding_mode=rounding_mode)


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p == 0.0:
        return input
    input = _of_this_mode(input)
    if isinstance(input, Branch) and input._value is None and input.p == 0.0 and input.more is None and p < 1.0:
        return input.then(p=p)
    return F.dropout(settled(input), p, training)


def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    like = self._like()
    return self if like.to(*settled(args), **settled(kwargs)) is like else self.tensor().to(*settled(args), **settled(kwargs))


# add_ and mul_ are not among them: what they change in place is the value. `+=` gives its name another value in any case.
Lazy.add = Lazy.__add__ = Lazy.__iadd__ = add  # type: ignore[attr-defined, operator]
Lazy.__radd__ = lambda self, other: add(other, self)  # type: ignore[attr-defined]
Lazy.mul = Lazy.multiply = Lazy.__mul__ = Lazy.__rmul__ = Lazy.__imul__ = multiply  # type: ignore[attr-defined, operator]
Lazy.div = Lazy.__truediv__ = Lazy.__itruediv__ = divide  # type: ignore[attr-defined, operator]
Lazy.to = _to  # type: ignore[attr-defined]

HANDLERS |= {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__), add),
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__), multiply),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__), divide),
    F.dropout: dropout,
    torch.reshape: lambda x, shape: x.reshape(shape) if isinstance(x, Lazy) else torch.reshape(x, settled(shape)),
}
