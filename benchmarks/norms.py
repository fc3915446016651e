"""Every norm case × width × library: GPU time with cold L2, as a share of the copy bandwidth that this card reaches.

Beside them, on a GPU, a plain kernel that only moves the same tensors (`kernels.py`): what there is to reach.

python -m benchmarks.norms                                       everything that can be imported; hours of compilation in all
python -m benchmarks.norms --case ln --width 768 1024            some of it
python -m benchmarks.norms --width 768 --warm 12                 compiled by twelve processes first
python -m benchmarks.norms --models --warm 16                    the widths and dtypes of well-known models: norms_models.json
python -m benchmarks.norms --random 40 --seed 1 --warm 16        40 shapes at random: norms_random.json
python -m benchmarks.norms --width 768 --before PATH             beside another revision's ops/, from its folder
"""

import argparse
import math
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import bandwidth, command, providers
from benchmarks.bandwidth import Task, WrongResult, contender
from benchmarks.cases import (
    BACKWARD,
    CASES,
    DIRECTIONS,
    MODEL_WIDTHS,
    MOST_ELEMENTS,
    Function,
    Shape,
    make_inputs,
    minimum_bytes,
)
from benchmarks.providers import OVERWRITES_DY, PROVIDERS, TRAFFIC
from measure.timing import Contender

