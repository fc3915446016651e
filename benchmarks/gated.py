"""RMSNorm beside a gate: GPU time with cold L2, as a share of this card's copy bandwidth.

Shares count the fewest bytes: forward reads x and z and writes y; backward reads these and dy, and writes dx and dz. Weights
count nothing. x is dense; z is the first half of a projection's columns, which is not copied.

python -m benchmarks.gated                        ours, PyTorch as transformers writes it, and torch.compile of that
python -m benchmarks.gated --case norm_gate       heads of 128, as in Qwen3-Next
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bandwidth import Task, by_provider, program
from benchmarks.cases import BACKWARD, EPS, FORWARD, drawn
from ops import gated_rms_norm_fn

CASES = {"norm_gate": (True, 1), "gate_norm": (False, 1), "gate_norm_8": (False, 8)}  # is the norm first, and its groups
SHAPES = {  # rows, columns
    "norm_gate": [(1048576, 128), (524288, 256)],  # Qwen3-Next, Qwen3.5; OLMo Hybrid
    "gate_norm": [(65536, 2048), (32768, 4096), (24576, 5120), (16384, 8192)],  # Mamba-2
    "gate_norm_8": [(32768, 4096), (16384, 8192)],  # with groups: Nemotron-H, Zamba 2
}


def task(case: str, M: int, N: int) -> Task:
    norm_first, groups = CASES[case]

    def ours(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return gated_rms_norm_fn(x, z, weight, EPS, norm_first, N // groups)

    def plain(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        """As transformers writes it."""
        wide = torch.promote_types(x.dtype, torch.float32)
        h, gate = x.to(wide), F.silu(z.to(wide))
        h = h if norm_first else h * gate
        h = h.unflatten(-1, (groups, -1))
        h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).flatten(-2)
        y = weight * h.to(x.dtype)
        return (y * gate).to(x.dtype) if norm_first else y

    return Task(
        {"case": case, "dtype": "bf16", "M": M, "N": N},
        bytes={FORWARD: 6 * M * N, BACKWARD: 10 * M * N},
        make=by_provider(ours, plain),
        inputs=partial(drawn, lambda normal: ([normal(M, N), normal(M, 2 * N)[:, :N], normal(N)], [normal(M, N)])),
        reference=lambda _, *arguments: plain(*arguments),
    )


options_of, main = program("gated", __doc__, SHAPES, task)

if __name__ == "__main__":
    main()
