"""What a study says of drawn losses whose truth is known."""

import math

import numpy as np
import pytest
import torch

from configs import Config
from measure.comparison import AGAIN as TORCH_AGAIN
from measure.statistics import Interval, paired_ratio
from study.analysis import analyse, is_different, saved, sensitivity
from study.arms import Arm, Study
from study.probes import spikes
from study.report import words
from study.runs import AGAIN, Found, Result, over
from study.timing import BASELINE


def run(arm, rate, seed, *losses, initial=4.0):
    """Evaluated every 50 steps."""
    return Result(arm, rate, seed, [[0, initial], *([50 * (i + 1), loss] for i, loss in enumerate(losses))])


def report_of(runs, rates, seeds, times=None):
    study = Study([Arm("a", Config()), Arm("b", Config())], rates, list(seeds), {})
    return analyse(study, Found(runs, times or {})), study


def drawn(draw, seeds=5, handicap=0.0, noise=0.006, slopes=(0.0, 0.05)):
    """Losses of two arms: of a seed in common, of the run, of the rate and the second arm's handicap. The arm `a` has one good
    rate, the arm `b` loses `slopes` at its rates."""
    common = draw.normal(0, noise, 2 * seeds)
    rates = [1e-3 * (1 + i) for i in range(len(slopes))]
    plan = [("a", rates, range(seeds), [0.0] + [0.05] * len(slopes)), ("b", rates, range(seeds), np.add(slopes, handicap))]
    plan.append(("a" + AGAIN, rates[:1], range(seeds, 2 * seeds), [0.0]))
    runs = []
    for name, its_rates, its_seeds, losses in plan:
        for rate, more in zip(its_rates, losses, strict=False):
            for seed in its_seeds:
                last = 1.6 + more + common[seed] + draw.normal(0, noise)
                runs.append(run(name, rate, seed, last + 0.3, last))
    return report_of(runs, rates, range(seeds))


@pytest.mark.parametrize("seeds", [2, 5])
@pytest.mark.parametrize("slopes", [(0.0, 0.05), (0.0,) * 5], ids=["one good rate", "five good rates, whose best is chosen"])
def test_equal_arms_are_called_different_in_at_most_2_of_20_studies(seeds, slopes):
    draw = np.random.default_rng(0)
    called = [drawn(draw, seeds, slopes=slopes)[0].arms[1].different for _ in range(200)]
    assert max(sum(called[i : i + 20]) for i in range(0, 200, 20)) <= 2
    assert sum(called) <= 0.03 * 200


def test_a_handicap_of_2_hundredths_is_found_with_5_seeds_or_the_report_says_why_not():
    draw = np.random.default_rng(0)
    for noise, least in ((0.003, 0.95), (0.006, 0.6), (0.03, 0.0)):
        made = [drawn(draw, handicap=0.02, noise=noise) for _ in range(50)]
        assert np.mean([report.arms[1].different for report, _ in made]) >= least
        for report, study in made:
            arm, within = report.arms[1], max(abs(report.again.low), abs(report.again.high))
            assert ("loss higher, " in words(report, study)) == (arm.different and arm.difference.median > 0)
            beyond = "no difference was found beyond that of other seeds" in words(report, study)
            assert beyond == (not arm.different and not arm.difference.holds(0))
            assert not beyond or abs(arm.difference.median) <= within
            assert f"no difference within ±{within:.4f} is called one" in words(report, study)
    report, study = drawn(draw, seeds=1, handicap=1.0)
    assert not report.arms[1].different and "nothing can be called different" in words(report, study)


@pytest.mark.parametrize(
    ("difference", "again", "different"),
    [((0.02, 0.01, 0.03), (0.0, -0.015, 0.015), True), ((-0.02, -0.03, -0.01), (0.0, -0.015, 0.015), True),
     ((0.02, -0.01, 0.05), (0.0, -0.015, 0.015), False), ((0.02, 0.01, 0.03), (-0.01, -0.025, 0.005), False)],
)  # fmt: skip
def test_a_difference_leaves_out_0_and_is_further_from_it_than_both_ends_of_a_a(difference, again, different):
    assert is_different(Interval(*difference), Interval(*again)) == different


