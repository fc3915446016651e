"""How a run ends that can't go on, and what is said where the GPU waits. NaN from the start: test_command_line.py."""

import pytest
import torch

import configs
from configs.machine import Machine
from tests.resume.stops import in_step, spoil
from tests.runs import train_here
from training import checkpoint, evaluation
from training.evaluation import Validation
from training.metrics import Health, NonFiniteError, waiting
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


GOOD, NAN, INF = torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(float("inf"))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bad", [(NAN, GOOD), (INF, GOOD), (GOOD, NAN), (GOOD, INF)])
def test_the_first_bad_step_is_named_however_late_one_looks_but_an_overflow_under_a_scaler_is_ordinary_work(bad, scaled):
    health = Health(torch.device("cpu"), torch.amp.GradScaler("cpu", enabled=scaled))
    for step in range(1, 10):
        health.watch(step, *(bad if 4 <= step < 8 else (GOOD, GOOD)))
    if scaled and bad[0] is GOOD:
        health.check()
        return
    with pytest.raises(NonFiniteError, match="at step 4") as error:
        health.check()
    assert error.value.step == 4


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_weight_is_found_while_the_loss_is_still_finite(bad):
    health, model = Health(torch.device("cpu"), torch.amp.GradScaler("cpu", enabled=False)), torch.nn.Linear(3, 3)
    health.check_weights(model, 5)
    model.weight.data[1, 2] = bad
    with pytest.raises(NonFiniteError, match="a weight is NaN or infinite at step 5"):
        health.check_weights(model, 5)


@pytest.mark.parametrize(
    ("gpu_ms", "overrides", "told"),
    [
        (9.0, [], ""),
        (4.0, [], "60 % of a step: its kernels take 4.0 of 10.0 ms. Try train.compile=true train.compile_mode=reduce-overhead"),
        (4.0, ["train.compile=true", "train.compile_mode=reduce-overhead"], "Try a larger train.batch_size"),
    ],
)
def test_what_helps_where_the_gpu_waits(gpu_ms, overrides, told):
    text = waiting(10.0, gpu_ms, configs.load(overrides, on=Machine("cuda")))
    assert told in text and bool(told) == bool(text)
