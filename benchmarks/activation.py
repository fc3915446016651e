"""The activations of gated MLPs in every library: GPU time with cold L2, as a share of this card's copy bandwidth.

Shares count the fewest bytes: forward reads gate and value, side by side as one linear layer gives them, and writes y; backward
reads these again, and dy, and writes their gradients.

python -m benchmarks.activation                       everything that can be imported
python -m benchmarks.activation --case swiglu         silu(gate) · value alone
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch.nn.functional as F
from torch import Tensor

from benchmarks import bandwidth, command
from benchmarks.cases import BACKWARD, FORWARD, drawn
from benchmarks.providers import compiled
from ops import gated_activation_fn

# Rows, and columns of y: of Llama 3.2 1B, Llama 3 8B, of GPT-2 124M's width, and of no model.
SHAPES = [(32768, 3072), (16384, 8192), (8192, 14336), (20000, 5504)]
CASES = {"swiglu": "silu", "geglu": "gelu_tanh"}  # what the gate goes through


def in_torch(case: str) -> Callable[[Tensor], Tensor]:
    """As people write it; compiled by the provider of that name."""
    activate = F.silu if case == "swiglu" else partial(F.gelu, approximate="tanh")

    def function(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return activate(gate) * value

    return function


def liger(case: str) -> Callable[[Tensor], Tensor] | None:
    if case != "swiglu":
        return None
    apply = import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply
    return lambda x: apply(*x.chunk(2, -1))


PROVIDERS: dict[str, Callable[[str], Callable[[Tensor], Tensor] | None]] = {
    "ours": lambda case: partial(gated_activation_fn, activation=CASES[case]),
    "torch": in_torch,
    "compile": lambda case: compiled(in_torch(case)),
    "liger-kernel": liger,
}


def task(case: str, M: int, N: int) -> bandwidth.Task:
    return bandwidth.Task(
        {"case": case, "dtype": "bf16", "M": M, "N": N},
        bytes={FORWARD: 6 * M * N, BACKWARD: 10 * M * N},
        make=lambda provider: PROVIDERS[provider](case),
        inputs=partial(drawn, lambda normal: ([normal(M, 2 * N)], [normal(M, N)])),
        reference=lambda _, x: (in_torch(case)(x),),
    )


def tasks(options: Namespace) -> list[bandwidth.Task]:
    shapes = SHAPES if options.device.type == "cuda" else [(command.CPU_ROWS, 160)]
    return [task(case, *shape) for case in options.case or CASES for shape in shapes]


options_of, main = bandwidth.program("activation", __doc__, CASES, PROVIDERS, tasks)

if __name__ == "__main__":
    main()
