"""What can be done with a Lazy without computing it: additions, scales, dropout. Importing it sets them up."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dropout import seeded_dropout
from ..philox import draw_seed
from ..torch_state import is_eager
from .lazy import HANDLERS, Lazy, settled


def add(a: Any, b: Any, *, alpha: Any = 1, out: Any = None) -> Any:
    if out is not None or alpha != 1 or not (_addable(a) and _addable(b)) or a.shape != b.shape:
        return torch.add(settled(a), settled(b), alpha=alpha, **({} if out is None else {"out": out}))
    a, b = _open(a), _open(b)
    if not isinstance(a, Lazy) and not isinstance(b, Lazy):
        return a + b
    if _is_branch(a) and _is_branch(b) and _are_plain(a, b):
        return a.then(x1=b.x)
    if _is_stream(b) or (_is_branch(a) and not _is_branch(b)):
        a, b = b, a
    stream = a if _is_stream(a) else Lazy(residual=settled(a))
    branch = b if _is_branch(b) else Lazy(settled(b))
    if torch.promote_types(branch.dtype, stream.dtype) != stream.dtype:
        return stream.tensor() + branch.tensor()
    if stream.x is None:
        return branch.then(residual=stream.residual, residual_scale=stream.residual_scale)
    if _are_plain(stream, branch):
        return stream.then(x1=branch.x)
    return branch.then(residual=stream.tensor())


def _addable(x: Any) -> bool:
    return isinstance(x, Lazy) or (isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0)


def _open(x: Any) -> Any:
    """x, or its tensor where that is known, or where it was made with gradients and is used without, or the other way round."""
    if not isinstance(x, Lazy) or (x._had_grad == torch.is_grad_enabled() and (x._value is None or x.x is None)):
        return x
    return x.tensor()


def _is_stream(x: Any) -> bool:
    return isinstance(x, Lazy) and x.residual is not None


def _is_branch(x: Any) -> bool:
    return isinstance(x, Lazy) and x.residual is None


def _are_plain(a: Lazy, b: Lazy) -> bool:
    """Whether the kernel can add the branches of both to a residual."""
    return a.is_plain() and b.is_plain() and a.x.dtype == b.x.dtype  # type: ignore[union-attr]


def multiply(a: Any, b: Any, *, out: Any = None) -> Any:
    a, b = (_open(a), b) if isinstance(a, Lazy) else (_open(b), a)
    if isinstance(a, Lazy) and out is None and a.x1 is None:
        if isinstance(b, int | float) and not isinstance(b, bool) and math.isfinite(b):
            if a.residual is None:
                return a.then(scale=a.scale * b)
            if a.x is None:
                return a.then(residual_scale=a.residual_scale * b)
        elif _is_branch(a) and isinstance(b, Tensor) and b.is_floating_point() and b.device == a.device:
            if b.shape == a.shape[-1:] and not a.holds_weights():
                return a.then(branch_weight=b)
            if b.dim() == a.ndim and b.shape[-1] == 1 < a.shape[-1] and a.rowscale is None and _expands(b, a):
                return a.then(rowscale=b.squeeze(-1))
    return torch.mul(settled(a), settled(b), **({} if out is None else {"out": out}))


def _expands(b: Tensor, a: Lazy) -> bool:
    return all(n in (1, m) for n, m in zip(b.shape, a.shape, strict=True))


def divide(a: Any, b: Any, *, rounding_mode: Any = None) -> Any:
    if isinstance(b, int | float) and not isinstance(b, bool) and b != 0 and rounding_mode is None:
        return multiply(a, 1.0 / b)
    return torch.div(settled(a), settled(b), rounding_mode=rounding_mode)


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, seed: Tensor | None = None) -> Any:
    """seed: for `trial`. It is drawn here, so that everybody who computes the value drops the same elements."""
    if not training or p == 0.0:
        return input
    input = _open(input)
    if _is_branch(input) and input.dropout_p == 0.0 and input.x1 is None and p < 1.0:
        return input.then(dropout_p=p, seed=draw_seed(input.device, is_eager((input.x,))) if seed is None else seed)
    return F.dropout(settled(input), p) if seed is None else seeded_dropout(settled(input), p, seed)


def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    like = self.like()
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
