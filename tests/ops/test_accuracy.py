"""Forward and backward against the fp64 oracle, over the options of the operator."""

from itertools import combinations

import pytest
import torch

from .cases import BF16, FP16, FP32, Case, assert_as_accurate_as_pytorch, describe, pairwise

OPTIONS = {
    "rms": [False, True],
    "x": [BF16, FP32, FP16],
    "residual": [FP32, None, BF16],
    "x1": [None, BF16, FP32],
    "second": [False, True],
    "weight": [FP32, BF16, None],
    "bias": [True, False],
    "rowscale": ["none", "fixed", "learned"],
    "dropout_p": [0.0, 0.25],
    "zero_centered": [False, True],
    "prenorm": [True, False],
    "residual_in_fp32": [False, True],
    "out": [None, FP32, BF16],
    "n": [40, 64, 1, 31, 36],
    "m": [5, 1, 18],
}
CASES = pairwise(**OPTIONS)
REAL_WIDTHS = [1, 31, 768, 1000, 1002, 1024, 1500, 1600, 2048, 4096, 5120, 8192]
WIDE = [16384, 16385, 20004, 40000]


def test_every_pair_of_option_values_has_a_case():
    for a, b in combinations(OPTIONS, 2):
        seen = {(getattr(case, a), getattr(case, b)) for case in CASES}
        assert len(seen) == len(OPTIONS[a]) * len(OPTIONS[b])


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_as_accurate_as_pytorch(case, device):
    assert_as_accurate_as_pytorch(case, device)


@pytest.mark.parametrize("case", [case for case in CASES if case.n > 32], ids=describe)
def test_looped_rows_as_accurate_as_pytorch(case, device, narrow_tiles):
    assert_as_accurate_as_pytorch(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("residual", [None, BF16, FP32])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("n", REAL_WIDTHS)
def test_as_accurate_as_pytorch_at_real_widths(n, rms, residual, dropout_p, device):
    assert_as_accurate_as_pytorch(Case(rms=rms, residual=residual, dropout_p=dropout_p, m=1030, n=n), device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", pairwise(**OPTIONS | {"n": [768, 1600, 8192, 16385], "m": [70, 1, 700]}), ids=describe)
def test_options_as_accurate_as_pytorch_at_real_widths(case, device):
    assert_as_accurate_as_pytorch(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [BF16, FP32])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("n", WIDE)
def test_as_accurate_as_pytorch_on_rows_past_64_kb(n, rms, residual, device):
    assert_as_accurate_as_pytorch(Case(rms=rms, residual=residual, dropout_p=0.1, m=300, n=n), device)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    from ops import layer_norm_fn

    m, n = 2**19 + 64, 4096
    x = torch.randn(m, n, device=device, dtype=BF16)
    w = torch.rand(n, device=device)
    y, r = layer_norm_fn(x, w, None, residual=x, prenorm=True, eps=1e-5)
    tail = slice(m - 64, m)
    expected = layer_norm_fn(x[tail].contiguous(), w, None, residual=x[tail].contiguous(), prenorm=True, eps=1e-5)
    assert torch.equal(y[tail], expected[0])
    assert torch.equal(r[tail], expected[1])
