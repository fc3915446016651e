"""The validation loss: a mean over tokens, in two units; and lines of metrics that arrive late."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data import Split
from tests.runs import bits, logged, precision, train_here
from training import storage
from training.evaluation import Evaluation
from training.metrics import Metrics

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


def test_lines_whose_figures_arrive_late_are_the_same_and_are_there_before_an_evaluation_and_a_checkpoint(
    tiny, tmp_path, monkeypatch
):
    """As on a GPU, which here is never done before somebody waits for it."""
    command = [*tiny, "logging.every=2", "eval.every=10", "checkpoint.every=7", "sample.tokens=0"]
    train_here(command, tmp_path / "at once")
    init, commit, seen = Metrics.__init__, storage.commit, []

    def late(self, *given):
        init(self, *given)
        self._gpu = True

    def committed(run, step, *rest):
        seen.append((step, logged(run)))
        commit(run, step, *rest)

    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: False, synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(Metrics, "__init__", late)
    monkeypatch.setattr(storage, "commit", committed)
    train_here(command, tmp_path / "late")
    assert bits(tmp_path / "late") == bits(tmp_path / "at once")
    assert seen == [(7, 6), (10, 10), (14, 14), (20, 20), (21, 20), (28, 28), (30, 30)]
