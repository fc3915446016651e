"""Norm and rotary positions of queries and keys, by head count and width: GPU time as a share of copy bandwidth.

python -m benchmarks.rotary                          the shapes of well-known models
python -m benchmarks.rotary --case rms_rotary        one of the cases

From a packed projection of queries, keys and values to turned queries and keys, values left where they are. Backward goes from
three gradients to the packed one. `compile` is torch.compile of PyTorch's operations.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from benchmarks.bandwidth import Task, by_provider, program
from benchmarks.cases import BACKWARD, FORWARD, Function, drawn
from benchmarks.providers import how_of
from model.attention import query_key_site, rotary_table
from model.sites import Affine
from ops import Norm, rotary_qkv_fn

EPS, BASE = 1e-6, 10000.0
CASES = {"rotary": False, "rms_rotary": True}  # whether queries and keys have an RMSNorm
HEADS = [(12, 12, 64), (16, 16, 128), (32, 8, 128), (8, 4, 256), (12, 12, 80), (12, 12, 96)]
SHAPES = [(32, 1024, *heads) for heads in HEADS]  # sequences, tokens of one, heads, those of keys, features of a head


def minimum_bytes(norm: bool, tokens: int, heads: int, kv_heads: int, D: int) -> dict[str, int]:
    """Each large tensor once, in bf16: forward q and k are read and written; backward reads their gradients, with a norm q and
    k again, and the gradient of v, and writes the packed gradient. Tables and weights, which stay in cache, are not counted."""
    backward = (heads + kv_heads) * (6 if norm else 4) + kv_heads * 4
    return {FORWARD: tokens * D * (heads + kv_heads) * 4, BACKWARD: tokens * D * backward}


def task(case: str, B: int, T: int, heads: int, kv_heads: int, D: int) -> Task:
    norm, table = CASES[case], rotary_table(T, D, BASE)
    cos, sin = table

    def ours(qkv: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None) -> tuple[Tensor, ...]:
        kind = "rmsnorm" if norm else None
        return rotary_qkv_fn(qkv, cos, sin, heads, kv_heads, norm=kind, eps=EPS, q_weight=q_weight, k_weight=k_weight)

    def plain(dtype: torch.dtype) -> Function:
        """In PyTorch's operators, by model/attention.py: rounded to dtype behind the norm and behind the turn."""
        how = how_of(Norm.rmsnorm, dtype, EPS)

        def function(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            norms = tuple((Affine(weight, *[None] * 7), how) for weight in weights)
            return query_key_site(qkv, table, heads, kv_heads, norms)

        return function

    def liger() -> Function:
        """Its Triton kernel of the turn alone. It writes in place, in backward over the upstream gradients."""
        turn = import_module("liger_kernel.ops.rope").LigerRopeFunction.apply

        def function(qkv: Tensor) -> tuple[Tensor, ...]:
            q, k, v = qkv.unflatten(-1, (-1, D)).split((heads, kv_heads, kv_heads), dim=-2)
            both = (torch.cat((t, t), dim=-1)[None].to(qkv.dtype) for t in table)
            q, k = turn(q.transpose(1, 2), k.transpose(1, 2), *both)
            return q.transpose(1, 2), k.transpose(1, 2), v

        return function

    def draw(normal: Callable[..., Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """qkv [B, T, (heads + 2·kv_heads)·D] bf16; with a norm the weights of queries and of keys [D] fp32."""
        weights = [1 + 0.1 * normal(D, dtype=torch.float32) for _ in range(2 * norm)]
        qkv = normal(B, T, (heads + 2 * kv_heads) * D)
        return [qkv, *weights], [normal(B, T, n, D) for n in (heads, kv_heads, kv_heads)]

    exact = plain(torch.float64)
    return Task(
        {"case": case, "M": B * T, "heads": heads, "kv_heads": kv_heads, "D": D},
        bytes=minimum_bytes(norm, B * T, heads, kv_heads, D),
        make=by_provider(ours, plain(torch.bfloat16), liger_kernel=None if norm else liger),
        inputs=partial(drawn, draw),
        reference=lambda _, *args: exact(*args),
        checked=1,  # sequence
        move_outputs=True,
    )


options_of, main = program("rotary", __doc__, dict.fromkeys(CASES, SHAPES), task, ["liger-kernel"], on_cpu=(1, 64, 3, 1, 16))

if __name__ == "__main__":
    main()
