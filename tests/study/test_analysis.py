"""What a study says of drawn losses whose truth is known."""

import json
import math

import numpy as np
import pytest
import torch

from configs import Config
from measure.statistics import Interval, paired_ratio
from study import report
from study.analysis import analyse, noise_of
from study.arms import Arm, Study
from study.probes import spikes
from study.report import words
from study.runs import AGAIN, FRESH, TIME, Found, Result, over, read
from study.timing import OWN_AGAIN


def run(arm, rate, seed, *losses, initial=4.0, **more):
    """Evaluated every 50 steps."""
    evaluated = [[50 * (i + 1), loss] for i, loss in enumerate(losses)]
    return Result(arm, rate, seed, [[0, initial], *evaluated], **more)


def report_of(runs, rates=(1e-3,), seeds=(1, 2, 3), times=None, keys=None):
    study = Study([Arm("a", Config()), Arm("b", Config())], list(rates), list(seeds), {})
    for name, value in (keys or {}).items():
        setattr(study.cfg.compare, name, value)
    study.cfg.train.steps = 900
    return analyse(study, Found(runs, times or {})), study


def of_arms(rate=1e-3, again=True, **losses):
    """Runs at one rate; those of A/A are near those of `a`."""
    runs = [run(name, rate, seed, 2.5, loss) for name, of in losses.items() for seed, loss in enumerate(of)]
    more = [loss + 0.001 for loss in losses["a"] if loss]
    return runs + [run("a" + AGAIN, rate, 20_000 + i, 2.5, loss) for i, loss in enumerate(more) if again]


CLOSE = [1.440, 1.444, 1.437, 1.446, 1.441]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([loss + 0.02 for loss in CLOSE], "b: loss higher, 0.0195 ("),
        ([loss - 0.02 for loss in CLOSE], "b: loss lower, −0.0205 ("),
        ([loss + 0.001 for loss in reversed(CLOSE)], "b: no difference was found, 0.0005 ("),
        ([1.44, 1.6], "b: too few runs that trained for an interval of their loss"),
        ([1.44], "b: too few runs that trained for an interval of their loss"),
        ([*CLOSE[:3], None, None], "b: fails in 2 of 5 runs at 0.001 (baseline 0 of 10; exact test, p = "),
        (
            [None] * 5,
            "b: fails in 5 of 5 runs at 0.001 (baseline 0 of 10; exact test, p = 0.00033), which differs; too few runs",
        ),
    ],
)
def test_the_words_are_those_that_the_runs_allow_and_a_failed_run_is_never_no_difference(other, said):
    made, study = report_of(of_arms(a=CLOSE, b=other), seeds=range(5))
    assert said in words(made, study)
    assert ("no difference was found" in words(made, study)) == (said.startswith("b: no"))
    assert made.arms[1].sample.losses == [loss for loss in other if loss], "a run that failed has no part in a mean"


def test_a_failing_baseline_is_told_and_so_is_that_no_run_of_the_arm_fails():
    made, study = report_of(of_arms(a=[*CLOSE[:3], None, None, None], b=CLOSE), seeds=range(6))
    assert "the baseline is a, fails in 3 of 6 runs at 0.001." in words(made, study)
    assert "b: no run of 5 fails (baseline 3 of 9; exact test, p = " in words(made, study)
    assert "between the runs that trained no difference of loss was found" in words(made, study)


def test_seeds_that_chose_the_rate_are_not_compared_where_there_are_others():
    at = {1e-3: 0.02, 3e-3: 0.0, 1e-2: 0.03}
    runs = [run(name, rate, 1, 1.44 + more) for name in ("a", "b") for rate, more in at.items()]
    runs += [run(name, 3e-3, 10_000 + i, loss, stage=FRESH) for name in ("a", "b") for i, loss in enumerate(CLOSE)]
    runs += [run("b", 1e-3, 10_000, 1.0, stage=FRESH), run("a" + AGAIN, 3e-3, 20_000, 1.442)]
    runs += [run("a" + AGAIN, 1e-3, 20_000, 1.9)]  # of a time when another rate was the best
    made, study = report_of(runs, rates=at, seeds=[1])
    assert [list(arm.sample.losses) for arm in made.arms] == [[*CLOSE, 1.442], CLOSE] and made.arms[1].rate == 3e-3
    assert not made.chosen_by_same and 0 < made.arms[1].sample.error < 0.005
    made, study = report_of([one for one in runs if one.stage != FRESH], rates=at, seeds=[1])
    assert made.chosen_by_same and "have chosen the rates too" in words(made, study)


def test_all_pairs_have_one_test_together_and_those_with_the_baseline_are_turned():
    made, _ = report_of(
        of_arms(a=CLOSE, b=[loss + 0.02 for loss in CLOSE]), seeds=range(5), keys={"all_pairs": True, "baseline": "b"}
    )
    assert list(made.pairs) == [("b", "a")] and made.baseline == "b"
    assert made.arms[0].against.lower and made.arms[0].against.loss.median == -made.pairs["b", "a"].loss.median


