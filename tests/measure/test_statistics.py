import numpy as np
import pytest

from measure.statistics import LEAST_SAMPLES, mean_interval, paired_ratio, spread


def test_spread_is_median_and_outer_tenths_and_one_sample_is_its_own_interval():
    result = spread(range(11))
    assert (result.p10, result.median, result.p90) == (1, 5, 9)
    for only in (mean_interval([2.0]), paired_ratio([2.0], [1.0])):
        assert (only.median, only.low, only.high) == (2, 2, 2)


def test_paired_ratio_cancels_what_slows_a_whole_round_and_is_the_same_each_time():
    rounds = np.random.default_rng(1).uniform(1, 10, 40)
    ratio = paired_ratio(1.5 * rounds, rounds)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.5, 1.5, 1.5))
    assert paired_ratio(rounds, rounds[::-1]) == paired_ratio(rounds, rounds[::-1])


def test_the_fewest_samples_that_are_allowed_give_an_interval_that_misses_the_truth_less_than_one_time_in_ten():
    draw = np.random.default_rng(3)
    found = [paired_ratio(1 + 0.01 * draw.standard_t(3, LEAST_SAMPLES), np.ones(LEAST_SAMPLES)) for _ in range(200)]
    assert np.mean([not one.holds(1) for one in found]) < 0.1


@pytest.mark.parametrize("count", [2, 3, 5, 30])
def test_the_interval_of_a_mean_covers_the_truth_nineteen_times_in_twenty_however_few_samples(count):
    draw = np.random.default_rng(count)
    found = [mean_interval(draw.normal(3, 0.5, count)) for _ in range(2000)]
    assert np.mean([one.holds(3) for one in found]) == pytest.approx(0.95, abs=0.015)
