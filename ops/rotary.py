"""Norm and rotary positions of queries and keys in one kernel each way: the public functions, their checks, the reference.

    x̂ = x normalised over the D features of a head          norm: none, layernorm, rmsnorm
    y = x̂ · (weight + offset) + bias
    out_a = y_a · cos − y_b · sin,    out_b = y_a · sin + y_b · cos        for each of the R/2 pairs (a, b) of features

Su et al. 2021, arXiv:2104.09864; query-key norm: Henry et al. 2020, arXiv:2010.04245, and Dehghani et al. 2023,
arXiv:2302.05442. Pair i is the features i and i + R/2 (the half-split layout of Llama checkpoints on the Hub), or interleaved
2i and 2i + 1 (the paper's, of GPT-J and of Meta's own Llama checkpoints). Features from R on are not turned.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .checks import (
    KERNEL_DTYPES,
    REFERENCE_DTYPES,
    check_dtype,
    check_eps,
    check_flags,
    check_operand,
    check_size,
    check_tensor,
)
from .kernels import runs_kernels
from .records import dtypes_of
from .reference import NORMS, Norm
from .rotary_operators import Inputs, Options, apply, launches, rotary, values_of
from .torch_state import is_eager, transformed_by_func

# Dynamo of torch 2.11 can't trace a loop over an Enum class.
_NORMS = [kind for kind in Norm if kind.statistics]


def rotary_qkv_fn(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: int,
    kv_heads: int | None = None,
    *,
    positions: Tensor | None = None,
    norm: Norm | str | None = None,
    q_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_weight: Tensor | None = None,
    k_bias: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_weight: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a packed projection; queries and keys normalised by head and turned by their position.

    Args:
        qkv: [..., T, (heads + 2·kv_heads)·D]: of each token the queries, the keys, the values, head by head. D is even. bf16,
            fp16 or fp32; fp64 too where the PyTorch reference runs. Tokens may lie apart.
        cos, sin: [P, R/2] with R ≤ D, of the angles of positions 0 … P−1. None: nothing is turned. They get no gradient.
        heads, kv_heads: kv_heads divides heads (grouped-query attention); None: as heads.
        positions: int64 or int32, the row of the tables for each token: [..., T], or a shape that expands to it. None: 0 … T−1.
            On the kernels a position that the tables do not have gives NaN; the reference raises IndexError.
        norm: "layernorm" or "rmsnorm" over the features of each head, before the turn. None: no norm.
        q_weight, k_weight: [D], one for all heads, or [heads, D] and [kv_heads, D]. None is 1.
        q_bias, k_bias: shaped as the weights. None is 0.
        eps: added to the variance.
        zero_centered_weight: weights are stored as their difference from 1.
        interleaved: pairs are features 2i and 2i + 1.

    Returns:
        q [..., T, heads, D] and k [..., T, kv_heads, D], contiguous, computed in fp32 and rounded to qkv's dtype; and
        v [..., T, kv_heads, D], a view of qkv. Backward writes the gradient of qkv once, in one kernel.

    Gradients of gradients are refused on the kernels. Under torch.func's transforms the PyTorch reference runs, which has them.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option not as above; before anything is launched.
    """
    name = "rotary_qkv_fn"
    check_tensor(name, "qkv", qkv)
    heads, kv_heads = _heads(name, heads, heads if kv_heads is None else kv_heads)
    parts = heads + 2 * kv_heads
    if qkv.dim() < 2 or qkv.shape[-1] == 0 or qkv.shape[-1] % (2 * parts):
        raise ValueError(
            f"{name}: qkv has shape {tuple(qkv.shape)}, expected (..., T, ({heads} + 2·{kv_heads})·D) with an even D"
        )
    inputs = Inputs(qkv, None, cos, sin, positions, q_weight, q_bias, k_weight, k_bias)
    how = (norm, eps, zero_centered_weight, interleaved)
    return _run(name, inputs, qkv.shape[:-1], heads, kv_heads, qkv.shape[-1] // parts, *how)  # type: ignore[return-value]


def rotary_qk_fn(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    positions: Tensor | None = None,
    norm: Norm | str | None = None,
    q_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_weight: Tensor | None = None,
    k_bias: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_weight: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same for queries and keys that are tensors of their own.

    Args:
        q: [..., T, heads, D], k: [..., T, kv_heads, D], of one dtype. Views are read where they lie: batches, tokens and heads
            may be any distance apart, so that a transposed [B, heads, T, D] is welcome.
        The others as for `rotary_qkv_fn`.

    Returns:
        q and k in their shapes, contiguous.

    Raises:
        ValueError, TypeError: as `rotary_qkv_fn`.
    """
    name = "rotary_qk_fn"
    check_tensor(name, "q", q)
    check_tensor(name, "k", k)
    if q.dim() < 3 or q.shape[-1] == 0 or q.shape[-1] % 2:
        raise ValueError(f"{name}: q has shape {tuple(q.shape)}, expected (..., T, heads, D) with an even D of 2 or more")
    if k.dim() != q.dim() or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{name}: k has shape {tuple(k.shape)}, expected that of q {tuple(q.shape)} but for the number of heads"
        )
    if k.dtype != q.dtype or k.device != q.device:
        raise ValueError(f"{name}: k is {k.dtype} on {k.device}, expected {q.dtype} on {q.device}, as q")
    heads, kv_heads = _heads(name, q.shape[-2], k.shape[-2])
    inputs = Inputs(q, k, cos, sin, positions, q_weight, q_bias, k_weight, k_bias)
    how = (norm, eps, zero_centered_weight, interleaved)
    return _run(name, inputs, q.shape[:-2], heads, kv_heads, q.shape[-1], *how)  # type: ignore[return-value]


def _run(
    name: str, inputs: Inputs, shape: torch.Size, heads: int, kv_heads: int, D: int, norm: Any, eps: float,
    zero_centered_weight: bool, interleaved: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """shape: [..., T]."""
    kind = -1 if norm is None else int(_as_norm(name, norm))
    check_eps(name, eps)
    check_flags(name, zero_centered_weight=zero_centered_weight, interleaved=interleaved)
    options = Options(heads, kv_heads, kind, float(eps), bool(zero_centered_weight), bool(interleaved))
    kernels = runs_kernels(inputs.x.device) and not transformed_by_func()
    dtypes = KERNEL_DTYPES if kernels else REFERENCE_DTYPES
    run = None
    if kernels and is_eager(inputs):
        key = _key(inputs, options, D)
        if (run := _runs.get(key)) is None:
            _check(name, inputs, options, D, dtypes)
            run = launches().forward_call(options, launches().work_of(D, inputs), inputs.x.device, dtypes_of(inputs))
            if len(_runs) >= MOST:
                _runs.clear()
            _runs[key] = run
    else:
        _check(name, inputs, options, D, dtypes)
    inputs = _with_positions(name, inputs, shape)
    if not kernels:
        return reference(inputs, options)
    if torch.compiler.is_compiling():
        return tuple(rotary(*inputs, *options))
    return tuple(apply(inputs, options, run))


# ---- checks -----------------------------------------------------------------------------------------------------------------

MOST = 1024
_runs: dict[tuple, Callable] = {}  # of `rotary_launch.forward_call`, for calls that `_check` has found right


def _key(inputs: Inputs, options: Options, D: int) -> tuple:
    """Equal for calls of which `_check` finds all right or all wrong, and which start the same kernels. Neither the number of
    tokens nor that of the tables' rows is part of it."""
    cos = inputs.cos
    kinds = [None if t is None else (t.dtype, t.device, t.requires_grad) for t in inputs]
    weights = [None if t is None else t.shape for t in inputs[5:]]
    return options, D, None if cos is None else cos.shape[1:], *kinds, *weights


def forget() -> None:
    """Drops all that was worked out for calls so far; for tests, which change what it was made of."""
    _runs.clear()
    launches().forward_call.cache_clear()
    launches().backward_call.cache_clear()


def _heads(name: str, heads: Any, kv_heads: Any) -> tuple[int, int]:
    check_size(name, "heads", heads, 1)
    check_size(name, "kv_heads", kv_heads, 1)
    return heads, kv_heads


def _as_norm(name: str, norm: Any) -> Norm:
    try:
        found = Norm[norm] if isinstance(norm, str) else Norm(norm)
        return _NORMS[_NORMS.index(found)]
    except (KeyError, ValueError):
        raise ValueError(f"{name}: norm is {norm!r}, accepted: None, {', '.join(kind.name for kind in _NORMS)}") from None


def _check(name: str, inputs: Inputs, options: Options, D: int, accepted: tuple[torch.dtype, ...]) -> None:
    """All but what depends on the number of tokens."""
    x, _, cos, sin, positions, *_ = inputs
    of = "q" if name == "rotary_qk_fn" else "qkv"
    check_dtype(name, of, x, accepted)
    for argument, t in list(zip(Inputs._fields, inputs, strict=True))[2:]:
        if t is not None:
            check_operand(name, argument, t, x, (torch.int64, torch.int32) if argument == "positions" else accepted, of)
    if (cos is None) != (sin is None):
        raise ValueError(f"{name}: cos and sin are a pair; one of them is None. Give both, or None for both")
    if cos is not None and sin is not None:
        if cos.dim() != 2 or not 1 <= cos.shape[1] <= D // 2:
            raise ValueError(f"{name}: cos has shape {tuple(cos.shape)}, expected (P, R/2) with R/2 from 1 to {D // 2}")
        if sin.dtype != cos.dtype:
            raise ValueError(f"{name}: sin is {sin.dtype}, expected {cos.dtype}, as cos")
        if cos.requires_grad or sin.requires_grad:
            raise ValueError(f"{name}: cos and sin get no gradient; detach them")
    if positions is not None and cos is None:
        raise ValueError(f"{name}: positions were given without cos and sin, whose rows they are")
    weights = {argument: t for argument, t in zip(Inputs._fields[5:], inputs[5:], strict=True) if t is not None}
    for argument, weight in weights.items():
        if options.norm < 0:
            raise ValueError(f"{name}: {argument} was given without a norm; pass norm, or leave it out")
        each = (options.heads if argument[0] == "q" else options.kv_heads, D)
        if weight.shape != each[1:] and weight.shape != each:
            raise ValueError(f"{name}: {argument} has shape {tuple(weight.shape)}, expected {each[1:]}, or {each} by head")
        if len({t.dim() for t in weights.values()}) > 1:
            raise ValueError(
                f"{name}: {argument} has shape {tuple(weight.shape)}; weights and biases are all by head, or none is"
            )


def _with_positions(name: str, inputs: Inputs, shape: torch.Size) -> Inputs:
    """The inputs, whose tables have rows for all tokens, with positions [..., T]."""
    cos, sin, positions = inputs.cos, inputs.sin, inputs.positions
    if cos is None or sin is None:
        return inputs
    if sin.shape != cos.shape or (positions is None and cos.shape[0] < shape[-1]):
        least = "P" if positions is not None else f"{shape[-1]} or more"
        raise ValueError(f"{name}: cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}, expected ({least}, R/2) for both")
    if positions is None or positions.shape == shape:
        return inputs
    given = positions.shape
    leading = zip(reversed(given[:-1]), reversed(shape[:-1]), strict=False)
    if not given or len(given) > len(shape) or given[-1] != shape[-1] or any(n not in (1, most) for n, most in leading):
        raise ValueError(f"{name}: positions has shape {tuple(given)}, expected {tuple(shape)} or what expands to it")
    return inputs._replace(positions=positions.expand(shape).contiguous())


# ---- reference --------------------------------------------------------------------------------------------------------------


def reference(inputs: Inputs, options: Options) -> tuple[Tensor, ...]:
    """The same in plain PyTorch, differentiable, on any device: what the kernels are tested against."""
    x, k, cos, sin, positions, q_weight, q_bias, k_weight, k_bias = inputs
    if k is not None:
        q = x
        values: tuple[Tensor, ...] = ()
    else:
        width = x.shape[-1] // (options.heads + 2 * options.kv_heads)
        q = x[..., : options.heads * width].unflatten(-1, (options.heads, width))
        k = x[..., options.heads * width : -options.kv_heads * width].unflatten(-1, (options.kv_heads, width))
        values = (values_of(x, options),)
    if cos is not None and sin is not None:
        cos, sin = (t[: q.shape[-3]] if positions is None else t[positions.long()] for t in (cos, sin))
    q, k = (_turned(t, cos, sin, weight, bias, options) for t, weight, bias in ((q, q_weight, q_bias), (k, k_weight, k_bias)))
    return q, k, *values


def _turned(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, weight: Tensor | None, bias: Tensor | None, options: Options
) -> Tensor:
    """x [..., T, heads, D]; cos, sin [T, R/2] or [..., T, R/2]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.to(dtype)
    if options.norm >= 0:
        weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
        if weight is not None and options.zero_centered_weight:
            weight = weight + 1.0
        if any(t is not None and t.dim() == 2 for t in (weight, bias)):
            y = NORMS[Norm(options.norm)](y, None, None, options.eps)
            y = y if weight is None else y * weight
            y = y if bias is None else y + bias
        else:
            y = NORMS[Norm(options.norm)](y, weight, bias, options.eps)
    if cos is not None and sin is not None:
        cos, sin = (t.to(dtype).unsqueeze(-2) for t in (cos, sin))  # [..., T, 1, R/2]
        turns, rest = y[..., : 2 * cos.shape[-1]], y[..., 2 * cos.shape[-1] :]
        a, b = (turns[..., ::2], turns[..., 1::2]) if options.interleaved else turns.chunk(2, dim=-1)
        pairs = (a * cos - b * sin, a * sin + b * cos)
        turned = torch.stack(pairs, dim=-1).flatten(-2) if options.interleaved else torch.cat(pairs, dim=-1)
        y = torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
    return y.to(x.dtype)