def test_differences_are_paired_by_seed_whatever_the_order_of_runs():
    last = {("a", 1): 1.5, ("b", 1): 1.52, ("a", 2): 2.0, ("b", 2): 2.021, ("a", 3): 2.4, ("b", 3): 2.419}
    runs = [run(arm, 1e-3, seed, loss) for (arm, seed), loss in sorted(last.items(), key=lambda one: one[1])]
    others = [run("a" + AGAIN, 1e-3, seed, 1.5 + seed / 9) for seed in (4, 5, 6)]
    found = report_of([*reversed(runs[:3]), *runs[3:], *others], [1e-3], [3, 1, 2])[0].arms[1].difference
    assert found.median == pytest.approx(0.02) and found.high - found.low == pytest.approx(2 * 4.303 * 0.001 / 3**0.5, rel=1e-3)


def test_a_run_that_is_not_finite_counts_with_the_loss_before_training():
    found = Found([run("a", rate, 1, loss) for rate, loss in ((1, 2.0), (2, 1.5), (3, 9.0), (4, math.nan))])
    assert sensitivity(found, "a", 1) == pytest.approx((2.0 + 1.5 + 4.0 + 4.0) / 4 - 1.5)  # arXiv:2309.14322
    assert found.best_rate("a") == 2
    fails = [run("b", 1e-3, seed, math.nan) for seed in (0, 1)]
    for one in fails:
        one.over = "step 50: loss not finite"
    good = [run(name, 1e-3, seed, 2.0 + 0.01 * seed) for name in ("a", "a" + AGAIN) for seed in (0, 1)]
    report, study = report_of([*good, *fails], [1e-3], [0, 1])
    arm = report.arms[1]
    assert arm.difference.median == pytest.approx(1.995) and arm.different and arm.speedup is None
    assert arm.diverged == 1.0 and "2 runs at its best rate diverged" in words(report, study)


def test_steps_saved_are_those_to_the_loss_that_both_reach():
    base, faster = run("a", 1, 1, 3.0, 2.0), run("b", 1, 1, 2.0, 1.5)
    assert saved(faster, base) == pytest.approx(2.0) and saved(base, faster) == pytest.approx(0.5)


def test_times_are_paired_by_cycle_and_the_loss_at_equal_time_is_that_of_the_steps_that_fit():
    drift = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]  # from cycle to cycle, the same for all that run in it
    typical = {"fused": 3.0, "torch": 6.0, TORCH_AGAIN: 6.06, BASELINE: 2.0}
    blocks = {name: [ms * slow for slow in drift for _ in "ab"] for name, ms in typical.items()}
    times = {"a": {name: of for name, of in blocks.items() if name != BASELINE}, "b": blocks}
    last = {"a": (2.0, (1, 2)), "b": (1.0, (1, 2)), "a" + AGAIN: (2.0, (3, 4))}
    runs = [Result(arm, 1e-3, seed, [[0, 4.0], [900, loss + seed / 1e6]]) for arm, (loss, of) in last.items() for seed in of]
    a, b = report_of(runs, [1e-3], [1, 2], times)[0].arms
    assert b.price.over_torch == paired_ratio([6 * slow for slow in drift], [3 * slow for slow in drift])
    assert b.price.of_baseline.median == pytest.approx(1.5) and b.price.of_baseline.high == pytest.approx(1.5)
    assert b.price.again.median == pytest.approx(1 / 1.01) and a.price.of_baseline == Interval(1.0, 1.0, 1.0)
    assert (a.equal_time.median, b.equal_time.median) == pytest.approx((2.0, 4.0 - 3.0 / 1.5), abs=1e-5)
    assert b.equal_time_difference.median == pytest.approx(0.0, abs=1e-5)


def test_a_run_is_over_if_it_is_not_finite_or_far_above_its_arms_others_at_no_higher_rate():
    def at(step, loss, rate=2):
        return Result("a", rate, 1, [[0, 4.0], [step, loss]])

    losses, lower = torch.ones(50), [at(50, 2.0, rate=1)]
    assert over(at(50, 3.1), losses, 100, lower, 1.0) == "step 50: loss 3.100, another run's 2.000"
    assert not over(at(50, 2.9), losses, 100, lower, 1.0)
    assert not over(at(50, 3.1), losses, 100, [at(50, 2.0, rate=3)], 1.0), "slow, not diverged"
    assert not over(at(20, 3.9), losses, 100, [at(20, 2.0, rate=1)], 1.0), "before a quarter"
    assert "not finite" in over(at(50, 2.9), losses * math.nan, 100, [], 1.0)


def test_spikes_are_counted_once():
    losses = np.linspace(3, 2, 200) + 0.001 * np.sin(np.arange(200))
    losses[100:103] += 1
    assert spikes(losses, 10) == 1 and spikes(np.linspace(3, 2, 200), 10) == 0
