"""Norm and rotary positions of queries and keys as operators: records, schemas, gradients. They take what `rotary` has checked.

A compiled function calls the operator `rotary`. It decomposes into `rotary_forward` and `rotary_backward`, which the graph then
holds. Eager code goes past the dispatcher, to `rotary_launch`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import operators
from .autograd import first_order
from .operators import LIBRARY, NAMESPACE, operator
from .torch_state import apply_of, below_autograd, has_tangents, is_eager


class Inputs(NamedTuple):
    x: Tensor  # [..., T, heads, D], or [..., T, (heads + 2 · kv_heads) · D] with keys and values in it
    k: Tensor | None  # [..., T, kv_heads, D]; None where they lie in x
    cos: Tensor | None  # [positions, R/2]; or [..., T, R/2], where the dimensions before T may all be 1
    sin: Tensor | None
    positions: Tensor | None  # [..., T]
    q_weight: Tensor | None  # [D] or [heads, D]
    q_bias: Tensor | None
    k_weight: Tensor | None
    k_bias: Tensor | None


class Options(NamedTuple):
    heads: int
    kv_heads: int
    norm: int  # a value of Norm, or -1 for none
    eps: float
    zero_centered_weight: bool
    interleaved: bool


class Upstream(NamedTuple):
    """The gradients that backward is given."""

    dq: Tensor
    dk: Tensor
    dv: Tensor | None  # there where x is packed


launches = partial(operators.launches, "rotary_launch")


def apply(inputs: Inputs, options: Options) -> Sequence[Tensor]:
    """q, k, and v where x is packed, with gradients."""
    eager = is_eager(inputs)
    if has_tangents() or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)):
        return (_apply_eager if eager else _Rotary.apply)(options, eager, *inputs)
    return _outputs(inputs, options, eager)


def _outputs(inputs: Inputs, options: Options, eager: bool) -> Sequence[Tensor]:
    """eager: past the dispatcher, where nobody watches operator calls."""
    outputs = launches().forward(inputs, options) if eager else below_autograd(rotary_forward, *inputs, *options)
    if inputs.k is not None:
        return outputs
    *_, heads, D = outputs[1].shape
    return *outputs, inputs.x.narrow(-1, -heads * D, heads * D).view(*outputs[1].shape)  # v


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, eager, *tensors):
        x, k, *rest = inputs = Inputs(*tensors)
        ctx.options, ctx.eager, ctx.function = options, eager, "rotary_qkv_fn" if k is None else "rotary_qk_fn"
        kept = (None, None) if options.norm < 0 else (x, k)  # without a norm backward does not look at them
        ctx.save_for_backward(*kept, *rest)
        return _outputs(inputs, options, eager)

    @staticmethod
    @first_order
    def backward(ctx, dq, dk, dv=None):
        saved, options, wanted = ctx.saved_tensors, ctx.options, ctx.needs_input_grad[7:]
        if ctx.eager and is_eager((dq, dk, dv, *saved)):  # hooks on saved tensors may bring any
            given = launches().backward(Upstream(dq, dk, dv), Inputs(*saved), options, wanted)
        else:
            given = rotary_backward(dq, dk, dv, *saved, *options, list(wanted))
        dx, *others = given
        dk_in = others.pop(0) if dv is None else None
        return None, None, dx, dk_in, None, None, None, *[others.pop(0) if wants else None for wants in wanted]


_apply_eager = apply_of(_Rotary)


# ---- operators --------------------------------------------------------------------------------------------------------------

_INPUTS = "Tensor? cos, Tensor? sin, Tensor? positions, Tensor? q_weight, Tensor? q_bias, Tensor? k_weight, Tensor? k_bias"
_OPTIONS = "SymInt heads, SymInt kv_heads, int norm, float eps, bool zero_centered_weight, bool interleaved"


def output_shapes(x: torch.Size, k: torch.Size | None, options: Options) -> tuple[Sequence[int], Sequence[int]]:
    """Of q and k, for those of the inputs."""
    if k is not None:
        return x, k
    *tokens, width = x
    D = width // (options.heads + 2 * options.kv_heads)
    return (*tokens, options.heads, D), (*tokens, options.kv_heads, D)


def _empty_outputs(x: Tensor, k: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
    q_shape, k_shape = output_shapes(x.shape, None if k is None else k.shape, Options(*given[7:]))
    return x.new_empty(q_shape), x.new_empty(k_shape)


def empty_gradients(upstream: Upstream, inputs: Inputs, options: Options, wanted: Sequence[bool]) -> list[Tensor]:
    """dx, dk where x is not packed, and of dq_weight, dq_bias, dk_weight, dk_bias those wanted."""
    dq, dk, dv = upstream
    if dv is None:
        gradients = [dq.new_empty(dq.shape), dk.new_empty(dk.shape)]
    else:
        *tokens, _, D = dq.shape
        gradients = [dq.new_empty((*tokens, (options.heads + 2 * options.kv_heads) * D))]
    return gradients + [t.new_empty(t.shape) for t, wants in zip(inputs[5:], wanted, strict=True) if wants and t is not None]


rotary_forward = operator(
    "rotary_forward",
    f"(Tensor x, Tensor? k, {_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)",
    lambda *given: launches().forward(Inputs(*given[:9]), Options(*given[9:])),
    _empty_outputs,
)
rotary_backward = operator(
    "rotary_backward",
    f"(Tensor dq, Tensor dk, Tensor? dv, Tensor? x, Tensor? k, {_INPUTS}, {_OPTIONS}, bool[4] wanted) -> Tensor[]",
    lambda *given: launches().backward(Upstream(*given[:3]), Inputs(*given[3:12]), Options(*given[12:18]), tuple(given[18])),
    lambda *given: empty_gradients(Upstream(*given[:3]), Inputs(*given[3:12]), Options(*given[12:18]), given[18]),
)
# v is a view of x, which no operator with a kernel may return. This one has none: it is its decomposition at each dispatch.
LIBRARY.define(f"rotary(Tensor x, Tensor? k, {_INPUTS}, {_OPTIONS}) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.impl("rotary", lambda *given: list(apply(Inputs(*given[:9]), Options(*given[9:]))), "CompositeImplicitAutograd")
rotary = getattr(torch.ops, NAMESPACE).rotary.default
