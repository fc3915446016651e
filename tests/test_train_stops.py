"""The loop, in this process: how a run ends that can't go on. NaN from the start: test_command_line.py."""

import pytest
import torch

from tests.resume.stops import in_step, spoil
from tests.runs import train_here
from training import checkpoint, evaluation
from training.evaluation import Validation
from training.metrics import NonFiniteError
from training.precision import Precision


def test_the_last_good_checkpoint_is_the_one_with_the_most_steps(tiny, tmp_path):
    stops = pytest.raises(NonFiniteError, match=r"at step 9\.(.|\n)*Last good checkpoint: .*run/checkpoints/step_00000008")
    with in_step(9, spoil):
        with stops:  # the best so far is the last
            train_here([*tiny, "checkpoint.every=5", "eval.every=8", "logging.every=30"], tmp_path / "run")
        stored = checkpoint.read(tmp_path / "run")
        assert stored.step == 8 and all(torch.isfinite(weight).all() for weight in stored.model().values())
        with stops:  # of a run that began elsewhere
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
    with pytest.raises(NonFiniteError, match=r"every loss scale down to 0\.5 at step 3"):
        train_here([*tiny, "logging.every=1"], tmp_path / "run")
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "train/loss" in text and "NaN" not in text and "train/grad_norm" not in text
