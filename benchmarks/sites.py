"""Sites with a norm of the branch, and pointwise norms: GPU time as a share of copy bandwidth.

python -m benchmarks.sites                                   the widths of well-known models, both streams
python -m benchmarks.sites --width 4608 5376 --case norm_add_norm
python -m benchmarks.sites --random 12 --seed 1              multiples of 64 from 640 to 5376

`compile` is torch.compile of PyTorch's operations.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bandwidth, command
from benchmarks.bandwidth import Cell, Task, contender
from benchmarks.cases import DIRECTIONS, DTYPES, FORWARD, TOLERANCE, near
from benchmarks.providers import compiled
from measure import timing
from ops import Norm, norm_fn
from ops.reference import NORMS

EPS, DROPOUT = 1e-6, 0.1
WIDTHS = (768, 1152, 2304, 3584, 4608, 5376)


@dataclass(frozen=True)
class Case:
    """r = residual + dropout(B(x)), y = N(r)."""

    norm: Norm
    branch: Norm
    dropout: bool = False


CASES = {
    "norm_add_norm": Case(Norm.rmsnorm, Norm.rmsnorm),
    "norm_add": Case(Norm.none, Norm.rmsnorm),
    "dropout_norm_add": Case(Norm.none, Norm.rmsnorm, dropout=True),
    "ln_add_ln": Case(Norm.layernorm, Norm.layernorm),
    "add_dyt": Case(Norm.dyt, Norm.none),
    "add_derf": Case(Norm.derf, Norm.none),
}


@dataclass(frozen=True)
class Inputs:
    """x in bf16 and the stream are [M, N]; of each norm the weight and bias [N] and the learned scalars, where it has them."""

    x: Tensor
    residual: Tensor
    of_norm: tuple[Tensor | None, ...]
    of_branch: tuple[Tensor | None, ...]
    upstream: tuple[Tensor, ...]  # of y, where it is not r, and of r

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.x, self.residual, *(t for t in (*self.of_norm, *self.of_branch) if t is not None))


Function = Callable[[Inputs], tuple[Tensor, ...]]


def make_inputs(
    case: Case, M: int, N: int, stream: torch.dtype, weights: torch.dtype, sets: int, device: torch.device
) -> list[Inputs]:
    normal = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))

    def parameters(norm: Norm) -> tuple[Tensor | None, ...]:
        if norm == Norm.none:
            return None, None, None
        bias = None if norm == Norm.rmsnorm else 0.1 * normal(N)
        scalars = 0.5 + 0.1 * normal(norm.scalars) if norm.scalars else None
        found = (1 + 0.1 * normal(N), bias, scalars)
        return tuple(None if t is None else t.to(weights).requires_grad_() for t in found)

    of_norm, of_branch = parameters(case.norm), parameters(case.branch)
    return [
        Inputs(
            normal(M, N, dtype=torch.bfloat16).requires_grad_(),
            normal(M, N, dtype=stream).requires_grad_(),
            of_norm,
            of_branch,
            (*[normal(M, N, dtype=torch.bfloat16)] * (not y_is_r(case, stream)), normal(M, N, dtype=stream)),
        )
        for _ in range(sets)
    ]


def y_is_r(case: Case, stream: torch.dtype) -> bool:
    return case.norm == Norm.none and stream == torch.bfloat16


def minimum_bytes(case: Case, direction: str, M: int, N: int, stream: torch.dtype) -> int:
    """Each large tensor once: x, residual, r, and y where it is not r. Backward reads the gradients of y and r, r where there
    is a norm of it and x where there is one of x. It writes the gradients of x and of the residual, which are one tensor where
    nothing changes x and the dtypes are equal. Weights, statistics and masks are not counted."""
    s, y = stream.itemsize, 0 if y_is_r(case, stream) else 2
    if direction == FORWARD:
        return M * N * (2 + 2 * s + y)
    changed = case.branch != Norm.none or case.dropout or s != 2
    return M * N * (y + s + s * (case.norm != Norm.none) + 2 * (case.branch != Norm.none) + s + 2 * changed)


# ---- providers --------------------------------------------------------------------------------------------------------------


def _results(case: Case, y: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    return (r,) if y_is_r(case, r.dtype) else (y, r)


def ours(case: Case) -> Function:
    p = DROPOUT if case.dropout else 0.0

    def function(i: Inputs) -> tuple[Tensor, ...]:
        (weight, bias, scalars), (branch_weight, branch_bias, branch_scalars) = i.of_norm, i.of_branch
        found: Any = norm_fn(
            case.norm, i.x, weight, bias, i.residual, eps=EPS, dropout_p=p, prenorm=True, scalars=scalars,
            branch_norm=case.branch, branch_weight=branch_weight, branch_bias=branch_bias, branch_scalars=branch_scalars,
        )  # fmt: skip
        return _results(case, *found)

    return function


def plain_torch(case: Case) -> Function:
    """Norms in fp32 and their outputs rounded to x's dtype, as people write them under autocast."""

    def normed(norm: Norm, x: Tensor, parameters: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias, scalars = (None if t is None else t.to(wide) for t in parameters)
        return NORMS[norm](x.to(wide), weight, bias, EPS, scalars).to(dtype)

    def expression(x: Tensor, residual: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        branch = x if case.branch == Norm.none else normed(case.branch, x, parameters[3:], x.dtype)
        r = residual + (F.dropout(branch, DROPOUT) if case.dropout else branch)
        return _results(case, normed(case.norm, r, parameters[:3], x.dtype), r)

    return lambda i: expression(i.x, i.residual, *i.of_norm, *i.of_branch)


def torch_compile(case: Case) -> Function:
    return compiled(plain_torch(case))


def liger(case: Case) -> Function | None:
    """Its Dynamic Tanh, after PyTorch's add."""
    if case != CASES["add_dyt"]:
        return None
    apply = import_module("liger_kernel.ops.dyt").LigerDyTFunction.apply

    def function(i: Inputs) -> tuple[Tensor, ...]:
        weight, bias, alpha = i.of_norm
        r = i.residual + i.x
        return apply(r, alpha, weight, bias).to(i.x.dtype), r

    return function


PROVIDERS: dict[str, Callable[[Case], Function | None]] = {
    "ours": ours, "torch": plain_torch, "compile": torch_compile, "liger-kernel": liger,
}  # fmt: skip


CHECKED = 64  # rows


def check(case: Case, inputs: Inputs, function: Function) -> None:
    """Compares results and gradients of the first rows with fp64; with dropout, nothing. Raises WrongResult."""
    if case.dropout:
        return

    def cut(t: Tensor | None, dtype: torch.dtype | None = None) -> Any:
        return (
            None if t is None else (t.detach()[:CHECKED] if t.dim() == 2 else t.detach()).to(dtype or t.dtype).requires_grad_()
        )

    def first(dtype: torch.dtype | None = None) -> Inputs:
        groups = [tuple(cut(t, dtype) for t in of) for of in (inputs.of_norm, inputs.of_branch, inputs.upstream)]
        return Inputs(cut(inputs.x, dtype), cut(inputs.residual, dtype), *groups)

    small, exact = first(), first(torch.float64)
    outputs, expected = function(small), plain_torch(case)(exact)
    expected = expected[-len(outputs) :]  # in fp64, y and r have one dtype and are two tensors all the same
    pairs = list(zip(outputs, expected, strict=True))
    gradients = torch.autograd.grad(outputs, small.leaves, small.upstream)
    pairs += zip(gradients, torch.autograd.grad(expected, exact.leaves, exact.upstream), strict=True)
    for at, (found, right) in enumerate(pairs):  # a scalar's gradient is a sum in which most cancels
        near(f"result {at}", found, right, TOLERANCE if found.dim() == 2 else 10 * TOLERANCE)


def task(name: str, M: int, N: int, stream: str, weights: str) -> Task:
    case = CASES[name]

    def cell(direction: str) -> Cell:
        def contenders(functions: dict[str, Function], count: int, device: torch.device) -> list[timing.Contender]:
            sets = make_inputs(case, M, N, DTYPES[stream], DTYPES[weights], count, device)
            return [contender(who, of, direction, sets, partial(check, case)) for who, of in functions.items()]

        facts = {"case": name, "direction": direction, "residual_dtype": stream, "weight_dtype": weights, "M": M, "N": N}
        return Cell(facts, minimum_bytes(case, direction, M, N, DTYPES[stream]), contenders)

    return Task(lambda provider: PROVIDERS[provider](case), [cell(direction) for direction in DIRECTIONS])


def options_of(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = bandwidth.parser("sites", __doc__.splitlines()[0], PROVIDERS)
    parser.add_argument(
        "--case", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}"
    )
    parser.add_argument("--width", nargs="+", type=command.positive, metavar="N", help=f"({' '.join(map(str, WIDTHS))})")
    parser.add_argument(
        "--random", type=command.positive, metavar="COUNT", help="COUNT multiples of 64 from 640 to 5376 instead"
    )
    parser.add_argument("--seed", type=int, default=0, help="of --random (%(default)s)")
    parser.add_argument("--residual", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"], help="the stream (both)")
    parser.add_argument("--weights", nargs="+", choices=("bf16", "fp32"), default=["fp32"], help="(fp32)")
    parser.add_argument("--elements", type=command.positive, default=2**26, help="of a tensor (2^26)")
    options = command.parse(parser, argv, bandwidth.ROUNDS)
    if options.random and options.width:
        parser.error("--random draws the widths; leave --width out")
    drawn = [64 * n for n in random.Random(options.seed).sample(range(10, 85), min(options.random or 1, 75))]
    options.width = options.width or (drawn if options.random else list(WIDTHS))
    return parser, options


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser, options = options_of(argv)
    tasks = [
        task(case, command.rows_on(options.device, max(1, options.elements // width)), width, stream, weights)
        for case in options.case
        for width in options.width
        for stream in options.residual
        for weights in options.weights
    ]
    bandwidth.run("sites", parser, options, argv, command.importable(options.provider, PROVIDERS), tasks)


if __name__ == "__main__":
    command.run(main)
