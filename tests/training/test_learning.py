"""A run learns what can be learned, against a known entropy; and as well when it is compiled."""

import math
from functools import partial

import pytest
import torch

from tests.runs import WORDS, losses, train_here

# The text draws its words independently and uniformly, each with a separator behind it: in the mean no model needs fewer bits
# per byte than this, and one that has learned the words comes close.
ENTROPY = math.log2(len(WORDS)) / (sum(map(len, WORDS)) / len(WORDS) + 1)


def test_two_hundred_steps_come_close_to_the_entropy_of_the_text(tiny, tmp_path):
    learning = ["optim.lr=1e-2", "optim.min_lr=1e-4", "train.steps=200", "train.batch_size=32", "model.dropout=0"]
    own = ["eval.every=100", "sample.tokens=0"]
    summary, _ = train_here([*tiny, *learning, *own], tmp_path / "run")
    assert 0.95 * ENTROPY < summary.final.bits_per_byte < 1.45 * ENTROPY


def test_a_compiled_step_has_the_losses_of_the_eager_one(tiny, tmp_path, monkeypatch):
    """By all of the compiler but its code, which takes minutes to build on a CPU; on a GPU: tests/model/test_gpu.py."""
    graphs = partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", lambda model, options, **how: graphs(model, **how))
    own = ["train.steps=4", "train.precision=fp32", "model.dropout=0.1", "logging.every=1", "sample.tokens=0"]
    # dropout on attention weights draws other numbers in a graph
    own += ["model.layers=1", "model.attention_dropout=0"]
    _, eager = train_here([*tiny, *own], tmp_path / "eager")
    _, compiled = train_here([*tiny, *own, "train.compile=true"], tmp_path / "compiled")
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-5)
