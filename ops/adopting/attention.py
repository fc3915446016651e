"""Attention as transformers writes it, with rotary positions of queries and keys, and the norms before them, in one kernel.

    q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), cos, sin)

A module keeps its own forward. What runs is a copy of it under other names: the function is ours, and in place of
`self.q_norm(q)` stands a `Lazy`, unless a hook looks at that norm. `rotary` says which modules that is right for.
"""

from collections.abc import Callable, Sequence
from functools import update_wrapper
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks import KERNEL_DTYPES
from ..rotary import rotary_qk_fn
from .adopted import Adopted, in_place_of
from .lazy import Lazy, autocasts, can_go_along, settled


class Turn(NamedTuple):
    """How an attention module turns its queries and keys."""

    function: str  # the name that its forward calls
    interleaved: bool  # pairs are features 2i and 2i + 1
    angles: str  # how cos has the column of a pair: halves (in either half), neighbours (twice in a row), or once
    fp32_angles: bool  # cos and sin are fp32 beside queries in bf16, which stay bf16
    norms: tuple[str, ...]  # of queries and of keys, which its kernel computes along

    def __str__(self) -> str:
        along = f"with {' and '.join(self.norms)} " if self.norms else ""
        return f"rotary positions {along}in one kernel"


class AdoptedAttention(Adopted):
    """Attention of somebody's model that runs `rotary_qk_fn`."""

    _what = "rotary positions"
    _how: Turn

    @classmethod
    def _made(cls, own: Any, turn: Turn, recognised: Any) -> dict[str, Any]:
        if recognised is None:
            return {}
        functions = {turn.function: turning(turn, recognised.__globals__[turn.function])}
        ours = with_names(recognised, functions, turn.norms)
        return {"forward": in_place_of(recognised, own, ours)} | {_later(name): _leaving(name) for name in turn.norms}


def with_names(forward: FunctionType, functions: dict[str, Any], norms: Sequence[str]) -> Any:
    """A copy of forward for which these functions are global, and which calls `_later(norm)` of self for each such norm."""
    # Without __name__: Dynamo would look the functions up in the module of that name.
    space = {name: value for name, value in forward.__globals__.items() if name != "__name__"} | functions
    names = tuple([_later(name) if name in norms else name for name in forward.__code__.co_names])
    code = forward.__code__.replace(co_names=names)
    copy = FunctionType(code, space, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return update_wrapper(copy, forward)


def _later(norm: str) -> str:
    return f"{norm}_before_rotary"


def _leaving(name: str) -> Callable[[Any, Tensor], Any]:
    def leave(self: nn.Module, x: Tensor) -> Any:
        norm = getattr(self, name)
        return Lazy(x, parts={"branch_norm": norm}) if can_go_along(norm) else norm(x)

    return leave


def turning(turn: Turn, own: Callable) -> Callable:
    """apply_rotary_pos_emb, in one kernel; `own` where the kernel does not take what is given."""

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = None if args or kwargs.keys() - {"unsqueeze_dim"} else _turned(turn, q, k, cos, sin, **kwargs)
        return own(settled(q), settled(k), cos, sin, *args, **kwargs) if found is None else found

    return apply_rotary_pos_emb


def _turned(turn: Turn, q: Any, k: Any, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor] | None:
    along = norms_along(q, k)
    q, k = (settled(q), settled(k)) if along is None else (q.x, k.x)
    given, dtype, heads = (q, k, cos, sin), q.dtype, unsqueeze_dim % q.dim() - q.dim()
    if heads == -3:  # in front of the tokens
        q, k = q.transpose(-3, -2), k.transpose(-3, -2)
    tokens = q.shape[:-2]
    same_dtype = cos.dtype == dtype or (turn.fp32_angles and cos.dtype == torch.float32) or autocasts(q.device)
    if (
        any(type(t) is not Tensor for t in given) or cos.requires_grad or sin.requires_grad
        or dtype not in KERNEL_DTYPES or k.dtype != dtype or not same_dtype
        or heads not in (-3, -2) or k.shape[:-2] != tokens
        or cos.shape[:-1] not in (tokens, (*[1] * (len(tokens) - 1), tokens[-1]))
    ):  # fmt: skip
        return None
    pairs = {"halves": slice(cos.shape[-1] // 2), "neighbours": slice(None, None, 2), "once": slice(None)}[turn.angles]
    q, k = rotary_qk_fn(q, k, cos[..., pairs], sin[..., pairs], interleaved=turn.interleaved, **(along or {}))
    return (q.transpose(-3, -2), k.transpose(-3, -2)) if heads == -3 else (q, k)


def norms_along(q: Any, k: Any) -> dict[str, Any] | None:
    """Arguments of `rotary_qk_fn`, if q and k wait for norms of each head that one kernel can compute."""
    if not all(isinstance(t, Lazy) and t.is_only_normed() for t in (q, k)):
        return None
    a, b, dtype = q.parts["branch_norm"], k.parts["branch_norm"], q.x.dtype
    keeps_dtype = autocasts(q.x.device) or a.out_dtype(dtype) == b.out_dtype(dtype) == dtype
    if a.formula.norm != b.formula.norm or a.options(dtype) != b.options(dtype) or not keeps_dtype:
        return None
    weights = zip(("q_weight", "q_bias", "k_weight", "k_bias"), a.weights() + b.weights(), strict=True)
    return {"norm": a.formula.norm, **a.options(dtype), **dict(weights)}
