"""What a study says of drawn losses whose truth is known."""

import math

import numpy as np
import pytest
import torch

from configs import Config, ConfigError
from measure.statistics import Interval
from study.analysis import analyse, best_rate, is_different, saved, sensitivity, steps_to
from study.arms import FOLDER, Arm, Study, study_of
from study.probes import spikes
from study.report import words
from study.runs import AGAIN, Found, Result, over, read

RATES = [1e-3, 3e-3]


def drawn(draw, seeds=5, handicap=0.0, noise=0.006, slopes=(0.0, 0.05)):
    """Losses of two arms: of a seed in common, of the run, of the rate and the second arm's handicap. The arm `a` has one good
    rate, the arm `b` loses `slopes` at its rates."""
    found, common = Found(), draw.normal(0, noise, 2 * seeds)
    rates = [1e-3 * (1 + i) for i in range(len(slopes))]
    plan = [("a", rates, range(seeds), [0.0] + [0.05] * len(slopes)), ("b", rates, range(seeds), np.add(slopes, handicap))]
    for name, its_rates, its_seeds, losses in [*plan, ("a" + AGAIN, rates[:1], range(seeds, 2 * seeds), [0.0])]:
        for rate, more in zip(its_rates, losses, strict=False):
            for seed in its_seeds:
                last = 1.6 + more + common[seed] + draw.normal(0, noise)
                found.results.append(Result(name, rate, seed, [(0, 4.0), (50, last + 0.3), (100, last)]))
    study = Study([Arm("a", Config()), Arm("b", Config())], rates, list(range(seeds)), {})
    return analyse(study, found), study


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("slopes", [(0.0, 0.05), (0.0,) * 5], ids=["one good rate", "five good rates, whose best is chosen"])
def test_equal_arms_are_called_different_in_at_most_2_of_20_studies(seeds, slopes):
    draw = np.random.default_rng(0)
    called = [drawn(draw, seeds, slopes=slopes)[0].arms[1].different for _ in range(200)]
    assert max(sum(called[i : i + 20]) for i in range(0, 200, 20)) <= 2
    assert sum(called) <= 0.03 * 200


def test_a_handicap_of_2_hundredths_is_found_with_5_seeds_or_the_report_says_why_not():
    draw = np.random.default_rng(0)
    for noise, least in ((0.003, 0.95), (0.006, 0.6), (0.03, 0.0)):
        made = [drawn(draw, handicap=0.02, noise=noise) for _ in range(100)]
        assert np.mean([report.arms[1].different for report, _ in made]) >= least
        for report, study in made:
            arm, within = report.arms[1], max(abs(report.again.low), abs(report.again.high))
            assert ("loss higher, " in words(report, study)) == (arm.different and arm.difference.median > 0)
            assert arm.different or arm.difference.holds(0) or abs(arm.difference.median) <= within
            assert f"no difference within ±{within:.4f} is called one" in words(report, study)


@pytest.mark.parametrize(
    ("difference", "again", "different"),
    [((0.02, 0.01, 0.03), (0.0, -0.015, 0.015), True), ((-0.02, -0.03, -0.01), (0.0, -0.015, 0.015), True),
     ((0.02, -0.01, 0.05), (0.0, -0.015, 0.015), False), ((0.02, 0.01, 0.03), (-0.01, -0.025, 0.005), False)],
)  # fmt: skip
def test_a_difference_leaves_out_0_and_is_further_from_it_than_both_ends_of_a_a(difference, again, different):
    assert is_different(Interval(*difference), Interval(*again)) == different


def test_differences_are_paired_by_seed_whatever_the_order_of_runs():
    more = {("a", 1): 0.0, ("b", 1): 0.02, ("a", 2): 0.5, ("b", 2): 0.521, ("a", 3): 0.9, ("b", 3): 0.919}
    runs = [
        Result(arm, 1e-3, seed, [(0, 4.0), (9, 1.5 + loss)]) for (arm, seed), loss in sorted(more.items(), key=lambda x: x[1])
    ]
    others = [Result("a" + AGAIN, 1e-3, seed, [(0, 4.0), (9, 1.5 + seed / 9)]) for seed in (4, 5, 6)]
    study = Study([Arm("a", Config()), Arm("b", Config())], [1e-3], [3, 1, 2], {})
    found = analyse(study, Found([*reversed(runs[:3]), *runs[3:], *others])).arms[1].difference
    assert found.median == pytest.approx(0.02) and found.high - found.low == pytest.approx(2 * 4.303 * 0.001 / 3**0.5, rel=1e-3)


