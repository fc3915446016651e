"""Outputs of sublayers that are not computed further yet, so that one kernel computes them together with the sum and the norm.

A block's own forward runs as it is written, and its stream is a tensor in every line. Between the line that calls a sublayer
and the line that adds its output to the stream, that output may be a `Lazy`:

    dropout(rowscale · scale · weight · N(x)) + x1                each where it is there
    gate ⊙ x                                                      gate: a row for each sample

The addition computes the sum, which is a tensor again: in one kernel with the norm that the block calls on it, if `trial` has
seen that it does. What that norm will give then waits on the sum (`Ahead`), for as long as nobody changes the sum. A norm whose
output gets a scale and a shift for each sample gives a Lazy too: gate ⊙ N(x), where the gate is 1 + scale, until the shift. In
all else that a program does with a Lazy, its value takes part, computed then. The functions at the end are what needs no value:
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

from ..checks import KERNEL_DTYPES
from ..dropout import seeded_dropout
from ..modulated import MOST_COLUMNS, gated_sum
from ..norm import norm_fn
from ..philox import draw_seed
from ..reference import Norm
from ..torch_state import has_hooks, is_eager, product_dtype, saved_through

WATCH: Callable | None = None  # sees each norm and its x and y, and each sum and its result: for `trial`, and checks of rows
_LOST = (
    "an autograd.Function got what a sublayer of a fused block gave, before its sum, and would lose its gradient. "
    "Where a flag of the block decides that: set the flag, then call adopt; or leave the block alone with only="
)
_METADATA = {"device", "ndim", "size", "dim", "numel", "is_floating_point", "is_nested", "new_empty"}


class Ahead(NamedTuple):
    """What `norm` will give of the tensor that this is an attribute of, computed with it."""

    norm: Any  # an AdoptedNorm
    y: Tensor
    state: tuple  # of the tensor and of autocast, see `_state`


def look_ahead(norm: Any, x: Tensor, out_dtype: torch.dtype, parts: dict[str, Any]) -> Tensor:
    """The sum of x and these parts, which are arguments of `norm_fn`; what norm gives of the sum waits on it.

    The sum and the norm are one node of autograd's graph: its backward adds up the gradients of both in one kernel.
    """
    if "gate" in parts:
        y, r = norm.modulated(x, **parts, prenorm=True, out_dtype=out_dtype)
    else:
        weight, bias = norm.weights()
        options = norm.options(x.dtype)
        normed: Any = norm_fn(norm.formula.norm, x, weight, bias, **parts, **options, prenorm=True, out_dtype=out_dtype)
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
    if ahead is None:
        if torch.compiler.is_compiling() or x._base is None:
            return None
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
    # In a compiled graph nobody but the block changes it, and the trial has seen the block. A part in a checkpoint of its own
    # takes nothing from before it: it would save other tensors when it is computed again.
    compiling = torch.compiler.is_compiling()
    version = 0 if compiling or x.is_inference() else x._version
    is_watched = not compiling and bool(x._backward_hooks or x.retains_grad)  # by whom the whole gradient is to pass
    return version, is_watched, torch.is_grad_enabled(), autocasts(x.device), saved_through()


def autocasts(device: torch.device) -> bool:
    kind = device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def under_autocast(norm: Any, dtype: torch.dtype, stream: Tensor, follows: bool) -> torch.dtype:
    """In which dtype a norm of an fp32 stream gives what it would give in this one: that of the matrix products behind it, as
    autocast would convert it for each of them. A norm that ends in fp32 whatever it gets is meant to. follows: of a `Role`."""
    follows = follows and stream.dtype is dtype is torch.float32 and norm.formula.out_dtype != "float32"
    return product_dtype(stream) if follows else dtype


@dataclass
class Role:
    """Of a part whose output goes into a sum."""

    path: str = ""
    takes: bool = False  # the part computes its output from a Lazy: a dropout, drop path, layer scale or norm
    scales: bool = False  # what it gives is to be computed when it has got its gate: no shift follows
    next_norm: str = ""  # path of the norm that is called on the sum
    viewed: bool = False  # it is called on a view of the sum
    waits: bool = False  # the sum gets another branch
    follows: bool = True  # what the norm gives may take the branch's dtype, or autocast's, where the sum is in fp32
    passes: tuple[str, ...] = ()  # paths of the modules that the output goes through before it is added


_NO_ROLES = (Role(),)  # of a Lazy that no part of a block gives


class Lazy:
    """Takes part in a program as the tensor that it stands for."""

    def __init__(
        self, x: Tensor, roles: tuple = (), next_norm: Any = None, past: dict | None = None, parts: dict | None = None,
        residual: Tensor | None = None, x1: Tensor | None = None,
    ) -> None:  # fmt: skip
        """x: (..., N), of a sublayer; roles: the `Role` of what made it, and that of what made x1; next_norm: the AdoptedNorm
        that will be called on the sum that this goes into; past: of streams that were normed in this call of the block, see
        `modulated`; parts: what is to be done to x, as arguments of `norm_fn` but for branch_norm, an AdoptedNorm, scale, a
        number, and gate, see `per_sample`; residual: x's shape, there where a second branch is to come; x1: a second branch."""
        self.x, self.roles, self.next_norm, self.past, self.parts = x, roles or _NO_ROLES, next_norm, past, parts or {}
        self.residual, self.x1 = residual, x1
        self._had_grad = torch.is_grad_enabled()  # whether autograd records it
        self._value: Tensor | None = None

    def then(self, **parts: Any) -> "Lazy":
        """A branch to which more is to be done."""
        return Lazy(self.x, self.roles, self.next_norm, self.past, self.parts | parts)

    def but(self, **arguments: Any) -> "Lazy":
        """The same with others of these arguments."""
        names = ("x", "roles", "next_norm", "past", "parts", "residual", "x1")
        return Lazy(**{name: getattr(self, name) for name in names} | arguments)

    def tensor(self) -> Tensor:
        """The value. It is computed at the first call, with gradients if a tensor would have been computed with them."""
        if self._value is None:
            if self._had_grad and not torch.is_grad_enabled():
                if not torch.compiler.is_compiling() and _in_function():  # which has taken it for a constant
                    raise TypeError(_LOST)
                return self._plus(self.residual)
            with torch.set_grad_enabled(self._had_grad):
                self._value = self._plus(self.residual)
        return self._value

    def _plus(self, residual: Tensor | None) -> Tensor:
        x, parts, norm = self.x, self.parts, self.parts.get("branch_norm")
        if "gate" in parts:
            if norm is not None:
                if residual is None:
                    return self.modulated()
                x = norm.of_tensor(x)
            if residual is not None and residual.dtype in KERNEL_DTYPES:
                return gated_sum(x, residual, parts["gate"])
            return x * parts["gate"] if residual is None else residual + x * parts["gate"]
        if not parts and (self.x1 is None or residual is None):
            other = residual if self.x1 is None else self.x1
            return x if other is None else other + x
        if residual is None and self.is_only_normed():
            return parts["branch_norm"].of_tensor(x)
        options, dtype = {} if norm is None else norm.options(x.dtype), self.dtype if residual is None else residual.dtype
        arguments = self._arguments(residual)
        return norm_fn(Norm.none, x, **arguments, **options, out_dtype=dtype, residual_in_fp32=dtype is torch.float32)  # type: ignore[return-value]

    def modulated(self, shift: Tensor | None = None) -> Tensor:
        """gate ⊙ N(x) + shift, in one kernel.

        Its node in autograd's graph gives the stream again. A sum that the block adds to the stream takes it from there, so one
        kernel adds up both gradients of the stream."""
        x, norm, gate = self.x, self.parts["branch_norm"], self.parts["gate"]
        dtype = norm.out_dtype(x.dtype)
        if dtype is not torch.float32:  # which no gate or shift widens
            dtype = reduce(torch.promote_types, [t.dtype for t in (gate, shift) if t is not None], dtype)
        dtype = under_autocast(norm, dtype, x, self.roles[0].follows)
        prenorm = self.past is not None and torch.is_grad_enabled() and x.requires_grad
        y = norm.modulated(x, gate, shift, prenorm=prenorm, out_dtype=dtype)
        if prenorm:
            y, r = y
            self.past[id(x)] = x, r, x._version  # type: ignore[index]  # with x, whose id is nobody else's then
        if WATCH is not None:
            WATCH(self, y)
        return y

    def summed(self, residual: Tensor) -> Tensor:
        """The sum with the stream, and the norm behind it if there is one."""
        norm, of, stream = self.next_norm, self, residual
        past: Any = self.past and self.past.get(id(stream))
        if past and past[-1] == stream._version:
            residual = past[1]
        # In a graph, nobody can tell of what a tensor is a view.
        if norm is None or not can_go_along(norm) or (self.roles[0].viewed and torch.compiler.is_compiling()):
            r = self._plus(residual)  # a hook gets the sum before the norm, with its whole gradient
        else:
            if residual.dtype is torch.float64 or self.is_modulated() or not norm.goes_with(self):
                of = Lazy(self._plus(None))
            follows, dtype = self.roles[0].follows, residual.dtype
            dtype = norm.out_dtype(self.x.dtype if follows and dtype is torch.float32 else dtype)
            r = look_ahead(norm, of.x, under_autocast(norm, dtype, residual, follows), of._arguments(residual))
        if WATCH is not None:
            WATCH(self.but(residual=stream), r)
        return r

    def _arguments(self, residual: Tensor | None) -> dict[str, Any]:
        """Of `norm_fn`, which adds it up, beside x."""
        if "gate" in self.parts:
            return {"gate": self.parts["gate"], "residual": residual}
        found = {**self.parts, "residual": residual, "x1": self.x1}
        norm, scale = found.pop("branch_norm", None), found.pop("scale", 1.0)
        if norm is not None:
            weight, bias = norm.weights()
            found |= {"branch_norm": norm.formula.norm, "branch_weight": weight, "branch_bias": bias}
        if scale != 1.0:
            name, shape = ("branch_weight", self.x.shape[-1:]) if norm is None else ("rowscale", self.x.shape[:-1])
            given = found.get(name)
            found[name] = self.x.new_full(shape, scale, dtype=torch.float32) if given is None else given * scale
        if "rowscale" in found:
            found["rowscale"] = found["rowscale"].expand(self.x.shape[:-1])
        return found

    def is_open(self) -> bool:
        """Whether it is not computed yet, nor made with gradients and used without, or the other way round."""
        return self._value is None and self._had_grad == torch.is_grad_enabled()

    def is_branch(self) -> bool:
        """Whether more can be done to it: nothing is added yet, and it has no gate."""
        return self.residual is None and self.x1 is None and "gate" not in self.parts

    def is_only_normed(self) -> bool:
        return len(self.parts) == 1 and "branch_norm" in self.parts and self.is_branch()

    def is_modulated(self) -> bool:
        return "branch_norm" in self.parts and "gate" in self.parts

    def transpose(self, a: int, b: int) -> Any:
        rows_stay = not {a, b} & {-1, self.x.dim() - 1}
        if rows_stay and self.is_only_normed():
            return self.but(x=self.x.transpose(a, b))
        return self.tensor().transpose(a, b)

    def float(self) -> Any:
        return self.tensor().float() if self.parts or not self.is_branch() else self.but(x=self.x.float())

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        if self.residual is not None:
            return self.residual.dtype
        if not self.parts:
            return self.x.dtype
        if self.is_only_normed():
            return self.parts["branch_norm"].out_dtype(self.x.dtype)
        dtype = self.x.dtype
        for name in ("branch_weight", "rowscale", "gate"):
            if name in self.parts:
                dtype = torch.promote_types(dtype, self.parts[name].dtype)
        return dtype

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, and neither has a tensor")
        return getattr(self.x if name in _METADATA else self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(function)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
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
    if out is not None or alpha != 1:
        return torch.add(*settled((a, b)), alpha=alpha, out=out)
    if isinstance(a, Lazy):
        if isinstance(b, Lazy):
            return _added(a, b)
        a, b = b, a
    if not isinstance(b, Lazy):
        return a + b
    if isinstance(a, Tensor) and b.residual is None and a.is_floating_point() and b.is_open():
        if a.shape == b.x.shape:
            if (dtype := b.dtype) is a.dtype or torch.promote_types(dtype, a.dtype) is a.dtype:
                return b.but(residual=a) if b.x1 is None and b.roles[0].waits else b.summed(a)
        elif b.is_modulated() and per_sample(a, b.x):
            return b.modulated(a)  # of one token a sample, a shift can't be told from a stream
    return a + b.tensor()


def _added(a: Lazy, b: Lazy) -> Any:
    if not (a.is_open() and b.is_open()):
        return add(*[t if t.is_open() else t.tensor() for t in (a, b)])
    is_bare = not (a.parts or b.parts) and a.x1 is b.x1 is None and (a.residual is None or b.residual is None)
    if not is_bare or a.x.dtype != b.x.dtype or a.shape != b.shape:
        return a.tensor() + b.tensor()
    residual = a.residual if b.residual is None else b.residual
    both = a.but(roles=b.roles + a.roles, next_norm=b.next_norm, residual=None, x1=b.x)
    return both if residual is None else both.summed(residual)


def multiply(a: Any, b: Any, *, out: Any = None) -> Any:
    branch, by = (a, b) if isinstance(a, Lazy) else (b, a)
    if out is None and isinstance(branch, Lazy) and branch.is_branch() and branch.is_open():
        if isinstance(by, Tensor):
            if (product := _scaled(branch, by)) is not None:
                return product
        elif isinstance(by, int | float) and not isinstance(by, bool) and math.isfinite(by):
            if by == 1:  # as a configuration's factors are that are off
                return branch
            return branch.then(scale=branch.parts.get("scale", 1.0) * by)
    return torch.mul(*settled((a, b)), out=out)


def _scaled(branch: Lazy, by: Tensor) -> Any:
    """Their product, if that can wait: with what is one for each sample, a layer scale, or a row's factor of drop path."""
    x, parts, roles = branch.x, branch.parts, branch.roles
    if by.device != x.device:
        return None
    if per_sample(by, x):
        if parts and not (len(parts) == 1 and "branch_norm" in parts and parts["branch_norm"].can_be_modulated()):
            branch = Lazy(branch.tensor(), roles, branch.next_norm, branch.past)
        gated = branch.then(gate=by)
        return gated.tensor() if roles[0].scales else gated
    shape, of = by.shape, x.shape
    if not by.is_floating_point():
        return None
    if shape == of[-1:]:
        return None if "branch_norm" in parts or "branch_weight" in parts else branch.then(branch_weight=by)
    of_rows = len(shape) == len(of) and shape[-1] == 1 < of[-1] and all(n in (1, m) for n, m in zip(shape, of, strict=True))
    return branch.then(rowscale=by.squeeze(-1)) if of_rows and "rowscale" not in parts else None


def per_sample(v: Tensor, x: Tensor) -> bool:
    """Whether v has a row for each sample of x, as the kernels take scale, shift and gate: (B, 1, N) beside (B, tokens, N)."""
    shape, of = v.shape, x.shape
    n = len(of) - 2  # the last dimension that may count samples
    if n < 0 or len(shape) != n + 2 or shape[n] != 1 or shape[-1] != of[-1] or of[-1] > MOST_COLUMNS:
        return False
    while n >= 0 and shape[n] == 1:
        n -= 1
    while n >= 0 and shape[n] == of[n]:
        n -= 1
    return n < 0 and v.dtype in KERNEL_DTYPES and x.dtype in KERNEL_DTYPES


def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1, out: Any = None) -> Any:
    if value != 1 or out is not None:
        return torch.addcmul(*settled((input, tensor1, tensor2)), value=value, out=out)
    return add(input, multiply(tensor1, tensor2))


