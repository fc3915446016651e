"""Every norm case × width × library: GPU time with cold L2, as a share of the copy bandwidth that this card reaches.

Beside them, on a GPU, a plain kernel that only moves the same tensors (`kernels.py`): what there is to reach.

python -m benchmarks.norms                                       everything that can be imported; hours of compilation in all
python -m benchmarks.norms --case ln --width 768 1024            some of it
python -m benchmarks.norms --width 768 --warm 12                 compiled by twelve processes first
python -m benchmarks.norms --models --warm 16                    the widths and dtypes of well-known models: norms_models.json
python -m benchmarks.norms --random 40 20 --seed 1 --warm 16     40 large and 20 small cells at random: norms_random.json
python -m benchmarks.norms --width 768 --before PATH             beside another revision's ops/, from its folder
"""

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import bandwidth, command
from benchmarks.bandwidth import Cell, Task, contender, run
from benchmarks.cases import (
    BACKWARD,
    CASES,
    DIRECTIONS,
    MODEL_WIDTHS,
    Inputs,
    Shape,
    capped_rows,
    check_backward,
    check_forward,
    make_inputs,
    minimum_bytes,
)
from benchmarks.command import Record
from benchmarks.providers import PEERS, PROVIDERS, Function, compile_in_processes, functions_of, load_before
from measure import timing


