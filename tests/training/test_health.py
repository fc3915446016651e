"""NaN and infinity are noticed, and the first bad step is named."""

import pytest
import torch

from training.metrics import Health, NonFiniteError

GOOD, NAN, INF = torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(float("inf"))


def new_health(scaled=False):
    return Health(torch.device("cpu"), torch.amp.GradScaler("cpu", enabled=scaled))


@pytest.mark.parametrize("bad", [(NAN, GOOD), (INF, GOOD), (GOOD, NAN), (GOOD, INF)])
def test_the_first_bad_step_is_named_however_late_one_looks(bad):
    health = new_health()
    for step in range(1, 10):
        health.watch(step, *(bad if step >= 4 else (GOOD, GOOD)))

    with pytest.raises(NonFiniteError, match="at step 4") as error:
        health.check()
    assert error.value.step == 4


def test_a_run_that_recovers_is_stopped_all_the_same():
    health = new_health()
    health.watch(1, NAN, GOOD)
    health.watch(2, GOOD, GOOD)

    with pytest.raises(NonFiniteError, match="at step 1"):
        health.check()


def test_an_overflow_under_a_gradient_scaler_is_its_ordinary_work():
    health = new_health(scaled=True)
    health.watch(1, GOOD, INF)
    health.check()

    health.watch(2, NAN, GOOD)
    with pytest.raises(NonFiniteError, match="at step 2"):
        health.check()


def test_a_gradient_that_overflows_at_every_scale_stops_the_run():
    scaler, weight = torch.amp.GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.ones(1))
    optimizer, health = torch.optim.SGD([weight], lr=1.0), Health(torch.device("cpu"), scaler)

    def step(number):
        scaler.scale(weight.sum()).backward()
        weight.grad.fill_(float("nan"))
        scaler.step(optimizer)
        scaler.update()
        health.watch(number, GOOD, NAN)

    for number in (1, 2):  # the scale is still looked for: 2, 1
        step(number)
        health.check()
    step(3)
    with pytest.raises(NonFiniteError, match=r"every loss scale down to 0\.5 at step 3") as error:
        health.check()
    assert error.value.step == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_validation_loss_that_is_no_number_stops_the_run(bad):
    health = new_health()
    health.check_validation(2.0, 6)

    with pytest.raises(NonFiniteError, match="validation loss is NaN or infinite at step 7"):
        health.check_validation(bad, 7)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_weight_is_found_while_the_loss_is_still_finite(bad):
    model, health = torch.nn.Linear(3, 3), new_health()
    health.check_weights(model, 5)
    model.weight.data[1, 2] = bad

    with pytest.raises(NonFiniteError, match="a weight is NaN or infinite at step 5"):
        health.check_weights(model, 5)
