"""Every norm case × width × library: GPU time with cold L2, as a share of the copy bandwidth that this card reaches.

python -m benchmarks.norms                                       everything that can be imported; hours of compilation in all
python -m benchmarks.norms --case ln --width 768 1024            some of it
python -m benchmarks.norms --width 768 --warm 12                 compiled by twelve processes first
python -m benchmarks.norms --models --warm 16                    the widths and dtypes of well-known models: norms_models.json
python -m benchmarks.norms --width 768 --before PATH             beside another revision's ops/, from its folder
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from benchmarks import bandwidth, command, providers
from benchmarks.bandwidth import Task, WrongResult
from benchmarks.cases import CASES, DIRECTIONS, MODEL_WIDTHS, Shape, make_inputs, minimum_bytes
from benchmarks.providers import PROVIDERS

ROWS = 32768  # fewer above 2^28 elements
WIDTHS = (768, 1024, 1600, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536)
FAST = ("ours", "compile", "flash-attn", "liger-kernel", "quack-kernels")  # of --models
CHECKED = 64  # rows


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bandwidth.parser("norms", __doc__.splitlines()[0], CASES, PROVIDERS)
    add_shape_options(parser, WIDTHS)
    parser.add_argument(
        "--models", action="store_true",
        help=f"the widths of well-known models, {tuple(MODEL_WIDTHS)}, as they train: fp32 weights, cases with a stream",
    )  # fmt: skip
    parser.add_argument("--warm", type=command.positive, metavar="PROCESSES", help="compile in this many processes first")
    parser.add_argument("--before", type=Path, metavar="PATH", help="another revision's folder ops/, timed in the same rounds")
    return command.parse(parser, argv)


def add_shape_options(parser: argparse.ArgumentParser, widths: Sequence[int]) -> None:
    parser.add_argument("--width", nargs="+", type=command.positive, metavar="N", help=f"row widths {widths}")
    parser.add_argument("--residual", nargs="+", choices=("bf16", "fp32"), help="dtype of the residual stream (both)")


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    """The shapes in the order in which they run. Widths are outermost, so that a run that ends early has whole columns."""
    rows, models, quick = command.rows_on(options.device, ROWS), options.models, options.quick
    cases = ("add_rms", "dropout_add_ln") if quick else [n for n, case in CASES.items() if case.add or not models]
    widths = (4096,) if quick else MODEL_WIDTHS if models else WIDTHS
    return [
        Shape(CASES[name], residual, "fp32" if models else "bf16", rows, width)
        for width in options.width or widths
        for name in options.case or cases
        for residual in (options.residual or (["bf16"] if quick else ["bf16", "fp32"]) if CASES[name].add else (None,))
    ]


def task(shape: Shape) -> Task:
    facts = {
        "case": shape.case.name,
        "residual_dtype": shape.residual,
        "weight_dtype": shape.weights,
        "M": shape.rows,
        "N": shape.width,
        "asked_rows": shape.asked_rows,
    }
    return Task(
        facts,
        bytes={direction: minimum_bytes(shape, direction) for direction in DIRECTIONS},
        make=lambda provider: PROVIDERS[provider](shape),
        inputs=partial(make_inputs, shape),
        reference=partial(reference, shape),
        checked=CHECKED,
    )


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
    options = options_of(argv)
    shapes = shapes_of(options)
    names = command.importable(options.provider, FAST if options.models else PROVIDERS)
    if options.warm:
        providers.compile_in_processes(shapes, names, options.device, options.warm)
    if options.before:
        names.append(providers.load_before(options.before))
    bandwidth.run(options, names, [task(shape) for shape in shapes], "norms_models" if options.models else "norms")


if __name__ == "__main__":
    main()
