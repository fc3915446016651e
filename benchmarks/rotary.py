"""Norm and rotary positions of queries and keys, by head count and width: GPU time as a share of copy bandwidth.

python -m benchmarks.rotary                                      the shapes of well-known models
python -m benchmarks.rotary --heads 12/12x64 40/8x80             query heads / key heads x features of a head
python -m benchmarks.rotary --random 12 --seed 1 --case rms_rotary

From a packed projection of queries, keys and values to turned queries and keys, values left where they are. Backward goes from
three gradients to the packed one. `compile` is torch.compile of PyTorch's operations.
"""

import argparse
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bandwidth, command
from benchmarks.bandwidth import Cell, Task, contender
from benchmarks.cases import BACKWARD, DIRECTIONS, FORWARD, near
from benchmarks.providers import compiled
from measure import timing
from ops import rotary_qkv_fn

EPS, BASE, CONTEXT = 1e-6, 10000.0, 1024
NORMS = {"rotary": None, "rms_rotary": "rmsnorm", "ln_rotary": "layernorm"}  # of queries and keys, by case


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    D: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.D}"


SHAPES = [Shape(12, 12, 64), Shape(16, 16, 128), Shape(32, 8, 128), Shape(8, 4, 256), Shape(12, 12, 80), Shape(12, 12, 96)]


@dataclass(frozen=True)
class Inputs:
    qkv: Tensor  # [B, T, (heads + 2·kv_heads)·D] bf16
    cos: Tensor  # [T, D/2] fp32
    sin: Tensor
    weights: tuple[Tensor | None, ...]  # of queries and keys: weight, bias, weight, bias; [D] fp32
    upstream: tuple[Tensor, ...]  # of q, k and v

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.qkv, *(t for t in self.weights if t is not None))


Function = Callable[[Inputs], tuple[Tensor, ...]]


