"""Sums that are not computed yet, so that one kernel can compute them together with the norm that follows.

A block's own forward runs as it is written. Only its operands differ:

    Branch      what a sublayer gives, with what is still to be done to it: a norm, a scale, dropout, drop path
    Stream      the residual stream, with the branch that is still to be added to it
    Pending     a Stream between two blocks

Branch + Stream is a Stream. A replaced norm that gets a Stream computes the sum and the norm in one kernel, and the Stream
keeps the sum. In everything else that a program does with one of them, its value takes part: it is computed then. So whatever
a program does, it computes what it computed with tensors; at worst nothing is saved.
"""

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

TRACE: list[Any] | None = None  # where `trial` reads what happened
HANDLERS: dict[Any, Callable] = {}  # functions of torch that leave things uncomputed, from `sums`


class Lazy:
    """Takes part in a program as the tensor that it stands for."""

    _value: Tensor | None
    _had_grad: bool  # whether autograd recorded when it was made

    def tensor(self) -> Tensor:
        """The value, computed at the first call."""
        if self._value is None:
            if self._had_grad == torch.is_grad_enabled():
                self._value = self._compute()
            else:  # as when a tensor would have been computed
                check_outside_function(self)
                with torch.set_grad_enabled(self._had_grad):
                    self._value = self._compute()
        return self._value

    def peek(self) -> Tensor:
        """The value, which is computed once more later: for a hook that wants to see it and change nothing."""
        return self._compute() if self._value is None else self._value

    def _compute(self) -> Tensor:
        raise NotImplementedError

    def _like(self) -> Tensor:
        """A tensor of the same shape, dtype and device."""
        raise NotImplementedError

    # Questions that need no value.
    shape = property(lambda self: self._like().shape)
    dtype = property(lambda self: self._like().dtype)
    device = property(lambda self: self._like().device)
    ndim = property(lambda self: self._like().ndim)

    def size(self, *dim: Any) -> Any:
        return self._like().size(*dim)

    def dim(self) -> int:
        return self._like().dim()

    def numel(self) -> int:
        return self._like().numel()

    def is_floating_point(self) -> bool:
        return True

    def new_empty(self, *shape: Any, **how: Any) -> Tensor:
        return self._like().new_empty(*shape, **how)

    def contiguous(self) -> Any:
        return self

    def view(self, *shape: Any, **how: Any) -> Any:
        return (
            self.reshape(*shape, **how)
            if shape and not isinstance(shape[0], torch.dtype)
            else self.tensor().view(*shape, **how)
        )

    def reshape(self, *shape: Any, **how: Any) -> Any:
        """Rows stay rows in a Stream and a Branch."""
        return self.tensor().reshape(*shape, **how)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, and neither has a tensor")
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = HANDLERS.get(function)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        if TRACE is not None:
            TRACE.append(("used by", getattr(function, "__name__", str(function))))
        return function(*settled(args), **settled(kwargs or {}))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tensor()[settled(index)] = settled(value)

    def __copy__(self) -> Tensor:
        return self.tensor()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.tensor().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor().__reduce_ex__(protocol)

    def __hash__(self) -> int:
        return id(self)


def _by_value(name: str) -> Callable:
    def operator(self: Lazy, *operands: Any) -> Any:
        return getattr(self.tensor(), name)(*settled(operands))

    return operator


_OPERATORS = """
sub rsub rtruediv floordiv mod pow rpow matmul rmatmul and or xor neg pos abs invert eq ne lt le gt ge getitem len iter bool int
float index contains array
"""
for _name in _OPERATORS.split():
    setattr(Lazy, f"__{_name}__", _by_value(f"__{_name}__"))


