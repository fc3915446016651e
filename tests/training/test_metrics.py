"""The validation loss: a mean over tokens, in two units."""

import math

import numpy as np
import pytest
import torch

from data import Split
from tests.runs import precision
from training.evaluation import Evaluation

SPLIT = Split(np.arange(41, dtype=np.uint16), bytes=82, documents=1)  # ten windows of four


class ByTarget(torch.nn.Module):
    """A loss that is the mean target: what is averaged can be worked out by hand."""

    def forward(self, tokens, targets):
        assert not self.training
        return targets[targets >= 0].float().mean()


def evaluated(**how):
    return Evaluation(ByTarget(), SPLIT, precision(torch.float32), context=4, **how)()


def test_the_mean_does_not_depend_on_how_the_windows_are_batched_and_a_part_is_taken_evenly_from_all_of_them():
    before = torch.get_rng_state()
    for batch_size, batches in ((1, None), (7, None), (100, None), (3, 99)):
        assert evaluated(batch_size=batch_size, batches=batches).loss == pytest.approx(np.arange(1, 41).mean())
    part = evaluated(batch_size=2, batches=1)  # the first and the sixth window
    assert part.loss == pytest.approx(np.concatenate([np.arange(1, 5), np.arange(21, 25)]).mean())
    assert part.bits_per_byte == pytest.approx(part.loss / math.log(2) / 2)
    assert torch.equal(before, torch.get_rng_state()), "no random numbers are drawn"
