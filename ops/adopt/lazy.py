"""Outputs of sublayers that are not computed further yet, so that one kernel computes them together with the sum and the norm.

A block's own forward runs as it is written, and its stream is a tensor in every line. Between the line that calls a sublayer
and the line that adds its output to the stream, that output may be a `Lazy`:

    dropout(rowscale · scale · weight · N(x)) + x1                each where it is there

The addition computes the sum, which is a tensor again: in one kernel with the norm that the block calls on it, if `trial` has
seen that it does. What that norm will give then waits on the sum (`Ahead`), for as long as nobody changes the sum. In all else
that a program does with a Lazy, its value takes part, computed then. The functions at the end are what needs no value:
additions, scales, dropout.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dropout import seeded_dropout
from ..norm import norm_fn
from ..philox import draw_seed
from ..reference import Norm
from ..torch_state import has_hooks, is_eager

WATCH: Callable | None = None  # sees each norm and its x and y, and each sum and its result: for `trial`, and checks of rows
_APPLY = getattr(torch.autograd.Function.apply, "__code__", None)  # None: it is written in C++, as from PyTorch 2.15 on
_LOST = (
    "an autograd.Function got what a sublayer of a fused block gave, before its sum, and would lose its gradient. "
    "Where a flag of the block decides that: set the flag, then call adopt; or leave the block alone with only="
)
_METADATA = {"shape", "device", "ndim", "size", "dim", "numel", "is_floating_point", "is_nested", "new_empty"}


class Ahead(NamedTuple):
    """What `norm` will give of the tensor that this is an attribute of, computed with it."""

    norm: Any  # an AdoptedNorm
    y: Tensor
    state: tuple  # of the tensor and of autocast, see `_state`


def look_ahead(norm: Any, x: Tensor, out_dtype: torch.dtype, **parts: Any) -> Tensor:
    """The sum of x and these parts, which are arguments of `norm_fn`; what norm gives of the sum waits on it.

    The sum and the norm are one node of autograd's graph: its backward adds up the gradients of both in one kernel.
    """
    weight, bias = norm.weights()
    options = norm.options(x.dtype)
    normed: Any = norm_fn(norm.formula.norm, x, weight=weight, bias=bias, prenorm=True, out_dtype=out_dtype, **parts, **options)
    y, r = normed
    if torch.compiler.is_compiling():  # which gives no attributes to one of several results of an operator
        r = r.view(r.shape)
    r._ahead = Ahead(norm, y, _state(r))
    return r


def can_go_along(norm: Any) -> bool:
    """Whether a kernel may compute a norm before the block calls it: it is a replaced one, and nobody looks at it."""
    return hasattr(norm, "formula") and not has_hooks(norm) and norm.has_own_forward()


def take_ahead(norm: Any, x: Tensor) -> Tensor | None:
    """What waits on x, or on the sum that x has the rows of, if it is of this norm and nobody has changed x since."""
    r: Any = x
    ahead = getattr(x, "_ahead", None)
    if ahead is None and not torch.compiler.is_compiling() and x._base is not None:
        r, ahead = x._base, getattr(x._base, "_ahead", None)
    if ahead is None or ahead.norm is not norm or ahead.state != _state(r) or not has_rows_of(x, r):
        return None
    r._ahead = None
    return ahead.y if r is x else ahead.y.view(x.shape)


def has_rows_of(x: Tensor, r: Tensor) -> bool:
    """Whether x is r, or a view of it in which each row is one of r. `view` alone has made it: an autograd.Function that gives
    a view may change the gradient."""
    if x is r:
        return True
    if x._base is None or (x._base is not r and x._base is not r._base) or x.requires_grad != r.requires_grad:
        return False
    if x.shape[-1:] != r.shape[-1:] or x.numel() != r.numel() or not x.is_contiguous():
        return False
    made_by, of = x.grad_fn, r.grad_fn
    return made_by is None or (made_by.name().startswith("ViewBackward") and made_by.next_functions[0][0] is of)


def _state(x: Tensor) -> tuple:
    # In a compiled graph nobody but the block changes it, and the trial has seen the block.
    version = 0 if torch.compiler.is_compiling() or x.is_inference() else x._version
    return version, autocasts(x.device)


def autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


@dataclass(eq=False, repr=False)
class Lazy:
    """Takes part in a program as the tensor that it stands for. Most fields are arguments of `norm_fn`, which adds them up."""

    x: Tensor  # (..., N), of a sublayer
    role: Any = None  # the `blocks.Role` of what made it
    next_norm: Any = None  # the AdoptedNorm that will be called on the sum that this goes into
    branch_norm: Any = None  # an AdoptedNorm, of x
    branch_weight: Tensor | None = None  # (N,)
    rowscale: Tensor | None = None  # x's shape but for the last dimension
    scale: float = 1.0
    dropout_p: float = 0.0
    seed: Tensor | None = None  # there with dropout_p
    x1: Tensor | None = None  # a second branch
    x1_role: Any = None  # the `blocks.Role` of that
    residual: Tensor | None = None  # x's shape; there where a second branch is to come

    def __post_init__(self) -> None:
        self._had_grad = torch.is_grad_enabled()  # whether autograd records it
        self._value: Tensor | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # An autograd.Function asks each argument for it, and takes what is no tensor for a constant.
        if sys._getframe(1).f_code is _APPLY:
            raise TypeError(_LOST)
        return type(self)

    def then(self, **what: Any) -> "Lazy":
        return Lazy(**({name: getattr(self, name) for name in Lazy.__dataclass_fields__} | what))

    def tensor(self) -> Tensor:
        """The value. It is computed at the first call, with gradients if a tensor would have been computed with them."""
        if self._value is not None:
            return self._value
        if self._had_grad and not torch.is_grad_enabled():
            if _APPLY is None and _in_function():
                raise TypeError(_LOST)
            return self._compute()
        if self._had_grad != torch.is_grad_enabled():
            with torch.no_grad():
                self._value = self._compute()
        else:
            self._value = self._compute()
        return self._value

    def _compute(self) -> Tensor:
        if self.is_only_normed():
            return self.branch_norm.of_tensor(self.x)
        if self.is_plain() and (self.x1 is None or self.residual is None):
            others = [t for t in (self.x1, self.residual) if t is not None]
            return others[0] + self.x if others else self.x
        options = {} if self.branch_norm is None else self.branch_norm.options(self.x.dtype)
        options |= {"out_dtype": self.dtype, "residual_in_fp32": self.dtype == torch.float32}
        return norm_fn(Norm.none, **self._arguments(), **options)  # type: ignore[return-value]

    def summed(self) -> Tensor:
        """With a residual: the sum, and the norm behind it if there is one."""
        norm, residual = self.next_norm, self.residual
        assert residual is not None
        in_graph = torch.compiler.is_compiling()  # where nobody can tell of what a tensor is a view
        if norm is None or not can_go_along(norm) or (in_graph and self.role.viewed):
            r = self.tensor()  # a hook gets the sum before the norm, with its whole gradient
        else:
            parts = self
            if residual.dtype is torch.float64 or not norm.goes_with(self):
                parts = Lazy(self.then(residual=None).tensor(), residual=residual)
            dtype = residual.dtype
            if self.role.follows and (autocasts(self.x.device) or dtype == torch.float32 != self.x.dtype):
                dtype = self.x.dtype
            r = look_ahead(norm, out_dtype=norm.out_dtype(dtype), **parts._arguments())
        if WATCH is not None:
            WATCH(self, r)
        return r

    def _arguments(self) -> dict[str, Any]:
        """Of `norm_fn`, which adds it up."""
        rowscale, gain = self.rowscale, self.branch_weight
        if self.scale != 1.0 and self.branch_norm is None:
            gain = self.x.new_full(self.x.shape[-1:], self.scale, dtype=torch.float32) if gain is None else gain * self.scale
        elif self.scale != 1.0:
            rowscale = self.x.new_ones(self.x.shape[:-1], dtype=torch.float32) if rowscale is None else rowscale
            rowscale = rowscale * self.scale
        found = {
            "x": self.x, "residual": self.residual, "x1": self.x1,
            "rowscale": None if rowscale is None else rowscale.expand(self.x.shape[:-1]),
            "branch_weight": gain, "dropout_p": self.dropout_p, "seed": self.seed,
        }  # fmt: skip
        if self.branch_norm is not None:
            weight, bias = self.branch_norm.weights()
            found |= {"branch_norm": self.branch_norm.formula.norm, "branch_weight": weight, "branch_bias": bias}
        return found

    def is_only_normed(self) -> bool:
        return self.branch_norm is not None and self.then(branch_norm=None).is_plain() and self.x1 is None is self.residual

    def transpose(self, a: int, b: int) -> Any:
        rows_stay = not {a, b} & {-1, self.x.dim() - 1}
        if rows_stay and self.is_only_normed():
            return self.then(x=self.x.transpose(a, b))
        return self.tensor().transpose(a, b)

    def is_plain(self) -> bool:
        """Whether nothing is to be done to x before the add."""
        return not self.holds_weights() and self.rowscale is None and self.scale == 1.0 and self.dropout_p == 0.0

    def holds_weights(self) -> bool:
        return self.branch_norm is not None or self.branch_weight is not None

    @property
    def dtype(self) -> torch.dtype:
        if self.residual is not None:
            return self.residual.dtype
        if self.branch_norm is not None and self.is_only_normed():
            return self.branch_norm.out_dtype(self.x.dtype)
        dtypes = [t.dtype for t in (self.x, self.branch_weight, self.rowscale) if t is not None]
        return reduce(torch.promote_types, dtypes)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        like = self.x if self.x.dtype == self.dtype else self.tensor()
        return self if like.to(*args, **kwargs) is like else self.tensor().to(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, and neither has a tensor")
        return getattr(self.x if name in _METADATA else self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _HANDLERS:
            return _HANDLERS[function](*args, **(kwargs or {}))
        return function(*settled(args), **settled(kwargs or {}))

    def __copy__(self) -> Tensor:
        return self.tensor()


def _in_function() -> bool:
    """Whether the innermost `forward` that runs is not that of a module, so that of an autograd.Function."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "forward":
        frame = frame.f_back
    return frame is not None and not isinstance(next(iter(frame.f_locals.values()), None), torch.nn.Module)


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