def test_one_seed_calls_nothing_different():
    report, study = drawn(np.random.default_rng(0), seeds=1, handicap=1.0)
    assert not report.arms[1].different and "nothing can be called different" in words(report, study)


def test_a_run_that_is_not_finite_counts_with_the_loss_before_training():
    losses = [(1, [2.0]), (2, [1.5]), (3, [9.0]), (4, [math.nan])]
    found = Found([Result("a", rate, 1, [(0, 4.0), *((9, loss) for loss in of)]) for rate, of in losses])
    assert sensitivity(found, "a", 1) == pytest.approx((2.0 + 1.5 + 4.0 + 4.0) / 4 - 1.5)  # arXiv:2309.14322
    assert best_rate(found, "a") == 2
    fails = [
        Result("b", rate, seed, [(0, 4.0), (20, math.nan)], "step 20: loss not finite") for rate in RATES for seed in (0, 1)
    ]
    good = [Result(n, rate, s, [(0, 4.0), (100, 2.0 + 0.01 * s)]) for n in ("a", "a" + AGAIN) for rate in RATES for s in (0, 1)]
    study = Study([Arm("a", Config()), Arm("b", Config())], RATES, [0, 1], {})
    report = analyse(study, Found([*good, *fails]))
    arm = report.arms[1]
    assert arm.difference.median == pytest.approx(1.995) and arm.different and arm.speedup is None
    assert arm.diverged == 1.0 and "2 runs at its best rate diverged" in words(report, study)


def test_steps_saved_are_those_to_the_loss_that_both_reach():
    base = Result("a", 1, 1, [(0, 4.0), (100, 2.0)])
    faster = Result("b", 1, 1, [(0, 4.0), (50, 2.0), (100, 1.5)])
    assert steps_to(faster, 2.0) == 50 and saved(faster, base) == pytest.approx(2.0)
    assert saved(base, faster) == pytest.approx(0.5)


def test_a_run_is_over_if_it_is_not_finite_or_far_above_its_arms_others_at_no_higher_rate():
    def at(step, loss, rate=2):
        return Result("a", rate, 1, [(0, 4.0), (step, loss)])

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


def test_a_line_that_was_cut_short_is_made_again(tmp_path):
    path = tmp_path / "runs.jsonl"
    for whole, times in (('{"arm": "a", "times": {"torch": [1.0]}}\n', {"a": {"torch": [1.0]}}), ("", {})):
        path.write_text(whole + '{"arm": "a", "ra')
        assert read(path).times == times and path.read_text() == whole


def test_an_arm_is_what_is_swept_but_for_rate_and_seed():
    study = study_of(["norm.kind=layernorm,rmsnorm", "model.qk_norm=false,true", "optim.lr=1e-3,3e-3", "seed=range(1,4)"])
    assert len(study.arms) == 4 and study.rates == RATES and study.seeds == [1, 2, 3]
    assert study.arms[-1].cfg.model.qk_norm and study.arms[-1].at(3e-3, 2).optim.lr == 3e-3


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_every_named_study_can_run(name):
    study = study_of([f"study={name}", "train.steps=10000"])
    assert len(study.arms) > 1 and len(study.seeds) > 2 and study.words.keys() == {"claim", "source", "limits"}
    assert all(arm.cfg.train.steps == 10000 for arm in study.arms)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["study=qk_nrom"], "Did you mean qk_norm"),
        (["optim.lr=fast,slow"], "optim.lr takes numbers"),
        (["compare.baseline=x", "norm.kind=layernorm,rmsnorm"], "no such arm"),
        (["seed=1,1"], "twice"),
        (["compare.timing_cycles=3"], "takes 0, which times nothing, or 6 and more"),
    ],
)
def test_what_it_cant_compare_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        study_of(wrong)
