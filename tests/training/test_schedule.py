"""The learning rate against its closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import OptimConfig, Schedule
from training.step import learning_rate

RUNS = st.tuples(st.integers(1, 2000), st.integers(0, 300), st.sampled_from(Schedule)).map(
    lambda run: (run[0], OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=min(run[1], run[0]), schedule=run[2]))
)


@given(RUNS, st.data())
def test_the_rate_is_positive_and_never_above_its_peak(run, data):
    steps, optim = run
    step = data.draw(st.integers(0, steps - 1))

    assert 0 < learning_rate(step, steps, optim) <= optim.lr * (1 + 1e-12)


@given(RUNS)
def test_the_rate_rises_through_warm_up_and_never_after(run):
    steps, optim = run
    rates = [learning_rate(step, steps, optim) for step in range(steps)]
    up, down = rates[: optim.warmup_steps], rates[max(optim.warmup_steps - 1, 0) :]

    assert up == sorted(up)
    assert down == sorted(down, reverse=True)


def test_warm_up_is_a_straight_line_that_arrives_at_the_peak():
    optim = OptimConfig(lr=1e-3, warmup_steps=10)

    assert [learning_rate(step, 100, optim) for step in (0, 4, 9)] == pytest.approx([1e-4, 5e-4, 1e-3])


@pytest.mark.parametrize("step", [10, 33, 60, 109])
def test_cosine_follows_its_formula(step):
    optim = OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=10, schedule=Schedule.cosine)

    t = (step - 10) / 100
    assert learning_rate(step, 110, optim) == pytest.approx(1e-4 + 9e-4 * (1 + math.cos(math.pi * t)) / 2)


def test_cosine_is_halfway_in_the_middle_and_ends_at_the_minimum():
    optim = OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=0)

    assert learning_rate(50, 100, optim) == pytest.approx(5.5e-4)
    assert learning_rate(100, 100, optim) == pytest.approx(1e-4)


@pytest.mark.parametrize("schedule", [Schedule.cosine, Schedule.wsd])
def test_without_a_minimum_the_rate_ends_at_a_tenth_of_its_peak(schedule):
    optim = OptimConfig(lr=3e-4, min_lr=None, warmup_steps=10, schedule=schedule)

    assert learning_rate(100, 100, optim) == pytest.approx(3e-5)


def test_wsd_is_stable_then_falls_in_a_straight_line():
    optim = OptimConfig(lr=1e-3, min_lr=0.0, warmup_steps=10, schedule=Schedule.wsd, decay_fraction=0.2)
    rates = [learning_rate(step, 100, optim) for step in (10, 50, 80, 85, 90, 95, 100)]

    assert rates == pytest.approx([1e-3, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4, 0])


def test_wsd_does_not_decay_before_its_warm_up_ends():
    optim = OptimConfig(lr=1e-3, min_lr=0.0, warmup_steps=60, schedule=Schedule.wsd, decay_fraction=1.0)

    assert learning_rate(60, 100, optim) == pytest.approx(1e-3)


def test_constant_stays():
    optim = OptimConfig(lr=1e-3, warmup_steps=2, schedule=Schedule.constant)

    assert {learning_rate(step, 50, optim) for step in range(2, 50)} == {1e-3}


def test_warm_up_is_a_twentieth_of_the_steps_unless_set():
    unset, same = OptimConfig(lr=1e-3, warmup_steps=None), OptimConfig(lr=1e-3, warmup_steps=10)
    assert [learning_rate(step, 200, unset) for step in range(200)] == [learning_rate(step, 200, same) for step in range(200)]
    assert learning_rate(0, 3, unset) == 1e-3, "a run too short for a warm-up has none"
