"""Norm and rotary positions of queries and keys, by head count and width: GPU time as a share of copy bandwidth.

python -m benchmarks.rotary                          the shapes of well-known models
python -m benchmarks.rotary --case rms_rotary        one of the cases

From a packed projection of queries, keys and values to turned queries and keys, values left where they are. Backward goes from
three gradients to the packed one. `compile` is torch.compile of PyTorch's operations.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bandwidth, command
from benchmarks.bandwidth import Task
from benchmarks.cases import DIRECTIONS, FORWARD, Function, TensorSet
from benchmarks.providers import compiled
from ops import rotary_qkv_fn

EPS, BASE, CONTEXT, SEQUENCES = 1e-6, 10000.0, 1024, 32
NORMS = {"rotary": None, "rms_rotary": "rmsnorm", "ln_rotary": "layernorm"}  # of queries and keys, by case


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    D: int  # features of a head


SHAPES = [Shape(12, 12, 64), Shape(16, 16, 128), Shape(32, 8, 128), Shape(8, 4, 256), Shape(12, 12, 80), Shape(12, 12, 96)]


def make_inputs(case: str, shape: Shape, tokens: int, sets: int, device: torch.device) -> list[TensorSet]:
    """Arguments: qkv [B, T, (heads + 2·kv_heads)·D] bf16; cos, sin [T, D/2]; weight and bias of queries, of keys [D] fp32."""
    normal = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))
    heads, kv_heads, D = shape
    T = min(tokens, CONTEXT)
    B = tokens // T
    angles = torch.outer(torch.arange(T, device=device), BASE ** (-torch.arange(0, D, 2, device=device) / D))
    exist = (NORMS[case] is not None, NORMS[case] == "layernorm") * 2
    weights = [((i % 2 == 0) + 0.1 * normal(D)).requires_grad_() if there else None for i, there in enumerate(exist)]
    return [
        TensorSet(
            (
                normal(B, T, (heads + 2 * kv_heads) * D, dtype=torch.bfloat16).requires_grad_(),
                angles.cos(),
                angles.sin(),
                *weights,
            ),
            tuple(normal(B, T, n, D, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads)),
        )
        for _ in range(sets)
    ]


def minimum_bytes(case: str, direction: str, shape: Shape, tokens: int) -> int:
    """Each large tensor once, in bf16: forward q and k are read and written; backward reads their gradients, with a norm q and
    k again, and the gradient of v, and writes the packed gradient. Tables and weights, which stay in cache, are not counted."""
    heads, kv_heads, D = shape
    if direction == FORWARD:
        return tokens * (heads + kv_heads) * D * 4
    return tokens * D * ((heads + kv_heads) * (4 if NORMS[case] is None else 6) + kv_heads * 4)


def ours(case: str, shape: Shape) -> Function:
    def function(qkv: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
        q_weight, q_bias, k_weight, k_bias = weights
        return rotary_qkv_fn(
            qkv, cos, sin, shape.heads, shape.kv_heads, norm=NORMS[case], eps=EPS,
            q_weight=q_weight, q_bias=q_bias, k_weight=k_weight, k_bias=k_bias,
        )  # fmt: skip

    return function


def plain_torch(case: str, shape: Shape) -> Function:
    """The norm in fp32 and the turn in fp32 with one rounding to qkv's dtype after each, as people write them."""
    norm, (heads, kv_heads, D) = NORMS[case], shape

    def turned(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = x.to(cos.dtype)
        if norm is not None:
            y = F.rms_norm(y, (D,), weight, EPS) if norm == "rmsnorm" else F.layer_norm(y, (D,), weight, bias, EPS)
            y = y.to(x.dtype).to(cos.dtype)
        a, b = y.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)

    def expression(qkv: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
        q, k, v = qkv.unflatten(-1, (-1, D)).split((heads, kv_heads, kv_heads), dim=-2)
        return turned(q, cos, sin, *weights[:2]), turned(k, cos, sin, *weights[2:]), v

    return expression


def liger(case: str, shape: Shape) -> Function | None:
    """Its Triton kernel of the turn alone. It writes in place, in backward over the upstream gradients, whose norm it keeps."""
    if NORMS[case] is not None:
        return None
    turn = import_module("liger_kernel.ops.rope").LigerRopeFunction.apply
    heads, kv_heads, D = shape

    def function(qkv: Tensor, cos: Tensor, sin: Tensor, *_: None) -> tuple[Tensor, ...]:
        q, k, v = qkv.unflatten(-1, (-1, D)).split((heads, kv_heads, kv_heads), dim=-2)
        cos, sin = (torch.cat((t, t), dim=-1)[None].to(qkv.dtype) for t in (cos, sin))
        q, k = turn(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v

    return function


PROVIDERS: dict[str, Callable[[str, Shape], Function | None]] = {
    "ours": ours,
    "torch": plain_torch,
    "compile": lambda case, shape: compiled(plain_torch(case, shape)),
    "liger-kernel": liger,
}


def task(case: str, shape: Shape, tokens: int) -> Task:
    exact = plain_torch(case, shape)
    return Task(
        {"case": case, "M": tokens, **shape._asdict()},
        bytes={direction: minimum_bytes(case, direction, shape, tokens) for direction in DIRECTIONS},
        make=lambda provider: PROVIDERS[provider](case, shape),
        inputs=partial(make_inputs, case, shape, tokens),
        reference=lambda _, *args: exact(*args),
        checked=1,  # sequence
    )


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    return command.parse(bandwidth.parser("rotary", __doc__.splitlines()[0], NORMS, PROVIDERS), argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of(argv)
    tokens = command.rows_on(options.device, SEQUENCES * CONTEXT)
    tasks = [task(case, shape, tokens) for case in options.case or NORMS for shape in SHAPES]
    bandwidth.run(options, command.importable(options.provider, PROVIDERS), tasks)


if __name__ == "__main__":
    main()