def divide(a: Any, b: Any, *, rounding_mode: Any = None) -> Any:
    if isinstance(b, int | float) and not isinstance(b, bool) and b != 0 and rounding_mode is None:
        return multiply(a, 1.0 / b)
    return torch.div(*settled((a, b)), rounding_mode=rounding_mode)


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, seed: Tensor | None = None) -> Any:
    """seed: for `trial`. It is drawn here, so that everybody who computes the value drops the same elements."""
    if not training or p == 0.0:
        return input
    waits = isinstance(input, Lazy) and input.is_branch() and input.is_open() and "dropout_p" not in input.parts
    if waits and p < 1.0 and not inplace:
        if seed is None:
            seed = draw_seed(input.x.device, is_eager((input.x,)))
        return input.then(dropout_p=p, seed=seed)
    return F.dropout(settled(input), p, inplace=inplace) if seed is None else seeded_dropout(settled(input), p, seed)


# Functions of torch that leave things uncomputed. add_ and mul_ are not among them: what they change in place is the value.
# `+=` gives its name another value in any case.
_HANDLERS: dict[Any, Callable] = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__), add),
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply), multiply),
    **dict.fromkeys((Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__), multiply),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__, Tensor.__itruediv__), divide),
    **dict.fromkeys((torch.addcmul, Tensor.addcmul), addcmul),
    F.dropout: dropout,
}
_OPERATORS = """
add radd iadd sub rsub mul rmul imul truediv itruediv rtruediv floordiv mod pow rpow matmul rmatmul and or xor neg pos abs
invert eq ne lt le gt ge getitem setitem len iter bool int float index contains array deepcopy reduce_ex
"""


def _operator(name: str) -> Callable:
    handler = _HANDLERS.get(getattr(Tensor, name))
    return handler or (lambda self, *operands: getattr(self.tensor(), name)(*settled(operands)))


for _name in (*[f"__{name}__" for name in _OPERATORS.split()], "add", "mul", "multiply", "div", "addcmul"):
    setattr(Lazy, _name, _operator(_name))