ROWS = 32768
WIDTHS = (768, 1024, 1600, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536)
WIDEST = 16384  # of what is drawn
FAST = ("ours", "compile", "flash-attn", "liger-kernel", "quack-kernels")  # of --models and --random
CHECKED = 64  # rows


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    parser = bandwidth.parser("norms", __doc__.splitlines()[0], CASES, PROVIDERS)
    add_shape_options(parser, WIDTHS, str(ROWS))
    parser.add_argument(
        "--models", action="store_true",
        help=f"the widths of well-known models, {tuple(MODEL_WIDTHS)}, as they train: fp32 weights, cases with a stream",
    )  # fmt: skip
    parser.add_argument(
        "--random", type=command.positive, metavar="COUNT",
        help=f"COUNT shapes drawn at random, of 256 to {WIDEST} columns and 2^22 to 2^28 elements",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of --random (%(default)s)")
    parser.add_argument("--warm", type=command.positive, metavar="PROCESSES", help="compile in this many processes first")
    parser.add_argument(
        "--before", type=Path, metavar="PATH", help="folder of another revision's ops/, timed in the same rounds as `before`"
    )
    options = command.parse(parser, argv, bandwidth.ROUNDS)
    chosen = (options.case, options.width, options.rows, options.residual, options.weight_dtype, options.models)
    if options.random and any(chosen):
        parser.error("--random draws the shapes; leave --case, --width, --rows, --residual, --weight-dtype and --models out")
    if options.before is not None:
        try:
            providers.load_before(options.before)
        except ImportError as error:
            parser.error(f"--before: {error}")
    return options


def add_shape_options(parser: argparse.ArgumentParser, widths: Sequence[int], rows: str) -> None:
    parser.add_argument("--width", nargs="+", type=command.positive, metavar="N", help=f"row widths {widths}")
    parser.add_argument(
        "--rows", type=command.positive, metavar="M", help=f"{rows} ({command.CPU_ROWS} on the CPU); fewer above 2^28 elements"
    )
    parser.add_argument("--residual", nargs="+", choices=("bf16", "fp32"), help="dtype of the residual stream (both)")
    parser.add_argument(
        "--weight-dtype", nargs="+", choices=("bf16", "fp32"), help="(fp32 with --models and in sites, else bf16)"
    )


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    """The shapes in the order in which they run. Widths are outermost, so that a run that ends early has whole columns."""
    if options.random:
        return random_shapes(options.seed, options.random, command.CPU_ROWS if options.device == "cpu" else None)
    rows = options.rows or command.rows_on(options.device, ROWS)
    models, quick = options.models, options.quick
    cases = ("add_rms", "dropout_add_ln") if quick else [n for n, case in CASES.items() if case.add or not models]
    widths = (4096,) if quick else MODEL_WIDTHS if models else WIDTHS
    return [
        Shape(CASES[name], residual, weights, rows, width)
        for width in options.width or widths
        for name in options.case or cases
        for weights in options.weight_dtype or ["fp32" if models else "bf16"]
        for residual in (options.residual or (["bf16"] if quick else ["bf16", "fp32"]) if CASES[name].add else (None,))
    ]


def random_shapes(seed: int, count: int, rows: int | None = None) -> list[Shape]:
    """Random shapes that depend on the seed alone, uniform in the logarithm of width and elements; rows: of all of them."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        width = 8 * round(2 ** draw.uniform(8, math.log2(WIDEST)) / 8)
        drawn = math.ceil(2 ** draw.uniform(22, math.log2(MOST_ELEMENTS)) / width)
        case, residual, weights = draw.choice(list(CASES.values())), *(draw.choice(("bf16", "fp32")) for _ in range(2))
        found.append(Shape(case, residual if case.add else None, weights, rows or drawn, width))
    return found


def task(shape: Shape) -> Task:
    facts = {
        "case": shape.case.name,
        "residual_dtype": shape.residual,
        "weight_dtype": shape.weights,
        "M": shape.rows,
        "N": shape.width,
        "asked_rows": shape.asked_rows,
    }
    least = {direction: minimum_bytes(shape, direction) for direction in DIRECTIONS}
    return Task(facts, least, lambda provider: PROVIDERS[provider](shape), partial(contenders, shape))


def contenders(
    shape: Shape, direction: str, functions: Mapping[str, Function], count: int, device: torch.device
) -> list[Contender]:
    """The functions, and on a GPU the kernel that only moves the tensors."""
    case, sets = shape.case, make_inputs(shape, count, device)
    check = partial(bandwidth.check, partial(reference, shape), CHECKED, direction == BACKWARD)
    found = [
        contender(name, function, direction, sets, check, (name, case.name) == OVERWRITES_DY)
        for name, function in functions.items()
    ]
    if device.type == "cuda" and case.plain:
        from benchmarks import kernels  # a kernel: without a GPU there may be no Triton either

        found.append(Contender(TRAFFIC, lambda: [partial(kernels.move, shape, direction, inputs) for inputs in sets]))
    return found


def reference(
    shape: Shape, outputs: Sequence[Tensor], x: Tensor, residual: Tensor | None, *parameters: Tensor | None
) -> tuple[Tensor, ...]:
    """PyTorch's operators, with the dropout mask that the new stream tells. Raises WrongResult: it has another rate."""

    def same_dropout(branch: Tensor, p: float) -> Tensor:
        assert residual is not None
        kept = outputs[-1].ne(residual)
        dropped, slack = 1 - kept.double().mean().item(), 6 * (p * (1 - p) / kept.numel()) ** 0.5 + 0.01
        if abs(dropped - p) > slack:  # six standard deviations, and p in steps of 1/65536 or coarser
            raise WrongResult(f"{dropped:.3f} of x was dropped, expected {p} ± {slack:.3f}")
        return branch * kept / (1 - p)

    return providers.plain_torch(shape, same_dropout)(x, residual, *parameters)


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of(sys.argv[1:] if argv is None else argv)
    shapes, selected = shapes_of(options), options.models or options.random
    names = command.importable(options.provider, FAST if selected else [name for name in PROVIDERS if name != "before"])
    names += ["before"] if options.before is not None else []
    if options.warm:
        providers.compile_in_processes(shapes, names, command.device_of(options), options.warm, options.before)
    file = "norms_random" if options.random else "norms_models" if options.models else "norms"
    bandwidth.run(options, names, [task(shape) for shape in shapes], file)


if __name__ == "__main__":
    command.run(main)
