"""The activations of gated MLPs in every library: GPU time with cold L2, as a share of this card's copy bandwidth.

Shares count the fewest bytes: forward reads gate and value, side by side as one linear layer gives them, and writes y; backward
reads these again, and dy, and writes their gradients.

python -m benchmarks.activation                       everything that can be imported
python -m benchmarks.activation --case swiglu         silu(gate) · value alone
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch.nn.functional as F
from torch import Tensor

from benchmarks.bandwidth import Task, by_provider, program
from benchmarks.cases import BACKWARD, FORWARD, drawn
from ops import gated_activation_fn

# Rows, and columns of y: of Llama 3.2 1B, Llama 3 8B, of GPT-2 124M's width, and of no model.
SHAPES = [(32768, 3072), (16384, 8192), (8192, 14336), (20000, 5504)]
CASES = {"swiglu": "silu", "geglu": "gelu_tanh"}  # what the gate goes through


def liger() -> Callable[[Tensor], Tensor]:
    apply = import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply
    return lambda x: apply(*x.chunk(2, -1))


def task(case: str, M: int, N: int) -> Task:
    activate = F.silu if case == "swiglu" else partial(F.gelu, approximate="tanh")

    def plain(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return activate(gate) * value

    ours = partial(gated_activation_fn, activation=CASES[case])
    return Task(
        {"case": case, "dtype": "bf16", "M": M, "N": N},
        bytes={FORWARD: 6 * M * N, BACKWARD: 10 * M * N},
        make=by_provider(ours, plain, liger_kernel=liger if case == "swiglu" else None),
        inputs=partial(drawn, lambda normal: ([normal(M, 2 * N)], [normal(M, N)])),
        reference=lambda _, x: plain(x),
    )


options_of, main = program("activation", __doc__, dict.fromkeys(CASES, SHAPES), task, ["liger-kernel"])

if __name__ == "__main__":
    main()
