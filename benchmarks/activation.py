"""The activations of MLPs in every library: GPU time with cold L2, as a share of this card's copy bandwidth.

Shares count the fewest bytes: forward reads what the linear layer before gave and writes y; backward reads that
again, and dy, and writes its gradient. Biases count nothing.

python -m benchmarks.activation                       everything that can be imported
python -m benchmarks.activation --case swiglu         gate and value side by side, as one linear layer gives them
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bandwidth, command
from benchmarks.bandwidth import Task
from benchmarks.cases import BACKWARD, DTYPES, FORWARD, TensorSet
from benchmarks.providers import compiled
from ops import activation_fn, gated_activation_fn

# Rows, and columns of y: of GPT-2 124M, Llama 3.2 1B, Llama 3 8B, and of no model.
SHAPES = [(32768, 3072), (16384, 8192), (8192, 14336), (20000, 5504)]
CASES = {"gelu": (1, False), "bias_gelu": (1, True), "swiglu": (2, False), "bias_geglu": (2, True)}  # halves of x; a bias
CHECKED = 64  # rows


def in_torch(case: str) -> Callable[..., Tensor]:
    """As people write it; compiled by the provider of that name."""
    halves, _ = CASES[case]
    activate = F.silu if case == "swiglu" else partial(F.gelu, approximate="tanh")

    def function(x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x if bias is None else x + bias.to(x.dtype)
        if halves == 1:
            return activate(x)
        gate, value = x.chunk(2, -1)
        return activate(gate) * value

    return function


def ours(case: str) -> Callable[..., Tensor]:
    function = activation_fn if CASES[case][0] == 1 else gated_activation_fn
    return lambda x, bias=None: function(x, bias=bias, activation="silu" if case == "swiglu" else "gelu_tanh")


def liger(case: str) -> Callable[..., Tensor] | None:
    if case != "swiglu":
        return None
    apply = import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply
    return lambda x: apply(*x.chunk(2, -1))


MAKERS = {"ours": ours, "torch": in_torch, "compile": lambda case: compiled(in_torch(case)), "liger-kernel": liger}
PROVIDERS = tuple(MAKERS)


def make_inputs(case: str, M: int, N: int, dtype: str, sets: int, device: torch.device) -> list[TensorSet]:
    """Arguments: x [M, N] or [M, 2N], and a bias in fp32."""
    generator = torch.Generator(device).manual_seed(0)
    halves, has_bias = CASES[case]
    normal = partial(torch.randn, device=device, generator=generator)
    return [
        TensorSet(
            (
                normal(M, halves * N, dtype=DTYPES[dtype]).requires_grad_(),
                *[normal(halves * N).requires_grad_()] * has_bias,
            ),
            (normal(M, N, dtype=DTYPES[dtype]),),
        )
        for _ in range(sets)
    ]


def exact(case: str) -> Callable[..., tuple[Tensor, ...]]:
    return lambda _, x, bias=None: (in_torch(case)(x, bias),)


def task(case: str, M: int, N: int, dtype: str) -> Task:
    size, halves = M * N * DTYPES[dtype].itemsize, CASES[case][0]
    return Task(
        {"case": case, "dtype": dtype, "M": M, "N": N},
        bytes={FORWARD: (halves + 1) * size, BACKWARD: (2 * halves + 1) * size},
        make=lambda provider: MAKERS[provider](case),
        inputs=partial(make_inputs, case, M, N, dtype),
        reference=exact(case),
        checked=CHECKED,
        move_outputs=False,
    )


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bandwidth.parser("activation", __doc__, CASES, PROVIDERS)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="(%(default)s)")
    return command.parse(parser, argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of(argv)
    shapes = SHAPES if options.device.type == "cuda" else [(command.CPU_ROWS, 160)]
    tasks = [task(case, *shape, options.dtype) for case in options.case or CASES for shape in shapes]
    bandwidth.run(options, command.importable(options.provider, PROVIDERS), tasks)


if __name__ == "__main__":
    main()
