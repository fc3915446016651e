"""Sites with a norm of the branch, and pointwise norms: GPU time as a share of copy bandwidth.

python -m benchmarks.sites                                   the widths of well-known models, both streams, weights in fp32
python -m benchmarks.sites --width 4608 5376 --case norm_add_norm

A tensor has 2^26 elements. `compile` is torch.compile of PyTorch's operations.
"""

from benchmarks import norms
from benchmarks.cases import SITES

WIDTHS, ELEMENTS = (768, 1152, 2304, 3584, 4608, 5376), 2**26

options_of, main = norms.program("sites", __doc__, SITES, WIDTHS, lambda width: ELEMENTS // width)

if __name__ == "__main__":
    main()
