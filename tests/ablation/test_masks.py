"""Dropout masks: independent ones pass, and masks that repeat or drop at another rate don't."""

import pytest
import torch

from ablation.arms import build_arm
from ablation.masks import check_masks, judge_masks
from tests.ablation.test_arms import FP32, load

N = 1 << 18


def masks(p=0.1, seed=0):
    return (torch.rand(2, N, generator=torch.Generator().manual_seed(seed)) < p).unbind()


def repeated(mask, lag):
    """Every second run of `lag` elements is that before it."""
    return mask.view(-1, 2, lag)[:, :1].expand(-1, 2, lag).reshape(-1)


def test_independent_masks_pass_at_every_seed():
    assert all(judge_masks("torch", 0.1, *masks(seed=seed)).holds for seed in range(40))


@pytest.mark.parametrize("lag", [1, 4, 1024])
def test_masks_that_repeat_over_neighbours_are_found(lag):
    first, second = masks()
    found = judge_masks("compiled", 0.1, repeated(first, lag), second)
    assert not found.holds and found.where == f"{lag:,} elements apart" and found.correlation == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("shift", "where"), [(0, "two calls"), (768, "two calls, 768 elements apart")])
def test_two_calls_with_one_mask_are_found(shift, where):
    first, _ = masks()
    found = judge_masks("compiled", 0.1, first, first.roll(shift))
    assert not found.holds and found.where == where and found.correlation > 0.99


def test_another_rate_is_found():
    assert not judge_masks("torch", 0.1, *masks(p=0.105)).holds


@pytest.mark.parametrize("options", [[], ["model.residual_dtype=compute", "norm.kind=rmsnorm"]])
def test_the_arms_own_masks_pass(options):
    for name in ("torch", "fused"):
        arm = build_arm(name, load("model.dropout=0.1", *options), FP32, vocab_size=64)
        found = check_masks(arm, compiled=False)
        assert found.holds and found.elements >= 1 << 20 and found.dropped == pytest.approx(0.1, abs=2e-3)
    assert check_masks(build_arm("torch", load("model.dropout=0"), FP32, vocab_size=64), compiled=False) is None
    shared = load("model.dropout=0.1", "norm.dropout_masks=shared")
    assert check_masks(build_arm("torch", shared, FP32, vocab_size=64), compiled=False) is None