# ---- without computing it --------------------------------------------------------------------------------------------------


def add(a: Any, b: Any, *, alpha: Any = 1, out: Any = None) -> Any:
    a, b = _open(a), _open(b)
    if out is not None or alpha != 1 or not (_addable(a) and _addable(b)) or a.shape != b.shape:
        return torch.add(*settled((a, b)), alpha=alpha, **({} if out is None else {"out": out}))
    a, b = (a, b) if isinstance(a, Lazy) else (b, a)
    if not isinstance(a, Lazy):
        return a + b
    if isinstance(b, Lazy):
        if not (a.is_plain() and b.is_plain() and a.x.dtype == b.x.dtype and a.x1 is None and b.x1 is None):
            return a.tensor() + b.tensor() if b.residual is None else add(b, a.tensor())
        both = a.then(
            x1=b.x,
            x1_role=a.role,
            role=b.role,
            next_norm=b.next_norm,
            residual=b.residual if a.residual is None else a.residual,
        )
        return both.summed() if both.residual is not None else both
    if a.residual is not None or torch.promote_types(a.dtype, b.dtype) != b.dtype:
        return a.tensor() + b
    total = a.then(residual=b)
    return total if a.x1 is None and a.role is not None and a.role.waits else total.summed()


def _addable(x: Any) -> bool:
    return isinstance(x, Lazy) or (isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0)