def options_of(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = bandwidth.parser("norms", __doc__.splitlines()[0])
    add_shape_options(parser)
    parser.add_argument("--warm", type=command.positive, metavar="PROCESSES", help="compile in this many processes first")
    parser.add_argument(
        "--before", type=Path, metavar="PATH", help="folder of another revision's ops/, timed in the same rounds as `before`"
    )
    options = command.parse(parser, argv, bandwidth.ROUNDS)
    settle_shapes(parser, options)
    return parser, options


def providers_of(options: argparse.Namespace) -> list[str]:
    """All providers. With --models and --random only the fast ones; with --before that copy too."""
    most = (name for name in PROVIDERS if name != "before")
    names = command.importable(options.provider, most if options.name == SWEEP else ("ours", *PEERS))
    return names if options.before is None else [*names, "before"]


def task(shape: Shape) -> Task:
    case, setting = shape.case, shape.setting

    def make(name: str) -> Function | None:
        return functions_of(case, setting, [name], shape.width).get(name)

    return Task(make, [Cell(facts_of(shape, d), bytes_of(shape, d), partial(contenders, shape, d)) for d in DIRECTIONS])


def contenders(
    shape: Shape, direction: str, functions: dict[str, Function], count: int, device: torch.device
) -> list[timing.Contender]:
    """The functions, and on a GPU the kernel that only moves the tensors."""
    case, setting = shape.case, shape.setting
    sets = make_inputs(case, setting, shape.rows, shape.width, count, device)

    def check(inputs: Inputs, function: Function) -> None:
        outputs = function(inputs)
        factor = check_forward(case, setting, inputs, outputs)
        if direction == BACKWARD:
            upstream = [t.clone() for t in inputs.upstream]  # a backward may overwrite it
            gradients = torch.autograd.grad(outputs, inputs.leaves, upstream, allow_unused=True)
            check_backward(case, setting, inputs, outputs, gradients, factor)

    found = [
        contender(name, function, direction, sets, check, case.name in PROVIDERS[name].overwrites_dy)
        for name, function in functions.items()
    ]
    if device.type == "cuda" and case.plain:
        from benchmarks import kernels  # a kernel: without a GPU there may be no Triton either

        found.append(kernels.traffic_contender(case, direction, sets))
    return found


def facts_of(shape: Shape, direction: str) -> Record:
    return {
        "case": shape.case.name,
        "direction": direction,
        "residual_dtype": shape.residual,
        "weight_dtype": shape.weights,
        "M": shape.rows,
        "N": shape.width,
        "asked_rows": shape.asked_rows,
    }


def bytes_of(shape: Shape, direction: str) -> int:
    setting = shape.setting
    residual_bytes = setting.residual_dtype.itemsize if setting.residual_dtype is not None else None
    return minimum_bytes(shape.case, direction, shape.rows, shape.width, setting.x_dtype.itemsize, residual_bytes)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser, options = options_of(argv)
    device = command.pick_device(parser, options)
    if options.before is not None:
        try:
            load_before(options.before)
        except ImportError as error:
            parser.error(f"--before: {error}")
    names, shapes = providers_of(options), shapes_of(options)
    if options.warm:
        compile_in_processes(shapes, names, device, options.warm, options.before)
    run("norms", parser, options, argv, names, [task(shape) for shape in shapes], options.name)


# ---- which shapes -----------------------------------------------------------------------------------------------------------


ROWS = 32768
WIDTHS = (768, 1024, 1600, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536)
SMALL_WIDTHS = (32, 64, 128, 256, 512)
QUICK_CASES, QUICK_WIDTHS = ("add_rms", "dropout_add_ln"), (4096,)
WIDEST = 16384  # of what is drawn
# The tensors that six libraries keep for backward, on two sets of inputs with a stream in fp32, fit 80 GB.
MOST_ELEMENTS = 2**28
SWEEP, MODELS, RANDOM = "norms", "norms_models", "norms_random"  # each has a file of results


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), metavar="CASE", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--width", nargs="+", type=command.positive, metavar="N", help=f"row widths ({WIDTHS})")
    parser.add_argument("--small", action="store_true", help=f"the widths {SMALL_WIDTHS} instead")
    parser.add_argument(
        "--rows", nargs="+", type=command.positive, metavar="M",
        help=f"rows ({ROWS}, {command.CPU_ROWS} on the CPU); fewer above 2^29 elements, 2^28 with --models",
    )  # fmt: skip
    parser.add_argument("--residual", nargs="+", choices=("bf16", "fp32"), help="dtype of the residual stream (both)")
    parser.add_argument(
        "--weight-dtype", nargs="+", choices=("bf16", "fp32"), help="weights and biases (bf16; fp32 with --models)"
    )
    parser.add_argument(
        "--models", action="store_true",
        help=f"the widths of well-known models, {tuple(MODEL_WIDTHS)}, as they train: fp32 weights, cases with a stream",
    )  # fmt: skip
    parser.add_argument(
        "--random", nargs="+", type=int, metavar="COUNT",
        help=f"COUNT shapes drawn at random, from 512 to {WIDEST} columns and from 2^26 elements up; a second COUNT draws "
        "smaller ones, from 256 columns and 2^22 elements up",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of --random (%(default)s)")


def settle_shapes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Checks the options and fills in those that were not given."""
    chosen = [f"--{n}" for n in ("case", "width", "small", "rows", "residual", "weight_dtype", "models") if getattr(options, n)]
    if options.random and chosen:
        parser.error(f"--random draws the shapes; leave {', '.join(chosen).replace('_', '-')} out")
    if options.random and (len(options.random) > 2 or min(options.random) < 0):
        parser.error("--random takes one count or two, 0 or more")
    if options.small and (options.width or options.models):
        parser.error("--small, --width and --models choose the widths; leave --small out")
    options.name = RANDOM if options.random else MODELS if options.models else SWEEP
    widths = SMALL_WIDTHS if options.small else QUICK_WIDTHS if options.quick else MODEL_WIDTHS if options.models else WIDTHS
    cases = QUICK_CASES if options.quick else [n for n, case in CASES.items() if case.add or not options.models]
    options.rows = options.rows or [command.rows_on(options.device, ROWS)]
    options.case = options.case or list(cases)
    options.width = options.width or list(widths)
    options.residual = options.residual or (["bf16"] if options.quick and not options.models else ["bf16", "fp32"])
    options.weight_dtype = options.weight_dtype or ["fp32" if options.models else "bf16"]


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    """The shapes in the order in which they run. Widths are outermost, so that a run that ends early has whole columns."""
    if options.random:
        found = random_shapes(options.seed, *options.random)
        return found if options.device == "cuda" else [replace(s, rows=min(s.rows, command.CPU_ROWS)) for s in found]
    most = {"most": MOST_ELEMENTS} if options.models else {}
    by_cell: dict[tuple[object, ...], Shape] = {}
    for width in options.width:
        for name in options.case:
            for weights in options.weight_dtype:
                for residual in options.residual if CASES[name].add else (None,):
                    for asked in options.rows:
                        rows = capped_rows(asked, width, **most)
                        shape = Shape(CASES[name], residual, weights, rows, width, asked)
                        by_cell.setdefault((name, weights, residual, rows, width), shape)
    return list(by_cell.values())


def random_shapes(seed: int, large: int, small: int = 0) -> list[Shape]:
    """Random shapes that depend on the seed alone. A larger number of them begins with the smaller one's."""
    return [
        *_random_shapes(random.Random(f"{seed} large"), large, narrowest=512, elements=(26, math.log2(MOST_ELEMENTS))),
        *_random_shapes(random.Random(f"{seed} small"), small, narrowest=256, elements=(22, 26)),
    ]


def _random_shapes(draw: random.Random, count: int, narrowest: int, elements: tuple[float, float]) -> Sequence[Shape]:
    """Widths and numbers of elements are uniform in the logarithm. `elements` has the powers of two."""
    found = []
    for _ in range(count):
        width = 8 * round(2 ** draw.uniform(math.log2(narrowest), math.log2(WIDEST)) / 8)
        rows = math.ceil(2 ** draw.uniform(*elements) / width)
        rows = min(rows, max(65536, math.ceil(2 ** elements[0] / width)))
        case, residual, weights = draw.choice(list(CASES.values())), *(draw.choice(("bf16", "fp32")) for _ in range(2))
        found.append(Shape(case, residual if case.add else None, weights, rows, width, rows))
    return found


if __name__ == "__main__":
    command.run(main)
