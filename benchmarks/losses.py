"""Softmax and cross-entropy of every library: GPU time with cold L2, as a share of this card's copy bandwidth.

Shares count the fewest bytes: softmax reads and writes each element once, its backward reads two and writes one; cross-entropy,
forward and backward in one call, reads each logit once and writes its gradient.

python -m benchmarks.losses                      everything that can be imported
python -m benchmarks.losses --case softmax       49152 rows of 32 to 32768 columns, as OneFlow measured
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bandwidth import Functions, Task, by_provider, near, program
from benchmarks.cases import BACKWARD, BOTH, FORWARD, X_DTYPE, drawn
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


MAKERS = {
    "softmax": by_provider(
        softmax_fn,
        partial(torch.softmax, dim=-1),
        liger_kernel=lambda: import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply,
        quack_kernels=lambda: import_module("quack.softmax").softmax,
    ),
    "cross_entropy": by_provider(
        partial(cross_entropy_fn, in_place=True),
        torch_loss,
        liger_kernel=liger_loss,
        quack_kernels=lambda: partial(import_module("quack.cross_entropy").cross_entropy, inplace_backward=True),
    ),
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


def task(case: str, M: int, N: int) -> Task:
    size, whole = M * N * X_DTYPE.itemsize, case == "cross_entropy"

    def draw(normal: Callable[..., Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Logits [M, N], and of cross-entropy targets [M]."""
        x = normal(M, N)
        return ([x, torch.randint(N, (M,), device=x.device)], []) if whole else ([x], [normal(M, N)])

    return (LossTask if whole else Task)(
        {"case": case, "dtype": "bf16", "M": M, "N": N},
        bytes={BOTH: 2 * size} if whole else {FORWARD: 2 * size, BACKWARD: 3 * size},
        make=MAKERS[case],
        inputs=partial(drawn, draw),
        reference=F.cross_entropy if whole else lambda _, x: torch.softmax(x, -1),
    )


options_of, main = program("losses", __doc__, SHAPES, task, ["liger-kernel", "quack-kernels"])

if __name__ == "__main__":
    main()
