"""Softmax and cross-entropy of every library: GPU time with cold L2, as a share of this card's copy bandwidth.

Shares count the fewest bytes: softmax reads and writes each element once, its backward reads two and writes one; cross-entropy,
forward and backward in one call, reads each logit once and writes its gradient.

python -m benchmarks.losses                                everything that can be imported
python -m benchmarks.losses --case softmax --dtype fp16    49152 rows of 32 to 32768 columns in fp16, as OneFlow measured
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bandwidth, command
from benchmarks.bandwidth import Functions, Task, near
from benchmarks.cases import BACKWARD, BOTH, DTYPES, FORWARD, drawn
from benchmarks.providers import compiled
from measure.timing import Call, Contender
from ops import cross_entropy_fn, softmax_fn

SHAPES = {
    "cross_entropy": [(32768, 50304), (32768, 50257), (8192, 128256), (4096, 151936), (8192, 262144), (65536, 2048)],
    "softmax": [(49152, 2**power) for power in range(5, 16)],
}
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
    "cross_entropy": {
        "ours": lambda: partial(cross_entropy_fn, in_place=True),
        "torch": lambda: torch_loss,
        "compile": lambda: compiled(torch_loss),
        "liger-kernel": liger_loss,
        "quack-kernels": lambda: partial(import_module("quack.cross_entropy").cross_entropy, inplace_backward=True),
    },
}


@dataclass(frozen=True)
class LossTask(Task):
    """Cross-entropy, forward and backward in one call. It may overwrite the logits: each turn finds them as they were."""

    def contenders(self, direction: str, functions: Functions, sets: int, device: torch.device) -> list[Contender]:
        ((source, targets),) = (inputs.args for inputs in self.inputs(1, device))
        assert source is not None and targets is not None
        source = source.detach()
        logits = source.clone()

        def both(function: Loss, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            leaf = logits.detach().requires_grad_()
            loss = function(leaf.view_as(leaf), targets)
            return loss, torch.autograd.grad(loss, leaf)[0]

        def build(function: Loss) -> Sequence[Call]:
            logits.copy_(source)
            loss, gradient = both(function, logits[: self.checked].clone(), targets[: self.checked])
            exact = source[: self.checked].double().requires_grad_()
            expected = self.reference(exact, targets[: self.checked])
            near("loss", loss, expected)
            near("gradient", gradient, torch.autograd.grad(expected, exact)[0])
            return [lambda: both(function, logits, targets)[0]]  # the gradient may be the logits, which are no output to move

        return [Contender(name, partial(build, of), before=lambda: logits.copy_(source)) for name, of in functions.items()]


def task(case: str, M: int, N: int, dtype: str) -> Task:
    size, whole = M * N * DTYPES[dtype].itemsize, case == "cross_entropy"

    def draw(normal: Callable[..., Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Logits [M, N], and of cross-entropy targets [M]."""
        x = normal(M, N, dtype=DTYPES[dtype])
        if whole:
            return [x, torch.randint(N, (M,), device=x.device)], []
        return [x], [normal(M, N, dtype=DTYPES[dtype])]

    return (LossTask if whole else Task)(
        {"case": case, "dtype": dtype, "M": M, "N": N},
        bytes={BOTH: 2 * size} if whole else {FORWARD: 2 * size, BACKWARD: 3 * size},
        make=lambda provider: MAKERS[case][provider](),
        inputs=partial(drawn, draw),
        reference=F.cross_entropy if whole else lambda _, x: (torch.softmax(x, -1),),
    )


def tasks(options: Namespace) -> list[Task]:
    shapes = [(case, M, N) for case in options.case or MAKERS for M, N in SHAPES[case]]
    if options.device.type == "cpu":
        shapes = [(case, command.CPU_ROWS, min(N, 512)) for case, _, N in shapes]
    return [task(*shape, options.dtype) for shape in shapes]


def add(parser: ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="(%(default)s)")


options_of, main = bandwidth.program("losses", __doc__, MAKERS, MAKERS["softmax"], tasks, add)

if __name__ == "__main__":
    main()
