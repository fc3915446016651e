"""RMSNorm beside a gate: GPU time with cold L2, as a share of this card's copy bandwidth.

Shares count the fewest bytes: forward reads x and z and writes y; backward reads these and dy, and writes dx and dz. Weights
count nothing. x is dense; z is the first half of a projection's columns, which is not copied.

python -m benchmarks.gated                        ours, PyTorch as transformers writes it, and torch.compile of that
python -m benchmarks.gated --case norm_gate       heads of 128, as in Qwen3-Next
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bandwidth, command
from benchmarks.cases import BACKWARD, EPS, FORWARD, drawn
from benchmarks.providers import compiled
from ops import gated_rms_norm_fn


class Case(NamedTuple):
    norm_first: bool
    groups: int
    shapes: Sequence[tuple[int, int]]  # rows, columns


CASES = {
    "norm_gate": Case(True, 1, [(1048576, 128), (524288, 256)]),  # Qwen3-Next, Qwen3.5; OLMo Hybrid
    "gate_norm": Case(False, 1, [(65536, 2048), (32768, 4096), (24576, 5120), (16384, 8192)]),  # Mamba-2
    "gate_norm_8": Case(False, 8, [(32768, 4096), (16384, 8192)]),  # with groups: Nemotron-H, Zamba 2
}


def in_torch(case: str) -> Callable[..., Tensor]:
    """As transformers writes it; compiled by the provider of that name."""
    norm_first, groups, _ = CASES[case]

    def function(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        h, gate = x.to(wide), F.silu(z.to(wide))
        h = h if norm_first else h * gate
        h = h.unflatten(-1, (groups, -1))
        h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).flatten(-2)
        y = weight * h.to(x.dtype)
        return (y * gate).to(x.dtype) if norm_first else y

    return function


def ours(case: str) -> Callable[..., Tensor]:
    norm_first, groups, _ = CASES[case]
    return lambda x, z, weight: gated_rms_norm_fn(x, z, weight, EPS, norm_first, x.shape[-1] // groups)


PROVIDERS: dict[str, Any] = {"ours": ours, "torch": in_torch, "compile": lambda case: compiled(in_torch(case))}


def task(case: str, M: int, N: int) -> bandwidth.Task:
    return bandwidth.Task(
        {"case": case, "dtype": "bf16", "M": M, "N": N},
        bytes={FORWARD: 6 * M * N, BACKWARD: 10 * M * N},
        make=lambda provider: PROVIDERS[provider](case),
        inputs=partial(drawn, lambda normal: ([normal(M, N), normal(M, 2 * N)[:, :N], normal(N)], [normal(M, N)])),
        reference=lambda _, *arguments: (in_torch(case)(*arguments),),
    )


def tasks(options: Namespace) -> list[bandwidth.Task]:
    on_gpu, cases = options.device.type == "cuda", options.case or CASES
    shapes = {case: CASES[case].shapes if on_gpu else [(command.CPU_ROWS, 160)] for case in cases}
    return [task(case, *shape) for case in cases for shape in shapes[case]]


options_of, main = bandwidth.program("gated", __doc__, CASES, PROVIDERS, tasks)

if __name__ == "__main__":
    main()
