"""Sites with a norm of the branch, and pointwise norms: GPU time as a share of copy bandwidth.

python -m benchmarks.sites                                   the widths of well-known models, both streams, weights in fp32
python -m benchmarks.sites --width 4608 5376 --case norm_add_norm

A tensor has 2^26 elements. `compile` is torch.compile of PyTorch's operations.
"""

import argparse
from collections.abc import Sequence

from benchmarks import bandwidth, command, norms
from benchmarks.cases import SITES, Shape

WIDTHS, ELEMENTS = (768, 1152, 2304, 3584, 4608, 5376), 2**26
PROVIDERS = ("ours", "torch", "compile", "liger-kernel")


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    return command.parse(bandwidth.parser("sites", __doc__, SITES, PROVIDERS, WIDTHS), argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of(argv)
    tasks = [
        norms.task(Shape(SITES[case], stream, "fp32", command.rows_on(options.device, ELEMENTS // width), width))
        for case in options.case or SITES
        for width in options.width
        for stream in options.residual
    ]
    bandwidth.run(options, command.importable(options.provider, PROVIDERS), tasks)


if __name__ == "__main__":
    main()
