"""NaN and infinity are noticed, and the first bad step is named. What helps a GPU that waits is said."""

import pytest
import torch

import configs
from configs.machine import Machine
from training.metrics import Health, NonFiniteError, waiting

CPU = torch.device("cpu")
GOOD, NAN, INF = torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(float("inf"))


@pytest.fixture
def health():
    return Health(CPU, torch.amp.GradScaler("cpu", enabled=False))


@pytest.mark.parametrize("bad", [(NAN, GOOD), (INF, GOOD), (GOOD, NAN), (GOOD, INF)])
def test_the_first_bad_step_is_named_however_late_one_looks_and_though_the_run_recovers(health, bad):
    for step in range(1, 10):
        health.watch(step, *(bad if 4 <= step < 8 else (GOOD, GOOD)))
    with pytest.raises(NonFiniteError, match="at step 4") as error:
        health.check()
    assert error.value.step == 4


def test_an_overflow_under_a_gradient_scaler_is_its_ordinary_work():
    health = Health(CPU, torch.amp.GradScaler("cpu"))
    health.watch(1, GOOD, INF)
    health.check()
    health.watch(2, NAN, GOOD)
    with pytest.raises(NonFiniteError, match="at step 2"):
        health.check()


def test_a_gradient_that_overflows_at_every_scale_stops_the_run():
    scaler, weight = torch.amp.GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.ones(1))
    optimizer, health = torch.optim.SGD([weight], lr=1.0), Health(CPU, scaler)
    for number in (1, 2, 3):  # with scales of 2, 1 and a half after them
        scaler.scale(weight.sum()).backward()
        weight.grad.fill_(float("nan"))
        scaler.step(optimizer)
        scaler.update()
        health.watch(number, GOOD, NAN)
        if number < 3:
            health.check()
    with pytest.raises(NonFiniteError, match=r"every loss scale down to 0\.5 at step 3") as error:
        health.check()
    assert error.value.step == 3


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_weight_is_found_while_the_loss_is_still_finite(health, bad):
    model = torch.nn.Linear(3, 3)
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
