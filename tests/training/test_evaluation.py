"""The validation loss: a mean over tokens, in two units."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from training.evaluation import bits_per_byte, evaluate
from training.precision import Precision

CPU = Precision(torch.device("cpu"), torch.float32)


class ByTarget(torch.nn.Module):
    """A loss that is the mean target: what `evaluate` averages can be worked out by hand."""

    def forward(self, tokens, targets):
        assert not self.training
        return targets.float().mean()


def split(tokens, bytes_per_token=2.0):
    return SimpleNamespace(tokens=np.asarray(tokens, dtype=np.uint16), bytes_per_token=bytes_per_token)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_the_mean_does_not_depend_on_how_the_windows_are_batched(batch_size):
    result = evaluate(ByTarget(), split(range(41)), CPU, context=4, batch_size=batch_size)

    assert result.loss == pytest.approx(np.arange(1, 41).mean())


def test_a_part_of_the_split_is_taken_evenly_from_all_of_it():
    result = evaluate(ByTarget(), split(range(41)), CPU, context=4, batch_size=2, batches=1)

    # ten windows, of which the first and the sixth
    assert result.loss == pytest.approx(np.concatenate([np.arange(1, 5), np.arange(21, 25)]).mean())
    assert result.bits_per_byte == pytest.approx(bits_per_byte(result.loss, 2.0))


def test_more_batches_than_there_are_take_the_whole_split_once():
    whole, more = (evaluate(ByTarget(), split(range(41)), CPU, context=4, batch_size=3, batches=n) for n in (None, 99))

    assert more == whole


def test_the_model_is_left_in_the_mode_it_was_in():
    model = ByTarget().train()
    evaluate(model, split(range(41)), CPU, context=4, batch_size=2)

    assert model.training


def test_no_random_numbers_are_drawn():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    evaluate(ByTarget(), split(range(41)), CPU, context=4, batch_size=2)

    assert torch.equal(before, torch.get_rng_state())


def test_a_uniform_guess_over_bytes_is_eight_bits_per_byte():
    assert bits_per_byte(math.log(256), bytes_per_token=1.0) == pytest.approx(8)
    assert bits_per_byte(2 * math.log(256), bytes_per_token=2.0) == pytest.approx(8)
