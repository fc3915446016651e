"""A run learns what can be learned, against a known entropy; and the step as torch.compile's own backend generates it."""

import math
import shutil

import pytest

from tests.runs import WORDS, losses, train_here

# The text draws its words independently and uniformly, each with a separator behind it: in the mean no model needs fewer bits
# per byte than this, and one that has learned the words comes close.
ENTROPY = math.log2(len(WORDS)) / (sum(map(len, WORDS)) / len(WORDS) + 1)


def test_two_hundred_steps_come_close_to_the_entropy_of_the_text(tiny, tmp_path):
    learning = ["optim.lr=1e-2", "optim.min_lr=1e-4", "train.steps=200", "train.batch_size=32", "model.dropout=0"]
    own = ["eval.every=100", "sample.tokens=0"]
    summary, _ = train_here([*tiny, *learning, *own], tmp_path / "run")
    assert 0.95 * ENTROPY < summary.final.bits_per_byte < 1.45 * ENTROPY


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_the_step_that_inductor_generates_has_the_losses_of_the_eager_one(tiny, tmp_path):
    # dropout on attention weights draws from generators that inductor replaces by its own
    own = ["train.steps=4", "train.precision=fp32", "model.layers=1", "model.dropout=0.1", "model.attention_dropout=0"]
    own += ["logging.every=1", "sample.tokens=0"]
    _, eager = train_here([*tiny, *own], tmp_path / "eager")
    _, compiled = train_here([*tiny, *own, "train.compile=true"], tmp_path / "compiled")
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-5)
