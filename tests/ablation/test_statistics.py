import numpy as np
import pytest

from ablation.statistics import paired_ratio, spread


def test_spread_is_median_and_outer_tenths():
    result = spread(range(11))
    assert (result.p10, result.median, result.p90) == (1, 5, 9)


def test_paired_ratio_cancels_what_slows_a_whole_round():
    rounds = np.random.default_rng(1).uniform(1, 10, 40)
    ratio = paired_ratio(1.5 * rounds, rounds)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.5, 1.5, 1.5))


def test_interval_of_a_ratio_covers_the_truth_and_narrows_with_rounds():
    draw = np.random.default_rng(2)
    few, many = (paired_ratio(draw.normal(2, 0.1, n), np.ones(n)) for n in (10, 1000))
    assert few.low < 2 < few.high and many.low < 2 < many.high
    assert many.high - many.low < (few.high - few.low) / 3


def test_interval_is_the_same_each_time():
    a, b = [1.0, 1.2, 0.9, 1.1], [1.0, 1.0, 1.0, 1.0]
    assert paired_ratio(a, b) == paired_ratio(a, b)
