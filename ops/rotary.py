"""Norm and rotary positions of queries and keys in one kernel each way: the public functions, their checks, the reference.

    x̂ = x normalised over the D features of a head          norm: none, layernorm, rmsnorm
    y = x̂ · (weight + offset) + bias
    out_a = y_a · cos − y_b · sin,    out_b = y_a · sin + y_b · cos        for each of the R/2 pairs (a, b) of features

Su et al. 2021, arXiv:2104.09864; query-key norm: Henry et al. 2020, arXiv:2010.04245, and Dehghani et al. 2023,
arXiv:2302.05442. Pair i is the features i and i + R/2 (the half-split layout of Llama checkpoints on the Hub), or interleaved
2i and 2i + 1 (the paper's, of GPT-J and of Meta's own Llama checkpoints). Features from R on are not turned.
"""

import torch
from torch import Tensor

from . import checks
from .checks import KERNEL_DTYPES, REFERENCE_DTYPES
from .kernels import runs_kernels
from .reference import NORMS, Norm, affine
from .rotary_operators import Inputs, Options, apply, rotary
from .torch_state import transformed_by_func

_KINDS = {None: -1} | {key: kind for kind in (Norm.layernorm, Norm.rmsnorm) for key in (kind, kind.name)}


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
        cos, sin: [P, R/2] with R ≤ D, of the angles of positions 0 … P−1; or, without positions, [..., T, R/2] of the angles
            of each token, where the dimensions before T are those of the tokens or all 1. Views are read where they lie. None:
            nothing is turned. They get no gradient.
        heads, kv_heads: kv_heads divides heads (grouped-query attention); None: as heads.
        positions: int64 or int32, the row of the tables for each token: [..., T], or a shape that expands to it. None: 0 … T−1.
            A position that the tables do not have, below 0 too, turns its features into NaN: nothing waits for the device.
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
    checks.check_tensor(name, "qkv", qkv)
    kv_heads = heads if kv_heads is None else kv_heads
    heads, kv_heads = checks.as_size(name, "heads", heads, 1), checks.as_size(name, "kv_heads", kv_heads, 1)
    parts = heads + 2 * kv_heads
    if qkv.dim() < 2 or qkv.shape[-1] == 0 or qkv.shape[-1] % (2 * parts):
        raise ValueError(
            f"{name}: qkv has shape {tuple(qkv.shape)}, expected (..., T, ({heads} + 2·{kv_heads})·D) with an even D"
        )
    inputs = Inputs(qkv, None, cos, sin, positions, q_weight, q_bias, k_weight, k_bias)
    return _run(name, inputs, heads, kv_heads, norm, eps, zero_centered_weight, interleaved)  # type: ignore[return-value]


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
    checks.check_tensor(name, "q", q)
    checks.check_operand(name, "k", k, q, (q.dtype,), "q")
    if q.dim() < 3 or 0 in q.shape[-2:] or q.shape[-1] % 2:
        raise ValueError(f"{name}: q has shape {tuple(q.shape)}, expected (..., T, heads, D) with an even D of 2 or more")
    if k.dim() != q.dim() or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1] or k.shape[-2] == 0:
        raise ValueError(
            f"{name}: k has shape {tuple(k.shape)}, expected that of q {tuple(q.shape)} but for the number of heads"
        )
    inputs = Inputs(q, k, cos, sin, positions, q_weight, q_bias, k_weight, k_bias)
    return _run(name, inputs, q.shape[-2], k.shape[-2], norm, eps, zero_centered_weight, interleaved)  # type: ignore[return-value]


