"""NaN and infinity are noticed, and the first bad step is named. What a run does then: test_train_stops.py."""

import pytest
import torch

from training.metrics import Health, NonFiniteError

GOOD, NAN, INF = torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(float("inf"))


def health(scaled=False):
    return Health(torch.device("cpu"), torch.amp.GradScaler("cpu", enabled=scaled))


@pytest.mark.parametrize("bad", [(NAN, GOOD), (INF, GOOD), (GOOD, NAN), (GOOD, INF)])
def test_the_first_bad_step_is_named_however_late_one_looks_and_though_the_run_recovers(bad):
    watching = health()
    for step in range(1, 10):
        watching.watch(step, *(bad if 4 <= step < 8 else (GOOD, GOOD)))
    with pytest.raises(NonFiniteError, match="at step 4") as error:
        watching.check()
    assert error.value.step == 4


def test_an_overflow_under_a_gradient_scaler_is_its_ordinary_work():
    watching = health(scaled=True)
    watching.watch(1, GOOD, INF)
    watching.check()
    watching.watch(2, NAN, GOOD)
    with pytest.raises(NonFiniteError, match="at step 2"):
        watching.check()


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_weight_is_found_while_the_loss_is_still_finite(bad):
    model = torch.nn.Linear(3, 3)
    health().check_weights(model, 5)
    model.weight.data[1, 2] = bad
    with pytest.raises(NonFiniteError, match="a weight is NaN or infinite at step 5"):
        health().check_weights(model, 5)
