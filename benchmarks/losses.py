"""Softmax, log-softmax and cross-entropy of every library: GPU time with cold L2, as a share of this card's copy bandwidth.

Shares count the fewest bytes: softmax reads and writes each element once, its backward reads two and writes one; cross-entropy,
forward and backward in one call, reads each logit once and writes its gradient.

python -m benchmarks.losses                                everything that can be imported
python -m benchmarks.losses --case softmax --dtype fp16    49152 rows of 32 to 32768 columns in fp16, as OneFlow measured
python -m benchmarks.losses --case cross_entropy --shape 32768x50304 --dtype bf16
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bandwidth, command
from benchmarks.bandwidth import Functions, Task, contender, near
from benchmarks.cases import BOTH, DIRECTIONS, DTYPES, TensorSet
from benchmarks.providers import as_tuple, compiled
from measure.timing import Call, Contender
from ops import cross_entropy_fn, log_softmax_fn, softmax_fn

ARTICLE = [(49152, 2**power) for power in range(5, 16)]
SHAPES = {
    "cross_entropy": [(32768, 50304), (32768, 50257), (8192, 128256), (4096, 151936), (8192, 262144), (65536, 2048)],
    "softmax": ARTICLE,
    "log_softmax": ARTICLE,
}
CHECKED = 64  # rows
Loss = Callable[..., Tensor]


def torch_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


def liger_loss() -> Loss:
    apply = import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction.apply
    return lambda logits, targets: apply(logits, targets, None, -100)[0]


MAKERS: dict[str, dict[str, Callable[[], Loss]]] = {
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
        "torch": lambda: torch_loss,
        "compile": lambda: compiled(torch_loss),
        "liger-kernel": liger_loss,
        "quack-kernels": lambda: partial(import_module("quack.cross_entropy").cross_entropy, inplace_backward=True),
    },
}
PROVIDERS = tuple(MAKERS["cross_entropy"])


def loss_contender(name: str, function: Loss, source: Tensor, logits: Tensor, targets: Tensor) -> Contender:
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


def task(case: str, M: int, N: int, dtype: str) -> Task:
    def contenders(direction: str, functions: Functions, count: int, device: torch.device) -> list[Contender]:
        # not PyTorch's own generator: a capture that failed in the cell before leaves it unusable
        generator = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, M, N, device=device, dtype=DTYPES[dtype], generator=generator)
        if direction == BOTH:
            source, targets = normal(), torch.randint(N, (M,), device=device, generator=generator)
            logits = source.clone()
            return [loss_contender(name, function, source, logits, targets) for name, function in functions.items()]
        sets = [TensorSet((normal().requires_grad_(),), (normal(),)) for _ in range(count)]
        exact = torch.softmax if case == "softmax" else torch.log_softmax
        right = partial(bandwidth.check, lambda _, x: (exact(x, -1),), CHECKED)
        return [
            contender(name, lambda x, f=function: as_tuple(f(x)), direction, sets, right)
            for name, function in functions.items()
        ]

    facts = {"case": case, "dtype": dtype, "M": M, "N": N}
    size = M * N * DTYPES[dtype].itemsize
    least = {BOTH: 2 * size} if case == "cross_entropy" else dict(zip(DIRECTIONS, (2 * size, 3 * size), strict=True))
    makers = MAKERS[case]
    return Task(facts, least, lambda name: makers[name]() if name in makers else None, contenders, move_outputs=False)


def shape(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    return command.positive(rows), command.positive(columns)


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    parser = bandwidth.parser("losses", __doc__.splitlines()[0], MAKERS, PROVIDERS)
    parser.add_argument("--shape", nargs="+", type=shape, metavar="MxN", help="rows and columns (those of the module's SHAPES)")
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=["bf16"], help="(bf16)")
    return command.parse(parser, argv)


def shapes_of(case: str, options: argparse.Namespace) -> list[tuple[int, int]]:
    shapes = options.shape or SHAPES[case]
    shapes = shapes[:1] if options.quick else shapes
    return shapes if options.device == "cuda" else [(min(M, command.CPU_ROWS), min(N, 512)) for M, N in shapes]


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of(sys.argv[1:] if argv is None else argv)
    tasks = [
        task(case, *at, dtype) for case in options.case or MAKERS for at in shapes_of(case, options) for dtype in options.dtype
    ]
    bandwidth.run(options, command.importable(options.provider, PROVIDERS), tasks)


if __name__ == "__main__":
    main()