def make_inputs(case: str, shape: Shape, tokens: int, sets: int, device: torch.device) -> list[Inputs]:
    generator = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, device=device, generator=generator)
    heads, kv_heads, D = shape
    T = min(tokens, CONTEXT)
    B = tokens // T
    angles = torch.outer(torch.arange(T, device=device), BASE ** (-torch.arange(0, D, 2, device=device) / D))
    exist = (NORMS[case] is not None, NORMS[case] == "layernorm") * 2
    weights = tuple((i % 2 == 0) + 0.1 * normal(D) if there else None for i, there in enumerate(exist))
    return [
        Inputs(
            normal(B, T, (heads + 2 * kv_heads) * D, dtype=torch.bfloat16).requires_grad_(),
            angles.cos(),
            angles.sin(),
            tuple(None if t is None else t.clone().requires_grad_() for t in weights),
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


# ---- providers --------------------------------------------------------------------------------------------------------------


def ours(case: str, shape: Shape) -> Function:
    def function(i: Inputs) -> tuple[Tensor, ...]:
        q_weight, q_bias, k_weight, k_bias = i.weights
        return rotary_qkv_fn(
            i.qkv, i.cos, i.sin, shape.heads, shape.kv_heads, norm=NORMS[case], eps=EPS,
            q_weight=q_weight, q_bias=q_bias, k_weight=k_weight, k_bias=k_bias,
        )  # fmt: skip

    return function


def plain_torch(case: str, shape: Shape) -> Function:
    """The norm in fp32 and the turn in fp32 with one rounding to qkv's dtype after each, as people write them."""
    norm, (heads, kv_heads, D) = NORMS[case], shape

    def of(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = x.to(cos.dtype)
        if norm is not None:
            y = F.rms_norm(y, (D,), weight, EPS) if norm == "rmsnorm" else F.layer_norm(y, (D,), weight, bias, EPS)
            y = y.to(x.dtype).to(cos.dtype)
        a, b = y.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)

    def expression(qkv: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
        q, k, v = qkv.unflatten(-1, (-1, D)).split((heads, kv_heads, kv_heads), dim=-2)
        return of(q, cos, sin, *weights[:2]), of(k, cos, sin, *weights[2:]), v

    return lambda i: expression(i.qkv, i.cos, i.sin, *i.weights)


def torch_compile(case: str, shape: Shape) -> Function:
    return compiled(plain_torch(case, shape))


def liger(case: str, shape: Shape) -> Function | None:
    """Its Triton kernel of the turn alone. It writes in place, in backward over the upstream gradients, whose norm it keeps."""
    if NORMS[case] is not None:
        return None
    turn = import_module("liger_kernel.ops.rope").LigerRopeFunction.apply
    heads, kv_heads, D = shape

    def function(i: Inputs) -> tuple[Tensor, ...]:
        q, k, v = i.qkv.unflatten(-1, (-1, D)).split((heads, kv_heads, kv_heads), dim=-2)
        cos, sin = (torch.cat((t, t), dim=-1)[None].to(i.qkv.dtype) for t in (i.cos, i.sin))
        q, k = turn(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v

    return function


PROVIDERS: dict[str, Callable[[str, Shape], Function | None]] = {
    "ours": ours, "torch": plain_torch, "compile": torch_compile, "liger-kernel": liger,
}  # fmt: skip


CHECKED = 64  # tokens


def check(case: str, shape: Shape, backward: bool, inputs: Inputs, function: Function) -> None:
    """Compares the first tokens with fp64. Raises WrongResult."""
    first = (slice(0, 1), slice(0, CHECKED))
    qkv = inputs.qkv.detach()[first].double().requires_grad_()
    weights = tuple(None if t is None else t.detach().double() for t in inputs.weights)
    small = Inputs(qkv, inputs.cos[:CHECKED].double(), inputs.sin[:CHECKED].double(), weights, ())
    expected = plain_torch(case, shape)(small)
    outputs = function(inputs)
    for name, found, right in zip("qkv", outputs, expected, strict=True):
        near(name, found[first], right)
    if backward:
        gradients = torch.autograd.grad(outputs, inputs.leaves, inputs.upstream)
        right = torch.autograd.grad(expected, qkv, [t[first].double() for t in inputs.upstream])[0]
        near("gradient of qkv", gradients[0][first], right)


def task(case: str, shape: Shape, tokens: int) -> Task:
    def cell(direction: str) -> Cell:
        def contenders(functions: dict[str, Function], count: int, device: torch.device) -> list[timing.Contender]:
            sets = make_inputs(case, shape, tokens, count, device)
            right = partial(check, case, shape, direction == BACKWARD)
            return [contender(name, function, direction, sets, right) for name, function in functions.items()]

        facts = {"case": case, "direction": direction, "M": tokens, **shape._asdict()}
        return Cell(facts, minimum_bytes(case, direction, shape, tokens), contenders)

    return Task(lambda provider: PROVIDERS[provider](case, shape), [cell(direction) for direction in DIRECTIONS])


def shape_of(text: str) -> Shape:
    found = re.fullmatch(r"(\d+)/(\d+)x(\d+)", text)
    shape = Shape(*map(int, found.groups())) if found else None
    if shape is None or 0 in shape or shape.D % 2:
        raise argparse.ArgumentTypeError(f"{text} is not like 32/8x128: query heads, key heads, an even number of features")
    return shape


def random_shapes(seed: int, count: int) -> list[Shape]:
    """Shapes that depend on the seed alone: up to 48 heads, groups of 1 to 8, 16 to 256 features in steps of 8."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        group = draw.choice((1, 1, 2, 3, 4, 8))
        kv_heads = draw.randint(1, 48 // group)
        found.append(Shape(group * kv_heads, kv_heads, 8 * draw.randint(2, 32)))
    return found


def options_of(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = bandwidth.parser("rotary", __doc__.splitlines()[0], PROVIDERS)
    parser.add_argument("--case", nargs="+", choices=tuple(NORMS), default=["rotary", "rms_rotary"], help="(the first two)")
    parser.add_argument("--heads", nargs="+", type=shape_of, metavar="H/KVxD", help=f"({' '.join(map(str, SHAPES))})")
    parser.add_argument("--random", type=command.positive, metavar="COUNT", help="COUNT shapes drawn at random instead")
    parser.add_argument("--seed", type=int, default=0, help="of --random (%(default)s)")
    parser.add_argument("--tokens", type=command.positive, help=f"(32768, {command.CPU_ROWS} on the CPU)")
    options = command.parse(parser, argv, bandwidth.ROUNDS)
    if options.random and options.heads:
        parser.error("--random draws the shapes; leave --heads out")
    options.tokens = options.tokens or command.rows_on(options.device, 32768)
    options.heads = options.heads or (random_shapes(options.seed, options.random) if options.random else SHAPES)
    if options.tokens > CONTEXT and options.tokens % CONTEXT:
        parser.error(f"--tokens {options.tokens} is more than {CONTEXT}, the length of a sequence, and no multiple of it")
    return parser, options


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser, options = options_of(argv)
    tasks = [task(case, shape, options.tokens) for case in options.case for shape in options.heads]
    bandwidth.run("rotary", parser, options, argv, command.importable(options.provider, PROVIDERS), tasks)


if __name__ == "__main__":
    command.run(main)