@dataclass(init=False, eq=False, repr=False)  # so that FSDP finds the tensors in it
class Branch(Lazy):
    """x (..., N) of a sublayer, and then, each where it is there: its norm, · weight, · rowscale, · factor, dropout; + more."""

    x: Tensor
    norm: Any = None  # an AdoptedNorm
    weight: Tensor | None = None  # (N,)
    rowscale: Tensor | None = None  # x's shape but for the last dimension
    factor: float = 1.0
    p: float = 0.0
    seed: Tensor | None = None  # drawn where it is needed first
    more: Tensor | None = None  # a second branch
    source: str = ""  # for `trial`, as the notes
    notes: tuple[str, ...] = ()

    def __init__(self, x: Tensor, **then: Any) -> None:
        self.x = x
        self._value, self._had_grad = None, torch.is_grad_enabled()
        self.__dict__.update(then)

    def then(self, **what: Any) -> "Branch":
        return Branch(self.x, **(self._parts() | what))

    def _parts(self) -> dict[str, Any]:
        names = ("norm", "weight", "rowscale", "factor", "p", "seed", "more", "source", "notes")
        return {name: getattr(self, name) for name in names}

    def _is_scaled(self) -> bool:
        return self.weight is not None or self.rowscale is not None or self.factor != 1.0 or self.p > 0.0

    def holds_weights(self) -> bool:
        return self.norm is not None or self.weight is not None

    @property
    def dtype(self) -> torch.dtype:
        scales = (t.dtype for t in (self.weight, self.rowscale) if t is not None)
        return reduce(torch.promote_types, scales, self.x.dtype)

    def _like(self) -> Tensor:
        return self.x if self.dtype == self.x.dtype else self.tensor()

    def _compute(self) -> Tensor:
        y = self.x if self.norm is None else self.norm.of_tensor(self.x)
        y = y if self.weight is None else y * self.weight
        y = y if self.factor == 1.0 else y * self.factor
        y = y if self.rowscale is None else y * self.rowscale.unsqueeze(-1)
        if self.p > 0.0:
            y = F.dropout(y, self.p) if self.seed is None else seeded_dropout(y, self.p, self.seed)
        return y if self.more is None else y + self.more

    def reshape(self, *shape: Any, **how: Any) -> Any:
        x = self.x.reshape(*shape, **how)
        if x.shape[-1:] != self.x.shape[-1:] or self._value is not None:
            return self.tensor().reshape(*shape, **how)
        self.fix_mask()
        rowscale = None if self.rowscale is None else self.rowscale.expand(self.x.shape[:-1]).reshape(x.shape[:-1])
        return Branch(
            x, **(self._parts() | {"rowscale": rowscale, "more": None if self.more is None else self.more.reshape(x.shape)})
        )

    def fix_mask(self) -> None:
        """Draws the seed, so that everybody who computes the branch drops the same elements."""
        if self.p > 0.0 and self.seed is None:
            self.seed = draw_seed(self.x.device, is_eager((self.x,)))

    def arguments(self) -> dict[str, Any]:
        """Of `norm_fn`, which adds the branch to a residual."""
        if self._value is not None:
            return {"x": self._value}
        self.fix_mask()
        found: dict[str, Any] = {"x": self.x, "x1": self.more, "dropout_p": self.p, "seed": self.seed}
        if self.norm is not None:
            formula = self.norm.formula
            weight, bias = self.norm.weights()
            found |= {"branch_norm": formula.norm, "branch_weight": weight, "branch_bias": bias}
        elif self.weight is not None:
            found["branch_weight"] = self.weight
        scale = self.rowscale
        if self.factor != 1.0:
            scale = self.x.new_full(self.x.shape[:-1], 1.0, dtype=torch.float32) if scale is None else scale
            scale = scale * self.factor
        if scale is not None:
            found["rowscale"] = scale.expand(self.x.shape[:-1])
        return found


