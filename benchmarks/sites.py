"""Sites with a norm of the branch, and pointwise norms: GPU time as a share of copy bandwidth.

python -m benchmarks.sites                                   the widths of well-known models, both streams
python -m benchmarks.sites --width 4608 5376 --case norm_add_norm
python -m benchmarks.sites --random 12 --seed 1              multiples of 64 from 640 to 5376

`compile` is torch.compile of PyTorch's operations.
"""

import argparse
import random
import sys
from collections.abc import Sequence

from benchmarks import bandwidth, command
from benchmarks.cases import SITES, Shape
from benchmarks.norms import task

WIDTHS = (768, 1152, 2304, 3584, 4608, 5376)
PROVIDERS = ("ours", "torch", "compile", "liger-kernel")


def options_of(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = bandwidth.parser("sites", __doc__.splitlines()[0], PROVIDERS)
    parser.add_argument(
        "--case", nargs="+", choices=tuple(SITES), default=list(SITES), metavar="CASE", help=f"of {', '.join(SITES)}"
    )
    parser.add_argument("--width", nargs="+", type=command.positive, metavar="N", help=f"({' '.join(map(str, WIDTHS))})")
    parser.add_argument(
        "--random", type=command.positive, metavar="COUNT", help="COUNT multiples of 64 from 640 to 5376 instead"
    )
    parser.add_argument("--seed", type=int, default=0, help="of --random (%(default)s)")
    parser.add_argument("--residual", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"], help="the stream (both)")
    parser.add_argument("--weights", nargs="+", choices=("bf16", "fp32"), default=["fp32"], help="(fp32)")
    parser.add_argument("--elements", type=command.positive, default=2**26, help="of a tensor (2^26)")
    options = command.parse(parser, argv, bandwidth.ROUNDS)
    if options.random and options.width:
        parser.error("--random draws the widths; leave --width out")
    drawn = [64 * n for n in random.Random(options.seed).sample(range(10, 85), min(options.random or 1, 75))]
    options.width = options.width or (drawn if options.random else list(WIDTHS))
    return parser, options


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser, options = options_of(argv)
    rows_of = {width: command.rows_on(options.device, max(1, options.elements // width)) for width in options.width}
    tasks = [
        task(Shape(SITES[case], stream, weights, rows_of[width], width, rows_of[width]))
        for case in options.case
        for width in options.width
        for stream in options.residual
        for weights in options.weights
    ]
    bandwidth.run("sites", parser, options, argv, command.importable(options.provider, PROVIDERS), tasks)


if __name__ == "__main__":
    command.run(main)
