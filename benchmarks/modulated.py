"""Norms modulated per sample (adaLN, adaLN-zero): GPU time with cold L2, as a share of this card's copy bandwidth.

Shares count each large tensor once. Forward of adaln reads the stream and writes y; that of adaln_zero reads x and the stream,
and writes y and the new stream. Backward reads what comes back for these, the stream, and with a gate x; it writes a gradient
for each that forward read. Scale, shift and gate count nothing.

python -m benchmarks.modulated                       everything that can be imported
python -m benchmarks.modulated --case adaln_zero     gated add, LayerNorm, scale and shift, with a stream in bf16
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from benchmarks.bandwidth import Task, by_provider, program
from benchmarks.cases import BACKWARD, DTYPES, FORWARD, drawn
from ops import modulated_norm_fn

EPS, ELEMENTS = 1e-6, 2**26
# Tokens of a sample, and columns: DiT-B/2 and DiT-XL/2 of 256 and 512 pixels, SD3 medium, FLUX.1, Wan 2.1 14B, and of no model.
SIZES = [(256, 768), (256, 1152), (1024, 1152), (4096, 1536), (4096, 3072), (4096, 5120), (1000, 2400)]
SHAPES = [(ELEMENTS // N // T, T, N) for T, N in SIZES]


class Case(NamedTuple):
    rms: bool
    gated: bool
    stream: str  # dtype


CASES = {
    "adaln": Case(False, False, "bf16"),
    "adaln_zero": Case(False, True, "bf16"),
    "adaln_zero_fp32": Case(False, True, "fp32"),
    "rms_adaln_zero": Case(True, True, "bf16"),
}


def task(case: str, B: int, T: int, N: int) -> Task:
    rms, gated, dtype = CASES[case]
    stream, elements = DTYPES[dtype], B * T * N
    s = stream.itemsize if gated else 0

    def ours(x: Tensor, scale: Tensor, shift: Tensor, *more: Tensor) -> Tensor | tuple[Tensor, ...]:
        return modulated_norm_fn(x, scale, shift, *more, eps=EPS, is_rms_norm=rms, prenorm=gated)

    def plain(x: Tensor, scale: Tensor, shift: Tensor, *more: Tensor) -> Tensor | tuple[Tensor, ...]:
        r = more[0] + more[1] * x if gated else x
        y = F.rms_norm(r, r.shape[-1:], None, EPS) if rms else F.layer_norm(r, r.shape[-1:], None, None, EPS)
        y = (y * (1 + scale) + shift).to(x.dtype)
        return (y, r) if gated else y

    def draw(normal: Callable[..., Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """x [B, T, N], scale, shift [B, 1, N], and with a gate residual [B, T, N], gate [B, 1, N]. Scale, shift and gate are
        columns of one projection."""
        scale, shift, gate = normal(B, 1, 3 * N).chunk(3, -1)
        args, upstream = [normal(B, T, N), scale, shift], [normal(B, T, N)]
        if gated:
            args += [normal(B, T, N, dtype=stream), gate]
            upstream += [normal(B, T, N, dtype=stream)]
        return args, upstream

    return Task(
        {"case": case, "M": B * T, "tokens": T, "N": N},
        bytes={FORWARD: elements * (4 + 2 * s), BACKWARD: elements * (6 + 3 * s)},
        make=by_provider(ours, plain),
        inputs=partial(drawn, draw),
        reference=lambda _, *args: plain(*args),
        checked=2,  # samples
    )


options_of, main = program("modulated", __doc__, dict.fromkeys(CASES, SHAPES), task, on_cpu=(4, 16, 160))

if __name__ == "__main__":
    main()