@dataclass(init=False, eq=False, repr=False)
class Stream(Lazy):
    """factor · residual + branch, of which the branch may be missing. In fp32 if asked, else in the residual's dtype."""

    residual: Tensor
    branch: Branch | None = None
    factor: float = 1.0
    in_fp32: bool = False

    def __init__(self, residual: Tensor, branch: Branch | None = None, factor: float = 1.0, in_fp32: bool = False) -> None:
        self.residual, self.branch, self.factor, self.in_fp32 = residual, branch, factor, in_fp32
        done = branch is None and factor == 1.0 and not in_fp32
        self._value, self._had_grad = residual if done else None, torch.is_grad_enabled()

    def _like(self) -> Tensor:
        return self.residual

    def reshape(self, *shape: Any, **how: Any) -> Any:
        residual = self.residual.reshape(*shape, **how)
        if residual.shape[-1:] != self.residual.shape[-1:]:
            return self.tensor().reshape(*shape, **how)
        if self._value is not None:
            return Stream(self._value.reshape(residual.shape))
        branch = None if self.branch is None else self.branch.reshape(residual.shape)
        branch = Branch(branch) if isinstance(branch, Tensor) else branch
        return Stream(residual, branch, self.factor, self.in_fp32)

    def _keep(self, value: Tensor) -> Tensor:
        self._value = self.residual = value
        self.branch, self.factor, self.in_fp32 = None, 1.0, False
        return value

    def tensor(self) -> Tensor:
        return self._value if self._value is not None else self._keep(super().tensor())

    def _compute(self) -> Tensor:
        branch = self.branch
        if TRACE is not None and branch is not None:
            TRACE.append(("summed", None, branch))
        if branch is None:
            return self.residual.float() if self.in_fp32 else self.residual * self.factor
        if branch._value is None and (branch.norm is not None or branch._is_scaled() or branch.more is not None):
            options = {} if branch.norm is None else branch.norm.options(branch.x.dtype)
            return norm_fn(
                Norm.none, residual=self.residual, residual_scale=self.factor, out_dtype=self.residual.dtype,
                **branch.arguments(), **options,
            )  # type: ignore[return-value] # fmt: skip
        residual = self.residual if self.factor == 1.0 else self.residual * self.factor
        return residual + branch.tensor()

    def normed(self, norm: Any) -> Tensor:
        """The norm of the stream, which afterwards holds its sum."""
        branch = self.branch
        done = self._value is not None or (branch is None and not self.in_fp32)
        if done or self._had_grad != torch.is_grad_enabled():
            return norm.of_tensor(self.tensor())
        if branch is not None and (self.residual.dtype is torch.float64 or not norm.goes_with(branch)):
            branch = Branch(branch.tensor())
        if TRACE is not None and branch is not None:
            TRACE.append(("normed", norm, branch))
        arguments: dict[str, Any] = {"x": self.residual, "residual_in_fp32": True} if branch is None else branch.arguments()
        x = arguments.pop("x")
        out_dtype = norm.out_dtype(self.residual.dtype)
        if branch is None or torch.is_autocast_enabled(x.device.type) or self.residual.dtype == torch.float32 != x.dtype:
            out_dtype = norm.out_dtype(x.dtype)
        weight, bias = norm.weights()
        residual: dict[str, Any] = {} if branch is None else {"residual": self.residual, "residual_scale": self.factor}
        normed: Any = norm_fn(
            norm.formula.norm,
            x,
            weight,
            bias,
            prenorm=True,
            out_dtype=out_dtype,
            **residual,
            **arguments,
            **norm.options(x.dtype),
        )
        y, value = normed
        self._keep(value)
        return y


class Pending(Stream):
    """A Stream between two blocks. It stays what it is, so that activation checkpointing can run the next block twice."""

    def _keep(self, value: Tensor) -> Tensor:
        self._value = value
        return value


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


def _flatten_branch(branch: Branch) -> tuple[list[Any], Any]:
    branch.fix_mask()
    return [branch.x, branch.rowscale, branch.more], (branch.norm, branch.weight, branch.factor, branch.p, branch.seed)


def _unflatten_branch(tensors: Any, rest: Any) -> Branch:
    (x, rowscale, more), (norm, weight, factor, p, seed) = tensors, rest
    return Branch(x, rowscale=rowscale, more=more, norm=norm, weight=weight, factor=factor, p=p, seed=seed)


# torch's tree functions find the tensors in it, as FSDP of torch 2.11 does.
register_container(Branch, _flatten_branch, _unflatten_branch)
for _kind in (Stream, Pending):
    register_container(
        _kind,
        lambda stream: ([stream.residual, stream.branch], (stream.factor, stream.in_fp32)),
        lambda tensors, rest, kind=_kind: kind(*tensors, *rest),
    )