def _open(x: Any) -> Any:
    """x, or its tensor where that is known, or where it was made with gradients and is used without, or the other way round."""
    if not isinstance(x, Lazy) or (x._had_grad == torch.is_grad_enabled() and x._value is None):
        return x
    return x.tensor()


def _is_branch(x: Any) -> bool:
    return isinstance(x, Lazy) and x.residual is None and x.x1 is None


def multiply(a: Any, b: Any, *, out: Any = None) -> Any:
    a, b = (_open(a), b) if isinstance(a, Lazy) else (_open(b), a)
    if _is_branch(a) and out is None:
        if isinstance(b, int | float) and not isinstance(b, bool) and math.isfinite(b):
            return a.then(scale=a.scale * b)
        if isinstance(b, Tensor) and b.is_floating_point() and b.device == a.device:
            if b.shape == a.shape[-1:] and not a.holds_weights():
                return a.then(branch_weight=b)
            of_rows = b.dim() == a.ndim and b.shape[-1] == 1 < a.shape[-1]
            if of_rows and a.rowscale is None and all(n in (1, m) for n, m in zip(b.shape, a.shape, strict=True)):
                return a.then(rowscale=b.squeeze(-1))
    return torch.mul(*settled((a, b)), **({} if out is None else {"out": out}))


def divide(a: Any, b: Any, *, rounding_mode: Any = None) -> Any:
    if isinstance(b, int | float) and not isinstance(b, bool) and b != 0 and rounding_mode is None:
        return multiply(a, 1.0 / b)
    return torch.div(*settled((a, b)), rounding_mode=rounding_mode)


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, seed: Tensor | None = None) -> Any:
    """seed: for `trial`. It is drawn here, so that everybody who computes the value drops the same elements."""
    if not training or p == 0.0:
        return input
    input = _open(input)
    if _is_branch(input) and input.dropout_p == 0.0 and p < 1.0:
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