def test_what_failed_does_not_depend_on_the_order_of_runs_and_the_best_rate_is_none_at_which_most_fail():
    runs = [
        run("a", 2e-3, 1, 2.6, 2.45),
        run("a", 1e-3, 2, 2.5, 1.44),
        run("a", 2e-3, 2, 1.5, 1.3),
        run("a", 2e-3, 3, 2.6, 2.5),
    ]
    for order in (runs, runs[::-1]):
        found = Found(list(order))
        assert [found.failed(one) for one in runs] == [True, False, False, True]
        assert found.best_rate("a") == 1e-3 and math.isinf(found.rates("a")[2e-3])
    lost = Found([run("a", rate, 1, math.nan, over="step 50: loss not finite") for rate in (2e-3, 1e-3)])
    assert lost.best_rate("a") == 1e-3


def test_sensitivity_counts_a_failed_run_with_the_loss_before_training_and_is_none_where_all_fail():
    """arXiv:2309.14322"""
    runs = [run("a", rate, 1, loss, over="x" * (loss == 2.9)) for rate, loss in ((1, 2.0), (2, 1.5), (3, 9.0), (4, 2.9))]
    runs += [run("b", rate, 1, math.nan, over="x") for rate in (1, 2, 3, 4)]
    a, b = report_of(runs, rates=(1, 2, 3, 4), seeds=[1])[0].arms
    assert a.sensitivity.median == pytest.approx((2.0 + 1.5 + 4.0 + 4.0) / 4 - 1.5) and b.sensitivity is None
    assert report_of(runs[:3] + runs[4:], rates=(1, 2, 3, 4), seeds=[1])[0].arms[0].sensitivity is None, "a rate is missing"


def test_an_end_of_the_rates_is_a_bound():
    runs = [
        run(arm, rate, seed, 1.5 + 0.1 * (rate > 1e-3) + seed / 500)
        for arm in "ab"
        for rate in (1e-3, 3e-3)
        for seed in (1, 2, 3)
    ]
    made, study = report_of(runs, rates=(1e-3, 3e-3))
    assert made.arms[1].at_end == "lowest" and "a bound: one of the two is not tuned" in words(made, study)
    assert "at the end of those that were trained: a (lowest), b (lowest). Add rates." in words(made, study)


DRIFT = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]  # from cycle to cycle, the same for all that run in it


def timed(**typical):
    noise = {OWN_AGAIN: [1.0, 1.01] * 6}  # A/A reaches 1 %
    return {name: [ms * slow * more for slow, more in zip(np.repeat(DRIFT, 2), noise.get(name, [1] * 12), strict=True)]
            for name, ms in typical.items()}  # fmt: skip


@pytest.mark.parametrize(("slower", "differs"), [(1.003, False), (1.5, True)])
def test_a_step_takes_longer_only_beyond_a_a_and_equal_time_is_that_of_runs_with_their_own_schedule(slower, differs):
    times = {
        "a": timed(fused=2.0, torch=6.0, again=2.0),
        "b": timed(fused=2 * slower, torch=6.0, again=2 * slower, baseline=2.0),
    }
    runs = of_arms(a=CLOSE, b=[loss - 0.1 for loss in CLOSE])
    shorter = [run("b", 1e-3, seed, loss + 0.1, stage=TIME, steps=600) for seed, loss in enumerate(CLOSE)]
    (a, b), study = (of := report_of([*runs, *shorter], seeds=range(5), times=times))[0].arms, of[1]
    assert b.price.of_baseline.median == pytest.approx(slower) and b.slower == differs and not a.slower
    assert b.price.over_torch == paired_ratio([6 * slow for slow in DRIFT], [2 * slower * slow for slow in DRIFT])
    assert noise_of({"a": a.price}) == pytest.approx(0.005, rel=0.02) and a.price.of_baseline == Interval(1.0, 1.0, 1.0)
    assert ("no difference in the time of a step was found" in words(of[0], study)) == (not differs)
    if differs:
        assert b.against.lower and b.at_equal_time[0] == 600 and b.equal_time.higher
    assert (b.equal_time is None) == (not differs)


def test_numbers_that_are_not_finite_are_null_in_every_file(tmp_path):
    runs = [run("a", 1e-3, 1, 1.5), run("b", 1e-3, 1, math.nan, over="step 50: loss not finite")]
    study, found = report_of(runs, seeds=[1])[1], Found(runs)
    facts = {"gpu": None, "versions": {"torch": "2"}, "git": None}
    report.write(analyse(study, found), study, found, facts, tmp_path)
    json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    old = tmp_path / "runs.jsonl"
    old.write_text('{"arm": "b", "rate": 1, "seed": 1, "evaluated": [[0, 4.0], [50, NaN]], "over": "x", "grad_norm": NaN}\n')
    assert math.isnan(read(old).results[0].last) and read(old).failed(read(old).results[0])


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
