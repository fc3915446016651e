"""Dropout masks: independent ones pass, and masks that repeat or drop at another rate don't."""

import pytest
import torch

from ablation import masks as checked
from ablation.arms import build_arm
from ablation.masks import check_masks, judge_masks
from tests.ablation.test_arms import BATCHES, FP32, TOKENIZER, load

N = 1 << 18


def masks(p=0.1, seed=0):
    return (torch.rand(2, N, generator=torch.Generator().manual_seed(seed)) < p).unbind()


def test_independent_masks_pass_at_every_seed_and_another_rate_is_found():
    assert all(judge_masks("torch", 0.1, *masks(seed=seed)).holds for seed in range(10))
    assert not judge_masks("torch", 0.1, *masks(p=0.105)).holds


@pytest.mark.parametrize("lag", [1, 4, 1024])
def test_masks_that_repeat_over_neighbours_are_found(lag):
    first, second = masks()
    repeated = first.view(-1, 2, lag)[:, :1].expand(-1, 2, lag).reshape(-1)  # every second run of elements is that before it
    found = judge_masks("compiled", 0.1, repeated, second)
    assert not found.holds and found.where == f"{lag:,} elements apart" and found.correlation == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("shift", "where"), [(0, "two calls"), (768, "two calls, 768 elements apart")])
def test_two_calls_with_one_mask_are_found(shift, where):
    first, _ = masks()
    found = judge_masks("compiled", 0.1, first, first.roll(shift))
    assert not found.holds and found.where == where and found.correlation > 0.99


def test_the_arms_own_masks_pass_and_shared_ones_and_none_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(checked, "ELEMENTS", 1 << 16)

    def found(name, *options):
        return check_masks(build_arm(name, load(*options), FP32, TOKENIZER, BATCHES), compiled=False)

    for name, *options in (["torch"], ["fused", "model.residual_dtype=compute", "norm.kind=rmsnorm"]):
        one = found(name, "model.dropout=0.1", *options)
        assert one.holds and one.elements >= 1 << 16 and one.dropped == pytest.approx(0.1, abs=5e-3)
    assert found("torch", "model.dropout=0") is None
    assert found("torch", "model.dropout=0.1", "norm.impl=torch", "norm.dropout_masks=shared") is None
