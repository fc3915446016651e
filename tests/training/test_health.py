"""NaN and infinity are noticed, and the first bad step is named."""

import pytest
import torch

from training.health import Health, NonFiniteError

GOOD, NAN, INF = torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(float("inf"))


@pytest.mark.parametrize("bad", [(NAN, GOOD), (INF, GOOD), (GOOD, NAN), (GOOD, INF)])
def test_the_first_bad_step_is_named_however_late_one_looks(bad):
    health = Health(torch.device("cpu"))
    for step in range(10):
        health.watch(step, *(bad if step >= 4 else (GOOD, GOOD)))

    with pytest.raises(NonFiniteError, match="at step 4") as error:
        health.check()
    assert error.value.step == 4


def test_a_run_that_recovers_is_stopped_all_the_same():
    health = Health(torch.device("cpu"))
    health.watch(0, NAN, GOOD)
    health.watch(1, GOOD, GOOD)

    with pytest.raises(NonFiniteError, match="at step 0"):
        health.check()


def test_an_overflow_under_a_gradient_scaler_is_its_ordinary_work():
    health = Health(torch.device("cpu"))
    health.watch(0, GOOD, INF, scaled=True)
    health.check()

    health.watch(1, NAN, GOOD, scaled=True)
    with pytest.raises(NonFiniteError, match="at step 1"):
        health.check()


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_weight_is_found_while_the_loss_is_still_finite(bad):
    model, health = torch.nn.Linear(3, 3), Health(torch.device("cpu"))
    health.check_weights(model, 5)
    model.weight.data[1, 2] = bad

    with pytest.raises(NonFiniteError, match="a weight is NaN or infinite at step 5"):
        health.check_weights(model, 5)
