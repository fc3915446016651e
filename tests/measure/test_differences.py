"""Whether outcomes differ: the test against its printed tables, against drawn errors and against what it may say."""

import math

import numpy as np
import pytest

from measure.differences import LEVEL, Sample, difference, half_width, holm, tail


def sample(n, error):
    """n losses around 0 whose mean has this standard error."""
    losses = np.linspace(-1, 1, n)
    return Sample(list(losses * error * math.sqrt(n) / losses.std(ddof=1)))


@pytest.mark.parametrize(
    ("first", "second", "degrees", "bound"),
    [(7, 7, 45, 2.435), (7, 9, 45, 2.364), (7, 13, 45, 2.301), (9, 9, 45, 2.292), (7, 7, 30, 2.440), (13, 13, 45, 2.167)],
)
def test_the_bound_is_that_of_the_table_of_behrens_and_fisher(first, second, degrees, bound):
    """Fisher and Yates, Statistical Tables, table VI, 5 %: n₁ − 1, n₂ − 1, the angle whose tangent is s₁/s₂."""
    angle = math.radians(degrees)
    one, other = sample(first, math.sin(angle)), sample(second, math.cos(angle))
    assert half_width(one, other) == pytest.approx(bound, abs=0.006)


@pytest.mark.parametrize(("first", "second"), [(3, 6), (2, 8), (8, 16)])
def test_a_tail_is_that_of_drawn_errors(first, second):
    draw, one, other = np.random.default_rng(0), sample(first, 2.0), sample(second, 0.7)
    drawn = np.abs(2.0 * draw.standard_t(first - 1, 10**6) + 0.7 * draw.standard_t(second - 1, 10**6))
    for distance in (1.0, 4.0, 15.0):
        assert tail(distance, one, other) == pytest.approx((drawn >= distance).mean(), rel=0.03, abs=3e-5)
    assert tail(0.0, one, other) == 1.0 and tail(1.0, Sample([2.0, 2.0]), Sample([1.0, 1.0])) == 0.0


@pytest.mark.parametrize("noisy", [1, 8, 60])
@pytest.mark.parametrize("runs", [2, 3, 8])
def test_equal_arms_are_called_different_no_more_often_than_the_level(runs, noisy):
    draw, wrong = np.random.default_rng(0), 0
    for _ in range(1000):
        arm, base = Sample(draw.normal(0, noisy, runs)), Sample(draw.normal(0, 1, 2 * runs))
        wrong += tail(abs(np.mean(arm.losses) - np.mean(base.losses)), arm, base) <= LEVEL
    assert wrong <= 1000 * LEVEL + 2 * math.sqrt(1000 * LEVEL)


def test_holm_raises_each_p_by_the_number_of_tests_that_are_left():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06]) and holm([]) == []


def test_what_a_better_rate_may_gain_widens_the_interval_at_the_end_that_it_moves():
    losses = [1.440, 1.444, 1.437, 1.446, 1.441]
    base, arm = Sample(2 * losses), Sample([loss + 0.02 for loss in losses])
    plain, costly = difference(arm, base), difference(Sample(arm.losses, 0, 0.015), base)
    other = difference(arm, Sample(base.losses, 0, 0.015))
    assert costly.loss.low == pytest.approx(plain.loss.low - 0.015) and costly.loss.high == pytest.approx(plain.loss.high)
    assert other.loss.high == pytest.approx(plain.loss.high + 0.015) and other.p_loss == plain.p_loss < costly.p_loss
    assert (costly.p_loss <= 0.05) == (not costly.loss.holds(0.0))
    untuned = difference(Sample(arm.losses, 0, math.inf), base)
    assert untuned.p_loss == 1.0 and untuned.loss.low == -math.inf
