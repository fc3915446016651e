"""What norm kernels could gain, against counts by hand."""

import pytest
import torch

from ablation.gpu_time import attribute, norm_bytes
from configs.schema import BlockLayout, Positions, ResidualDtype
from measure.attribution import Share
from tests.runs import config, precision


@pytest.mark.parametrize(
    ("model", "dtype", "per_element"),
    [
        # bf16 beside an fp32 stream, dropout: first 10 + 14, three others of 12 + 16, final 8 + 14
        ({}, torch.bfloat16, 24 + 3 * 28 + 22),
        # fp32 everywhere, no dropout: r is x at the first site, dx is dresidual: 8 + 16, 16 + 16, 12 + 16
        ({"dropout": 0.0, "residual_dtype": ResidualDtype.compute}, torch.float32, 24 + 3 * 32 + 28),
        # parallel, one site a layer: first 12 + 16, one other of 16 + 20, final 10 + 2 + 8 + 4 + 4
        ({"block": BlockLayout.parallel}, torch.bfloat16, 28 + 36 + 28),
        # bf16 stream, drop path: dx is not dresidual
        ({"dropout": 0.0, "drop_path": 0.1, "residual_dtype": ResidualDtype.compute}, torch.bfloat16, 12 + 3 * 18 + 16),
        # with norms of q and of k (half as wide), 5 tensors of 2 bytes in each of 2 layers, and 2 of v
        ({"qk_norm": True, "kv_heads": 1}, torch.bfloat16, 130 + 2 * (10 * 1.5 + 4 * 0.5)),
        ({"qk_norm": True, "positions": Positions.rotary}, torch.bfloat16, 130 + 2 * (10 * 2 + 4)),
        # turned only: 4 tensors
        ({"positions": Positions.rotary}, torch.bfloat16, 130 + 2 * (8 * 2 + 4)),
    ],
)
def test_norm_bytes_are_those_of_a_count_by_hand(model, dtype, per_element):
    assert norm_bytes(config(**model), precision(dtype)) == 2 * 16 * 32 * per_element


@pytest.mark.parametrize(
    ("torch_ms", "fused_ms", "step_ms", "bound", "realised"),
    [
        # 16 GB at 4000 GB/s are 4 ms; a step of 100 ms with 24 ms of norms could take 80; fused norms of 9 ms save 15 of 20.
        (24.0, 9.0, 100.0, 1 / ((1 - 24 / 100) + 24 / 100 / (24 / 4)), 15 / 20),
        (3.0, 2.0, 70.0, 1.0, 0.0),  # faster than a copy: nothing to gain
        (0.0, 0.0, 70.0, 1.0, 0.0),
        (24.0, 9.0, 20.0, 20 / 4, 15 / 20),  # more norm than step
    ],
)
def test_bound_and_realised_part_are_amdahls(torch_ms, fused_ms, step_ms, bound, realised):
    shares = {
        name: [Share("GEMM", 60.0, 100), *([Share("norm", ms, 50)] if ms else [])]
        for name, ms in (("torch", torch_ms), ("fused", fused_ms))
    }
    result = attribute(shares, {"torch": step_ms}, "fused", 16 * 10**9, 4000.0)
    assert (result.limits["torch"], result.realised["torch"]) == pytest.approx((bound, realised))
    waits = attribute(shares, {"torch": 120.0}, "fused", 16 * 10**9, 4000.0)
    assert not waits.limits, "the GPU is idle for a third of the step"
