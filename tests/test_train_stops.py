"""The loop, in this process: how a run ends that can't go on."""

import pytest
import torch

import train
from tests.runs import train_here
from training import checkpoint, evaluation
from training.evaluation import Validation
from training.metrics import NonFiniteError
from training.precision import Precision


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_step(tiny, tmp_path):
    with pytest.raises(NonFiniteError) as error:
        train_here(
            [*tiny, "optim.lr=1e38", "optim.min_lr=0", "optim.warmup_steps=0", "logging.every=30"],
            tmp_path / "run",
        )
    message = str(error.value)
    assert 1 <= error.value.step <= 4
    assert message.count(f"at step {error.value.step}") == message.count("at step") == 1
    assert "Batch: epoch 0, window" in message
    assert "Last good checkpoint: none" in message
    assert not (tmp_path / "run" / "checkpoints").exists()


def goes_bad_at(step, monkeypatch):
    """From `step` on, counted from 1, a weight is NaN."""
    original = train.training_step

    def goes_bad(forward, state, batch, index, *rest):
        if index == step - 1:
            next(iter(state.model.parameters())).data[0, 0] = float("nan")
        return original(forward, state, batch, index, *rest)

    monkeypatch.setattr(train, "training_step", goes_bad)


def test_the_last_good_checkpoint_is_the_one_with_the_most_steps(tiny, tmp_path, monkeypatch):
    goes_bad_at(9, monkeypatch)
    with pytest.raises(NonFiniteError, match=r"at step 9\.(.|\n)*Last good checkpoint: .*step_00000008"):  # the best so far
        train_here([*tiny, "checkpoint.every=5", "eval.every=8", "logging.every=30"], tmp_path / "run")
    stored = checkpoint.read(tmp_path / "run")
    assert stored.step == 8 and all(torch.isfinite(weight).all() for weight in stored.model().values())
    with pytest.raises(NonFiniteError, match=r"at step 9\.(.|\n)*Last good checkpoint: .*run/checkpoints/step_00000008"):
        train_here([f"resume={tmp_path / 'run'}", "seed=2", "resume_with_changes=true"], tmp_path / "other")


def test_a_validation_loss_that_is_no_number_stops_the_run_and_is_never_the_best(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: Validation(float("nan"), float("nan")))
    with pytest.raises(NonFiniteError, match="the validation loss is NaN or infinite at step 10"):
        train_here(tiny, tmp_path / "run")
    assert not (tmp_path / "run" / "best").exists()
    assert "val/" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_gradient_that_is_never_finite_stops_an_fp16_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Precision, "scaler", lambda _: torch.amp.GradScaler("cpu", init_scale=4.0))
    scale = torch.amp.GradScaler.scale
    monkeypatch.setattr(torch.amp.GradScaler, "scale", lambda self, loss: scale(self, loss) * float("nan"))
    with pytest.raises(NonFiniteError, match="every loss scale"):
        train_here([*tiny, "logging.every=1"], tmp_path / "run")
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "train/loss" in text and "NaN" not in text and "train/grad_norm" not in text
