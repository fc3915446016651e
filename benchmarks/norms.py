"""Every norm case × width × library: GPU time with cold L2, as a share of the copy bandwidth that this card reaches.

python -m benchmarks.norms                                  the widths of well-known models; hours of compilation in all
python -m benchmarks.norms --case ln --width 768 1024       some of it
python -m benchmarks.norms --width 768 --warm 12            compiled by twelve processes first
python -m benchmarks.norms --models --warm 16               the norms that models train with: norms_models.json
python -m benchmarks.norms --width 768 --before PATH        beside another revision's ops/, from its folder

x is in bf16, weights are in fp32, as in training.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks import bandwidth, command, providers
from benchmarks.bandwidth import Task, WrongResult
from benchmarks.cases import CASES, DIRECTIONS, DROPOUT_P, MODEL_WIDTHS, MOST_ELEMENTS, Case, Shape, make_inputs, minimum_bytes
from benchmarks.providers import PROVIDERS
from model.sites import torch_site

ROWS = 32768  # fewer above 2^28 elements
FAST = ("ours", "compile", "flash-attn", "liger-kernel", "quack-kernels")  # of --models


def shapes_of(options: argparse.Namespace, cases: Mapping[str, Case], rows: Callable[[int], int]) -> list[Shape]:
    """The shapes in the order in which they run. Widths are outermost, so that a run that ends early has whole columns.

    Args:
        rows: by width, on a GPU.
    """
    return [
        Shape(case, residual, "fp32", command.rows_on(options.device, rows(width)), width)
        for width in options.width
        for case in (cases[name] for name in options.case or cases)
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


def program(
    name: str, doc: str | None, cases: Mapping[str, Case], widths: Sequence[int], rows: Callable[[int], int]
) -> tuple[Callable[..., argparse.Namespace], Callable[..., None]]:
    """As `bandwidth.program`, of cases of norms. widths: by default."""

    def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
        parser = bandwidth.parser(name, doc, cases, PROVIDERS)
        option, streams = parser.add_argument, ("bf16", "fp32")
        option("--width", nargs="+", type=command.positive, default=widths, metavar="N", help=f"of rows {widths}")
        option("--residual", nargs="+", choices=streams, default=streams, help="dtype of the stream (both)")
        if cases is CASES:
            option("--models", action="store_true", help="cases with a residual stream; all libraries, but not eager PyTorch")
        else:
            parser.set_defaults(models=False)
        option("--warm", type=command.positive, metavar="PROCESSES", help="compile in this many processes first")
        option("--before", type=Path, metavar="PATH", help="another revision's folder ops/, timed in the same rounds")
        return command.parse(parser, argv)

    def main(argv: Sequence[str] | None = None) -> None:
        options = options_of(argv)
        shapes = shapes_of(options, cases, rows)
        names = command.importable(options.provider, FAST if options.models else PROVIDERS)
        options.program += "_models" * options.models
        if options.warm:
            providers.compile_in_processes(shapes, names, options.device, options.warm)
        if options.before:
            names.append(providers.load_before(options.before))
        bandwidth.run(options, names, [task(shape) for shape in shapes])

    return options_of, main


def rows_of(width: int) -> int:
    return min(ROWS, MOST_ELEMENTS // width)


options_of, main = program("norms", __doc__, CASES, [*MODEL_WIDTHS], rows_of)

if __name__ == "__main__":
    main()