def _run(
    name: str, inputs: Inputs, heads: int, kv_heads: int, norm: Norm | str | None, eps: float, zero_centered_weight: bool,
    interleaved: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    if norm not in _KINDS:
        raise ValueError(f"{name}: norm is {norm!r}, accepted: None, layernorm, rmsnorm")
    eps = checks.as_eps(name, eps)
    flags = checks.as_flags(name, zero_centered_weight=zero_centered_weight, interleaved=interleaved)
    options = Options(heads, kv_heads, int(_KINDS[norm]), eps, **flags)
    kernels = runs_kernels(inputs.x.device) and not transformed_by_func()
    inputs = _checked(name, inputs, options, KERNEL_DTYPES if kernels else REFERENCE_DTYPES)
    if not kernels:
        return reference(inputs, options)
    return tuple(rotary(*inputs, *options) if torch.compiler.is_compiling() else apply(inputs, options))


def _checked(name: str, inputs: Inputs, options: Options, accepted: tuple[torch.dtype, ...]) -> Inputs:
    """The inputs, with positions [..., T] where there are any."""
    x, k, cos, sin, positions, *weights = inputs
    of, tokens, D = "q", x.shape[:-2], x.shape[-1]
    if k is None:
        of, tokens, D = "qkv", x.shape[:-1], D // (options.heads + 2 * options.kv_heads)
    checks.check_dtype(name, of, x, accepted)
    for argument, t in zip(Inputs._fields[2:], inputs[2:], strict=True):
        if t is not None:
            checks.check_operand(name, argument, t, x, (torch.int64, torch.int32) if argument == "positions" else accepted, of)
    if cos is not None and sin is not None:
        rows = tokens[-1] if positions is None else 1
        fits = cos.dim() == 2 and cos.shape[0] >= rows
        if cos.dim() > 2 and positions is None:  # of each token
            fits = cos.shape[:-1] == tokens or cos.shape[:-1] == (*[1] * (len(tokens) - 1), tokens[-1])
        if not fits or not 1 <= cos.shape[-1] <= D // 2 or sin.shape != cos.shape:
            shapes = f"cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}"
            each = "" if positions is not None else f" or (…, {rows}, R/2) of each token,"
            raise ValueError(f"{name}: {shapes}, expected ({rows} or more, R/2) for both,{each} with R/2 from 1 to {D // 2}")
        checks.check_dtype(name, "sin", sin, (cos.dtype,))
        if cos.requires_grad or sin.requires_grad:
            raise ValueError(f"{name}: cos and sin get no gradient; detach them")
    elif cos is not None or sin is not None or positions is not None:
        raise ValueError(f"{name}: cos and sin are a pair, and positions are their rows; give both, or none of the three")
    given = {argument: t for argument, t in zip(Inputs._fields[5:], weights, strict=True) if t is not None}
    if given and options.norm < 0:
        raise ValueError(f"{name}: {', '.join(given)} without a norm; pass norm, or leave the weights and biases out")
    per_head = any(t.dim() == 2 for t in given.values())
    for argument, t in given.items():
        by_head = (options.heads if argument[0] == "q" else options.kv_heads, D)
        if t.shape != (by_head if per_head else (D,)):
            both = f"({D},), or {by_head} where all weights and biases are by head"
            raise ValueError(f"{name}: {argument} has shape {tuple(t.shape)}, expected {both}")
    if positions is None or positions.shape == tokens:
        return inputs
    try:
        return inputs._replace(positions=positions.expand(tokens).contiguous())
    except RuntimeError:
        shapes = f"{tuple(positions.shape)}, expected {tuple(tokens)} or what expands to it"
        raise ValueError(f"{name}: positions has shape {shapes}") from None


# ---- reference --------------------------------------------------------------------------------------------------------------


def reference(inputs: Inputs, options: Options) -> tuple[Tensor, ...]:
    """The same in plain PyTorch, differentiable, on any device: what the kernels are tested against."""
    x, k, cos, sin, positions, q_weight, q_bias, k_weight, k_bias = inputs
    parts = options.heads, options.kv_heads, options.kv_heads
    q, k, *values = (x, k) if k is not None else x.unflatten(-1, (sum(parts), -1)).split(parts, dim=-2)
    if cos is not None and sin is not None:
        if positions is not None:
            there = (positions >= 0) & (positions < len(cos))
            rows = positions.long().where(there, 0)
            cos, sin = cos[rows].masked_fill(~there[..., None], torch.nan), sin[rows]
        elif cos.dim() == 2:
            cos, sin = cos[: q.shape[-3]], sin[: q.shape[-3]]
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
        per_head = any(t is not None and t.dim() == 2 for t in (weight, bias))
        inside, behind = ((None, None), (weight, bias)) if per_head else ((weight, bias), (None, None))
        y = affine(NORMS[Norm(options.norm)](y, *inside, options.eps), *behind)
    if cos is not None and sin is not None:
        cos, sin = (t.to(dtype).unsqueeze(-2) for t in (cos, sin))  # [..., T, 1, R/2]
        turns, rest = y[..., : 2 * cos.shape[-1]], y[..., 2 * cos.shape[-1] :]
        a, b = (turns[..., ::2], turns[..., 1::2]) if options.interleaved else turns.chunk(2, dim=-1)
        pairs = (a * cos - b * sin, a * sin + b * cos)
        turned = torch.stack(pairs, dim=-1).flatten(-2) if options.interleaved else torch.cat(pairs, dim=-1)
        y = torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
    return y.to(x.dtype)
