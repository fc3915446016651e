"""Differences between arms: the test is Welch's, moderated, and errs as rarely as it says."""

import numpy as np
import pytest
from scipy import stats

from measure.differences import LEVEL, Sample, differences, holm, moderated

BASE = Sample([1.44, 1.43, 1.45, 1.441, 1.436, 1.447])


def studies(draw, spreads, seeds, fails=0.0, difference=0.0, count=300):
    """Shares of drawn studies with a false difference, and with that of the last arm found; the baseline has A/A seeds too."""
    errors = found = 0
    for _ in range(count):
        samples = {}
        for number, spread in enumerate((0.006, *spreads)):
            losses = draw.normal(1.5, spread, seeds * (1 + (number == 0))) + difference * (number == len(spreads))
            failed = draw.random(len(losses)) < fails
            samples[str(number)] = Sample(losses[~failed].tolist(), int(failed.sum()))
        of = differences(samples, [(str(number), "0") for number in range(1, len(spreads) + 1)])
        assert not any(one.none and (samples[arm].failed or samples["0"].failed) for (arm, _), one in of.items())
        false = [one for (arm, _), one in of.items() if not (difference and arm == str(len(spreads)))]
        errors += any(one.lower or one.higher or one.fails for one in false)
        found += of[str(len(spreads)), "0"].higher
    return errors / count, found / count


@pytest.mark.parametrize(
    ("spreads", "seeds", "fails"),
    [
        ([0.006] * 6, 3, 0.0),
        ([0.036, *[0.006] * 5], 3, 0.0),
        ([0.036, *[0.006] * 5], 8, 0.0),
        ([0.0032, 0.0056, 0.0192, 0.0165, 0.0022, 0.13], 8, 0.0),  # recorded
        ([0.006] * 6, 8, 0.3),
        ([0.036], 8, 0.0),
    ],
)
def test_equal_arms_are_called_different_in_at_most_one_study_of_twenty(spreads, seeds, fails):
    assert studies(np.random.default_rng(0), spreads, seeds, fails)[0] <= 0.05 + 2 * (0.05 * 0.95 / 300) ** 0.5


@pytest.mark.parametrize(("arms", "seeds", "least"), [(6, 3, 0.57), (1, 3, 0.7), (6, 8, 0.99)])
def test_a_difference_of_2_hundredths_is_found(arms, seeds, least):
    assert studies(np.random.default_rng(1), [0.006] * arms, seeds, difference=0.02)[1] >= least


def test_of_many_runs_it_is_welchs_test_and_a_known_error_widens_the_interval():
    draw = np.random.default_rng(2)
    samples = {"a": Sample(draw.normal(1.0, 0.1, 200)), "b": Sample(draw.normal(1.05, 0.2, 300))}
    found = differences(samples, [("a", "b")])["a", "b"]
    reference = stats.ttest_ind(samples["a"].losses, samples["b"].losses, equal_var=False)
    interval = reference.confidence_interval()
    assert found.p_loss == pytest.approx(reference.pvalue, rel=0.1)
    assert (found.loss.low, found.loss.high) == pytest.approx((interval.low, interval.high), rel=0.01)
    wider = differences(samples | {"a": Sample(samples["a"].losses, error=0.05)}, [("a", "b")])["a", "b"]
    half = [(one.loss.high - one.loss.low) / 2 for one in (found, wider)]
    assert half[1] == pytest.approx(np.hypot(half[0], 1.96 * 0.05), rel=0.02)


def test_a_variance_that_is_small_by_chance_counts_as_typical_and_a_large_one_as_it_is():
    losses = {"close": [1.0, 1.0001, 1.0002], "b": [1.0, 1.01, 1.02], "c": [1.0, 1.01, 1.022], "noisy": [1.0, 1.5, 2.0]}
    found = moderated(losses)
    assert found["close"].variance > np.var(losses["b"], ddof=1) / 30 > 10 * np.var(losses["close"], ddof=1)
    assert found["close"].degrees > 2 and found["noisy"] == (pytest.approx(0.25), 2)


def test_failures_are_compared_by_their_number_and_never_averaged_into_a_loss():
    arms = {"base": BASE, "half": Sample([1.44, 1.45, 1.43, 1.442], 4), "all": Sample([], 8), "two": Sample([1.4, 1.41], 0)}
    found = differences(arms, [(name, "base") for name in arms if name != "base"])
    half, lost, two = found.values()
    assert half.loss.median == pytest.approx(np.mean(arms["half"].losses) - np.mean(BASE.losses)) and not half.none
    assert lost.loss is None and lost.fails and not (lost.none or lost.lower or lost.higher)
    fisher = [stats.fisher_exact([[failed, trained], [0, 6]]).pvalue for failed, trained in ((4, 4), (8, 0))]
    assert lost.p_failed == pytest.approx(3 * fisher[1]) and half.p_failed == pytest.approx(2 * fisher[0])
    assert (two.loss, two.p_loss, two.p_failed) == (None, None, None) and not two.none, "two runs tell no spread"


def test_holm_is_that_of_the_book():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02]) and holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == [] and LEVEL <= 0.05
