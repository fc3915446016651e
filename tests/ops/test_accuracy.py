"""Forward and backward against fp64: every option of the operator, in every shape of tile, for every norm."""

from dataclasses import replace

import pytest
import torch

from ops import Norm, layer_norm_fn, norm_fn
from ops.reference import NORMS

from .cases import BF16, FP16, FP32, OPTIONS, Case, assert_as_accurate_as_pytorch, covering, describe, pairwise
from .tiles import SHAPES, tile_for

MORE = OPTIONS | {
    "x": [BF16, FP32, FP16], "zero_centered": [False, True], "residual_in_fp32": [False, True], "out": [None, FP32, BF16],
    "m": [5, 1, 18],
}  # fmt: skip
TILES = {
    "shape": SHAPES, "rows": [2, 1, 4], "warps": [4, 1], "stages": [1, 3], "programs_per_sm": [1, 2],
    "early_weights": [False, True], "prefetch": [False, True],
}  # fmt: skip
# What backward of a split row can do; few of the pairs are of this kind.
SPLIT = MORE | {
    "x": [BF16, FP32], "x1": [None], "rowscale": ["none", "fixed"], "bias": [True], "second": [False], "zero_centered": [False],
    "residual_in_fp32": [False], "out": [None], "m": [5, 9], "n": [24, 32, 33], "shape": ["split"], "programs_per_sm": [1, 2],
}  # fmt: skip
TILED = [*covering(**MORE | {"n": [24, 64, 33]}, **TILES), *covering(**SPLIT)]
IDS = [f"{i}-{chosen['shape']}-{chosen['norm'].name}" for i, chosen in enumerate(TILED)]


@pytest.mark.parametrize("chosen", TILED, ids=IDS)
def test_every_tile_is_as_accurate_as_pytorch(chosen, device, use_tile):
    case = Case(**{name: value for name, value in chosen.items() if name not in TILES})
    use_tile(tile_for(case.n, **{name: value for name, value in chosen.items() if name in TILES}))
    assert_as_accurate_as_pytorch(case, device)


SITES = covering(
    shape=SHAPES, branch=list(Norm), norm=list(Norm), rowscale=["none", "fixed", "learned"], x=[BF16, FP32],
    residual=[FP32, BF16, None], bias=[False, True], dropout_p=[0.0, 0.1], weight=[FP32, None, BF16], out=[None, FP32],
    residual_scale=[1.0, 1.7], prenorm=[True, False], second=[False, True],
)  # fmt: skip
# Past the row's end a branch without a weight would be no zero, which only a mean of the stream meets.
SITES += [
    {"shape": shape, "branch": branch, "norm": Norm.layernorm, "weight": None, "bias": bias}
    for shape in SHAPES
    for branch, bias in ((Norm.layernorm, False), (Norm.derf, True))
]
SITES += [{"shape": shape, "branch": None, "norm": Norm.rmsnorm, "residual_scale": 1.7} for shape in SHAPES]


@pytest.mark.parametrize("chosen", SITES, ids=lambda chosen: "-".join(map(str, chosen.values())).replace("torch.", ""))
def test_a_branch_with_a_norm_is_as_accurate_as_pytorch(chosen, device, use_tile):
    case = Case(**{name: value for name, value in chosen.items() if name != "shape"}, n=72)
    use_tile(tile_for(case.n, chosen["shape"]))
    assert_as_accurate_as_pytorch(case, device)


WIDE_BRANCHES = pairwise(
    n=[31, 640, 768, 1000, 2304, 4096, 4608, 5376, 8192, 12288, 40000], m=[1030],
    branch=[Norm.rmsnorm, Norm.layernorm, Norm.dyt], norm=[Norm.rmsnorm, Norm.none, Norm.layernorm, Norm.derf],
    residual=[BF16, FP32], rowscale=["none", "learned"], dropout_p=[0.0, 0.1],
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", WIDE_BRANCHES, ids=describe)
def test_a_branch_with_a_norm_is_as_accurate_as_pytorch_at_real_widths(case, device):
    assert_as_accurate_as_pytorch(case, device)


@pytest.mark.parametrize("case", pairwise(**MORE | {"n": [40, 2, 31, 1000, 2304], "m": [5, 1, 9]}), ids=describe)
def test_the_rules_own_tiles_are_as_accurate_as_pytorch(case, device):
    assert_as_accurate_as_pytorch(case, device)


@pytest.mark.parametrize("norm", [Norm.layernorm, Norm.rmsnorm])  # which have statistics
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_far_from_zero_are_as_accurate_as_pytorch(shape, norm, device, use_tile):
    """Σ r² − N · mean² would cancel, and dy has a part along x, which the mean could spoil."""
    use_tile(tile_for(256, shape))
    torch.manual_seed(2)
    x, w, b, dy = (torch.randn(size) for size in ((4, 256), (256,), (256,), (4, 256)))
    x, dy = x + 3e3, dy + x

    def results(fn, dtype, where):
        leaves = [t.to(where, dtype).requires_grad_() for t in (x, w, b)]
        y = fn(*leaves)
        return [t.detach().cpu().double() for t in (y, *torch.autograd.grad(y, leaves, dy.to(y)))]

    exact = results(lambda *t: NORMS[norm](*t, 1e-5), torch.float64, "cpu")
    theirs = results(lambda *t: NORMS[norm](*t, 1e-5), FP32, device)
    mine = results(lambda *t: norm_fn(norm, *t, eps=1e-5), FP32, device)
    for our, their, wanted in zip(mine, theirs, exact, strict=True):
        assert (our - wanted).abs().max() <= 2 * (their - wanted).abs().max() + 1e-6


WIDE = pairwise(
    n=[1, 31, 256, 768, 1000, 1002, 1500, 1600, 2304, 4096, 5120, 8192, 12288, 16384, 16385, 20004, 40000, 65536],
    norm=list(Norm), residual=[None, BF16, FP32], dropout_p=[0.0, 0.1], m=[1030], uneven=[True],
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", WIDE, ids=describe)
def test_real_widths_are_as_accurate_as_pytorch(case, device):
    assert_as_accurate_as_pytorch(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", pairwise(**MORE | {"n": [768, 2304, 8192, 12288, 16385, 32768], "m": [70, 1, 700]}), ids=describe
)
def test_options_at_real_widths_are_as_accurate_as_pytorch(case, device):
    assert_as_accurate_as_pytorch(case, device)
    if case.weight == BF16:
        assert_as_accurate_as_pytorch(replace(case, x=FP32, residual=None, dropout_p=0.1), device)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    m, n = 2**19 + 64, 4096
    x = torch.randn(m, n, device=device, dtype=BF16)
    w = torch.rand(n, device=device)
    y, r = layer_norm_fn(x, w, None, residual=x, prenorm=True, eps=1e-5)
    tail = slice(m - 64, m)
    expected = layer_norm_fn(x[tail].contiguous(), w, None, residual=x[tail].contiguous(), prenorm=True, eps=1e-5)
    assert torch.equal(y[tail], expected[0]) and torch.equal(r[tail], expected[1])
