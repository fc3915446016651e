"""Norm and rotary positions of queries and keys, by head count and width: GPU time as a share of copy bandwidth.

python -m benchmarks.rotary                          the shapes of well-known models
python -m benchmarks.rotary --case rms_rotary        one of the cases

From a packed projection of queries, keys and values to turned queries and keys, values left where they are. Backward goes from
three gradients to the packed one. `compile` is torch.compile of PyTorch's operations.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import bandwidth, command
from benchmarks.cases import BACKWARD, FORWARD, Function, drawn
from benchmarks.providers import compiled, how_of
from model.attention import query_key_site, rotary_table
from model.sites import Affine
from ops import Norm, rotary_qkv_fn

EPS, BASE, CONTEXT, SEQUENCES = 1e-6, 10000.0, 1024, 32
CASES = {"rotary": False, "rms_rotary": True}  # whether queries and keys have an RMSNorm


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    D: int  # features of a head


SHAPES = [Shape(12, 12, 64), Shape(16, 16, 128), Shape(32, 8, 128), Shape(8, 4, 256), Shape(12, 12, 80), Shape(12, 12, 96)]


def minimum_bytes(norm: bool, shape: Shape, tokens: int) -> dict[str, int]:
    """Each large tensor once, in bf16: forward q and k are read and written; backward reads their gradients, with a norm q and
    k again, and the gradient of v, and writes the packed gradient. Tables and weights, which stay in cache, are not counted."""
    heads, kv_heads, D = shape
    backward = (heads + kv_heads) * (6 if norm else 4) + kv_heads * 4
    return {FORWARD: tokens * D * (heads + kv_heads) * 4, BACKWARD: tokens * D * backward}


def ours(norm: bool, shape: Shape, table: Tensor) -> Function:
    cos, sin = table
    kind = "rmsnorm" if norm else None
    return lambda qkv, q_weight=None, k_weight=None: rotary_qkv_fn(
        qkv, cos, sin, shape.heads, shape.kv_heads, norm=kind, eps=EPS, q_weight=q_weight, k_weight=k_weight
    )


def plain_torch(norm: bool, shape: Shape, table: Tensor, dtype: torch.dtype = torch.bfloat16) -> Function:
    """In PyTorch's operators, by model/attention.py: rounded to dtype behind the norm and behind the turn."""
    how = how_of(Norm.rmsnorm, dtype, EPS)

    def function(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        norms = tuple((Affine(weight, *[None] * 7), how) for weight in weights)
        return query_key_site(qkv, table, shape.heads, shape.kv_heads, norms)

    return function


def liger(norm: bool, shape: Shape, table: Tensor) -> Function | None:
    """Its Triton kernel of the turn alone. It writes in place, in backward over the upstream gradients, whose norm it keeps."""
    if norm:
        return None
    turn = import_module("liger_kernel.ops.rope").LigerRopeFunction.apply
    heads, kv_heads, D = shape

    def function(qkv: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.unflatten(-1, (-1, D)).split((heads, kv_heads, kv_heads), dim=-2)
        cos, sin = (torch.cat((t, t), dim=-1)[None].to(qkv.dtype) for t in table)
        q, k = turn(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v

    return function


PROVIDERS: dict[str, Callable[[bool, Shape, Tensor], Function | None]] = {
    "ours": ours,
    "torch": plain_torch,
    "compile": lambda *of: compiled(plain_torch(*of)),
    "liger-kernel": liger,
}


def task(case: str, shape: Shape, tokens: int, device: torch.device) -> bandwidth.Task:
    T, (heads, kv_heads, D) = min(tokens, CONTEXT), shape
    norm, table = CASES[case], rotary_table(T, D, BASE).to(device)
    exact = plain_torch(norm, shape, table, torch.float64)

    def draw(normal: Callable[..., Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """qkv [B, T, (heads + 2·kv_heads)·D] bf16; with a norm the weights of queries and of keys [D] fp32."""
        weights = [1 + 0.1 * normal(D, dtype=torch.float32) for _ in range(2 * norm)]
        qkv = normal(tokens // T, T, (heads + 2 * kv_heads) * D)
        return [qkv, *weights], [normal(tokens // T, T, n, D) for n in (heads, kv_heads, kv_heads)]

    return bandwidth.Task(
        {"case": case, "M": tokens, **shape._asdict()},
        bytes=minimum_bytes(norm, shape, tokens),
        make=lambda provider: PROVIDERS[provider](norm, shape, table),
        inputs=partial(drawn, draw),
        reference=lambda _, *args: exact(*args),
        checked=1,  # sequence
        move_outputs=True,
    )


def tasks(options: Namespace) -> list[bandwidth.Task]:
    tokens = command.rows_on(options.device, SEQUENCES * CONTEXT)
    return [task(case, shape, tokens, options.device) for case in options.case or CASES for shape in SHAPES]


options_of, main = bandwidth.program("rotary", __doc__, CASES, PROVIDERS, tasks)

if __name__ == "__main__":
    main()
