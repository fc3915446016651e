"""Softmax, log-softmax and cross-entropy of every library: GPU time with cold L2, as a share of this card's copy bandwidth.

Shares count the fewest bytes: softmax reads and writes each element once, its backward reads two and writes one; cross-entropy,
forward and backward in one call, reads each logit once and writes its gradient.

python -m benchmarks.losses                                everything that can be imported
python -m benchmarks.losses --case softmax --article       49152 rows of 32 to 32768 columns in fp16, as OneFlow measured
python -m benchmarks.losses --case cross_entropy --shape 32768x50304 --dtype bf16
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bandwidth, command
from benchmarks.bandwidth import BOTH, Cell, Task, contender
from benchmarks.cases import BACKWARD, DIRECTIONS, DTYPES, near
from benchmarks.providers import compiled
from measure.timing import Call, Contender
from ops import cross_entropy_fn, log_softmax_fn, softmax_fn

ARTICLE = [(49152, 2**power) for power in range(5, 16)]
SHAPES = {
    "cross_entropy": [(32768, 50304), (32768, 50257), (8192, 128256), (4096, 151936), (8192, 262144), (65536, 2048)],
    "softmax": ARTICLE,
    "log_softmax": ARTICLE,
}
Function = Callable[..., Tensor]


def _torch_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


def _liger_loss() -> Function:
    apply = import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction.apply
    return lambda logits, targets: apply(logits, targets, None, -100)[0]


def _quack_loss() -> Function:
    return partial(import_module("quack.cross_entropy").cross_entropy, inplace_backward=True)


_MAKE: dict[str, dict[str, Callable[[], Function]]] = {
    "softmax": {
        "ours": lambda: softmax_fn,
        "torch": lambda: partial(torch.softmax, dim=-1),
        "compile": lambda: compiled(lambda x: torch.softmax(x, -1)),
        "liger-kernel": lambda: import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply,
        "quack-kernels": lambda: import_module("quack.softmax").softmax,
    },
    "log_softmax": {
        "ours": lambda: log_softmax_fn,
        "torch": lambda: partial(torch.log_softmax, dim=-1),
        "compile": lambda: compiled(lambda x: torch.log_softmax(x, -1)),
    },
    "cross_entropy": {
        "ours": lambda: partial(cross_entropy_fn, in_place=True),
        "torch": lambda: _torch_loss,
        "compile": lambda: compiled(_torch_loss),
        "liger-kernel": _liger_loss,
        "quack-kernels": _quack_loss,
    },
}


PROVIDERS = tuple(_MAKE["cross_entropy"])


def loss_contender(name: str, function: Function, source: Tensor, logits: Tensor, targets: Tensor) -> Contender:
    """Forward and backward. A function that overwrites its logits finds them as they were at each turn."""

    def both(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        loss = function(leaf.view_as(leaf), targets)
        return loss, torch.autograd.grad(loss, leaf)[0]

    def build() -> Sequence[Call]:
        logits.copy_(source)
        loss, gradient = both(logits[:CHECKED].clone(), targets[:CHECKED])
        exact = source[:CHECKED].double().requires_grad_()
        expected = F.cross_entropy(exact, targets[:CHECKED])
        near("loss", loss, expected)
        near("gradient", gradient, torch.autograd.grad(expected, exact)[0])
        return [lambda: both(logits, targets)[0]]  # the gradient may be the logits, which are no output that can move

    return Contender(name, build, lambda: logits.copy_(source))


CHECKED = 64  # rows


@dataclass(frozen=True)
class Rows:
    """One set of inputs of a softmax."""

    x: Tensor
    dy: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.x,)

    @property
    def upstream(self) -> tuple[Tensor, ...]:
        return (self.dy,)


def check(case: str, inputs: Rows, function: Function) -> None:
    small = Rows(inputs.x.detach()[:CHECKED].clone().requires_grad_(), inputs.dy[:CHECKED].clone())
    exact = small.x.detach().double().requires_grad_()
    y, expected = function(small), (torch.softmax if case == "softmax" else torch.log_softmax)(exact, -1)
    near("y", y, expected)
    right = torch.autograd.grad(expected, exact, small.dy.double())[0]
    near("gradient of x", torch.autograd.grad(y, small.leaves, small.upstream)[0], right)


def task(case: str, M: int, N: int, dtype: str) -> Task:
    def contenders(direction: str, functions: dict[str, Function], count: int, device: torch.device) -> list[Contender]:
        normal = partial(torch.randn, M, N, device=device, dtype=DTYPES[dtype])
        if case == "cross_entropy":
            source, targets = normal(), torch.randint(N, (M,), device=device)
            logits = source.clone()
            return [loss_contender(name, function, source, logits, targets) for name, function in functions.items()]
        sets = [Rows(normal().requires_grad_(), normal()) for _ in range(count)]
        return [contender(name, function, direction, sets, partial(check, case)) for name, function in functions.items()]

    def make(provider: str) -> Function | None:
        if provider not in _MAKE[case]:
            return None
        function = _MAKE[case][provider]()
        return function if case == "cross_entropy" else lambda rows: function(rows.x)

    cells = []
    for direction in (BOTH,) if case == "cross_entropy" else DIRECTIONS:
        facts = {"case": case, "direction": direction, "dtype": dtype, "M": M, "N": N}
        bytes_ = M * N * DTYPES[dtype].itemsize * (3 if direction == BACKWARD else 2)
        cells.append(Cell(facts, bytes_, partial(contenders, direction), move_outputs=False))
    return Task(make, cells)


def shape(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    return command.positive(rows), command.positive(columns)


def options_of(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = bandwidth.parser("losses", __doc__.splitlines()[0], PROVIDERS)
    parser.add_argument("--case", nargs="+", choices=tuple(_MAKE), default=list(_MAKE), help="(all)")
    parser.add_argument("--shape", nargs="+", type=shape, metavar="MxN", help="rows and columns (those of the module's SHAPES)")
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), help="(bf16; fp16 with --article)")
    parser.add_argument("--article", action="store_true", help="OneFlow's range: 49152 rows of 32 to 32768 columns in fp16")
    options = command.parse(parser, argv, bandwidth.ROUNDS)
    options.dtype = options.dtype or (["fp16"] if options.article else ["bf16"])
    return parser, options


def shapes_of(case: str, options: argparse.Namespace) -> list[tuple[int, int]]:
    shapes = options.shape or (ARTICLE if options.article else SHAPES[case])
    shapes = shapes[:1] if options.quick else shapes
    return shapes if options.device == "cuda" else [(min(M, command.CPU_ROWS), min(N, 512)) for M, N in shapes]


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser, options = options_of(argv)
    tasks = [task(case, *at, dtype) for case in options.case for at in shapes_of(case, options) for dtype in options.dtype]
    bandwidth.run("losses", parser, options, argv, command.importable(options.provider, PROVIDERS), tasks)


if __name__ == "__main__":
    command.run(main)
