"""Sites with a norm of the branch, and pointwise norms: GPU time as a share of copy bandwidth.

python -m benchmarks.sites                                   the widths of well-known models, both streams, weights in fp32
python -m benchmarks.sites --width 4608 5376 --case norm_add_norm

A tensor has 2^26 elements. `compile` is torch.compile of PyTorch's operations.
"""

from argparse import Namespace
from collections.abc import Sequence

from benchmarks import bandwidth, command, norms
from benchmarks.cases import SITES, Shape

WIDTHS, ELEMENTS = (768, 1152, 2304, 3584, 4608, 5376), 2**26
PROVIDERS = (*bandwidth.OWN, "liger-kernel")


def options_of(argv: Sequence[str] | None) -> Namespace:
    parser = bandwidth.parser("sites", __doc__, SITES, PROVIDERS)
    bandwidth.add_widths(parser, WIDTHS)
    return command.parse(parser, argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of(argv)
    shapes = [
        Shape(SITES[case], stream, "fp32", command.rows_on(options.device, ELEMENTS // width), width)
        for case in options.case or SITES
        for width in options.width
        for stream in options.residual
    ]
    bandwidth.run(options, command.importable(options.provider, PROVIDERS), [norms.task(shape) for shape in shapes])


if __name__ == "__main__":
    main()
