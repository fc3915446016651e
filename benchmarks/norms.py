"""Every norm case × width × library: GPU time with cold L2, as a share of the copy bandwidth that this card reaches.

python -m benchmarks.norms                                  the widths of well-known models; hours of compilation in all
python -m benchmarks.norms --case ln --width 768 1024       some of it
python -m benchmarks.norms --width 768 --warm 12            compiled by twelve processes first
python -m benchmarks.norms --models --warm 16               the norms that models train with: norms_models.json
python -m benchmarks.norms --width 768 --before PATH        beside another revision's ops/, from its folder

x is in bf16, weights are in fp32, as in training.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks import bandwidth, command, providers
from benchmarks.bandwidth import Task, WrongResult
from benchmarks.cases import CASES, DIRECTIONS, DROPOUT_P, MODEL_WIDTHS, MOST_ELEMENTS, Shape, make_inputs, minimum_bytes
from benchmarks.providers import PROVIDERS
from model.sites import torch_site

ROWS = 32768  # fewer above 2^28 elements
FAST = ("ours", "compile", "flash-attn", "liger-kernel", "quack-kernels")  # of --models


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bandwidth.parser("norms", __doc__, CASES, PROVIDERS)
    bandwidth.add_widths(parser, [*MODEL_WIDTHS])
    parser.add_argument(
        "--models", action="store_true", help="cases with a residual stream; all libraries, but not eager PyTorch"
    )
    parser.add_argument("--warm", type=command.positive, metavar="PROCESSES", help="compile in this many processes first")
    parser.add_argument("--before", type=Path, metavar="PATH", help="another revision's folder ops/, timed in the same rounds")
    return command.parse(parser, argv)


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    """The shapes in the order in which they run. Widths are outermost, so that a run that ends early has whole columns."""
    rows = command.rows_on(options.device, ROWS)
    cases = [CASES[name] for name in options.case or CASES]
    return [
        Shape(case, residual, "fp32", min(rows, MOST_ELEMENTS // width), width)
        for width in options.width
        for case in cases
        if case.add or not options.models
        for residual in (options.residual if case.add else (None,))
    ]


def task(shape: Shape) -> Task:
    facts = {"case": shape.case.name, "residual_dtype": shape.residual, "weight_dtype": shape.weights}
    return Task(
        facts | {"M": shape.rows, "N": shape.width},
        bytes={direction: minimum_bytes(shape, direction) for direction in DIRECTIONS},
        make=lambda provider: PROVIDERS[provider](shape),
        inputs=partial(make_inputs, shape),
        reference=partial(reference, shape),
        move_outputs=True,
    )


def reference(
    shape: Shape, outputs: Sequence[Tensor], x: Tensor, residual: Tensor | None, *parameters: Tensor | None
) -> tuple[Tensor, ...]:
    """PyTorch's operators, with the dropout mask that the new stream tells. Raises WrongResult: it has another rate."""

    def same_dropout(branch: Tensor, *_: Any) -> Tensor:
        if not shape.case.dropout:
            return branch
        assert residual is not None
        p, kept = DROPOUT_P, outputs[-1].ne(residual)
        dropped, slack = 1 - kept.double().mean().item(), 6 * (p * (1 - p) / kept.numel()) ** 0.5 + 0.01
        if abs(dropped - p) > slack:  # six standard deviations, and p in steps of 1/65536 or coarser
            raise WrongResult(f"{dropped:.3f} of x was dropped, expected {p} ± {slack:.3f}")
        return branch * kept / (1 - p)

    return providers.site_of(partial(torch_site, drop=same_dropout), shape, exact=True)(x, residual, *parameters)


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
