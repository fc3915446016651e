"""What a study says of drawn losses whose truth is known."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from measure.statistics import Interval, paired_ratio
from measure.tables import interval_text
from study import report, tracking
from study.analysis import analyse, with_cost
from study.arms import AGAIN_SEEDS, FRESH_SEEDS, Arm, Study
from study.config import Config
from study.probes import spikes
from study.report import words
from study.runs import CONTROL, FRESH, SEARCH, TIME, Found, Result, too_high
from study.timing import OWN_AGAIN

STEPS = 100
CLOSE = [1.440, 1.444, 1.437, 1.446, 1.441]


def run(arm, stage, rate, seed, *losses, initial=4.0, **more):
    """Evaluated every 50 steps; a loss of None is not finite."""
    evaluated = [[50 * (i + 1), loss] for i, loss in enumerate(losses)]
    over = "" if losses[-1] is not None else "step 50: loss not finite"
    return Result(arm, stage, rate, seed, **{"steps": STEPS, "evaluated": [[0, initial], *evaluated], "over": over} | more)


def report_of(runs, rates=(1e-3,), seeds=range(5), times=None, **keys):
    study = Study([Arm("a", Config()), Arm("b", Config())], list(rates), list(seeds), {})
    for name, value in keys.items():
        setattr(study.cfg.compare, name, value)
    study.cfg.train.steps = STEPS
    return analyse(study, Found(study.cfg.compare.diverged, runs, times or {})), study


def of_arms(rate=1e-3, **losses):
    """Runs at one rate; those of A/A are near those of `a`."""
    runs = [run(name, FRESH, rate, seed, 2.5, loss) for name, of in losses.items() for seed, loss in enumerate(of)]
    again = [loss + 0.001 for loss in losses["a"] if loss]
    return runs + [run("a", CONTROL, rate, AGAIN_SEEDS + i, 2.5, loss) for i, loss in enumerate(again)]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([loss + 0.02 for loss in CLOSE], "b: loss higher, 0.0195 ("),
        ([loss - 0.02 for loss in CLOSE], "b: loss lower, −0.0205 ("),
        ([loss + 0.001 for loss in reversed(CLOSE)], "b: no difference was found, 0.0005 ("),
        ([1.44], "b: too few runs that trained for an interval of the loss"),
        ([*CLOSE[:3], None, None], "b: fails in 2 of 5 runs at 0.001 (baseline 0 of 10; exact test, p = "),
        ([*CLOSE[:3], None, None], "of the runs that trained the loss differs by −0.0018 ("),
        ([2.3, *CLOSE[1:]], "b: fails in 1 of 5 runs"),  # nearly a nat above
        (
            [None] * 5,
            "b: fails in 5 of 5 runs at 0.001 (baseline 0 of 10; exact test, p < 0.001), which differs; every run failed",
        ),
    ],
)
def test_the_words_are_those_that_the_runs_allow_and_a_failed_run_is_never_no_difference(other, said):
    made, _ = report_of(of_arms(a=CLOSE, b=other), diverged=0.8)
    assert said in words(made)
    assert ("no difference was found" in words(made)) == (said.startswith("b: no"))
    assert made.arms[1].sample.losses == [loss for loss in other if loss and loss < 2], (
        "a run that failed has no part in a mean"
    )


def test_a_failing_baseline_is_told_and_so_is_that_no_run_of_the_arm_fails():
    made, _ = report_of(of_arms(a=[*CLOSE[:3], None, None, None], b=CLOSE))
    assert "the baseline is a, which fails in 3 of 9 runs at 0.001." in words(made)
    assert "b: no run of 5 fails (baseline 3 of 9; exact test, p = " in words(made)


def searched(curve=0.02, fresh=True):
    """Two arms at three rates, the middle one the best; fresh seeds there, and runs of a time when another was the best."""
    at = {1e-3: curve, 3e-3: 0.0, 1e-2: curve + 0.01}
    runs = [run(name, SEARCH, rate, 1, 1.44 + more) for name in "ab" for rate, more in at.items()]
    runs += [run(name, FRESH, 3e-3, FRESH_SEEDS + i, loss) for name in "ab" for i, loss in enumerate(CLOSE) if fresh]
    return [*runs, run("b", FRESH, 1e-3, FRESH_SEEDS, 1.0), run("a", CONTROL, 1e-3, AGAIN_SEEDS, 1.9)], list(at)


def test_seeds_that_chose_the_rate_are_not_compared_and_without_others_nothing_is_called_different():
    runs, rates = searched()
    runs.append(run("a", CONTROL, 3e-3, AGAIN_SEEDS, 1.442))
    made, _ = report_of(runs, rates, seeds=[1])
    assert [list(arm.sample.losses) for arm in made.arms] == [[*CLOSE, 1.442], CLOSE] and made.arms[1].rate == 3e-3
    assert made.fresh and made.arms[1].against.none
    runs = [
        replace(one, seed=seed, evaluated=[[0, 4.0], [50, one.last + (one.arm == "b") + seed / 1e3]])
        for one in searched(fresh=False)[0][:6]
        for seed in (1, 2)
    ]
    made, _ = report_of(runs, rates, seeds=[1, 2], fresh=0)
    assert made.arms[1].against.loss.low > 0.9 and not made.arms[1].against.verdict and not made.arms[1].against.none
    assert "nothing is called different: compare.fresh=8 adds others" in words(made)


def test_all_pairs_are_judged_together():
    runs = of_arms(a=CLOSE, b=[loss + 0.02 for loss in CLOSE])
    made, _ = report_of(runs, all_pairs=True, baseline="b")
    assert list(made.pairs) == [("a", "b")] and made.arms[0].against.verdict == "lower" and not report_of(runs)[0].pairs


def test_what_failed_does_not_depend_on_the_order_of_runs_and_rates_are_chosen_by_those_that_trained():
    runs = [
        run("a", SEARCH, 2e-3, 1, 2.6, 2.45),
        run("a", SEARCH, 1e-3, 2, 2.5, 1.44),
        run("a", SEARCH, 2e-3, 2, 1.5, 1.3),
        run("a", SEARCH, 2e-3, 3, 2.6, 2.5),
    ]
    for order in (runs, runs[::-1]):
        found = Found(1.0, list(order))
        assert [found.failed(one) for one in runs] == [True, False, False, True]
        assert found.best_rate("a") == 2e-3 and found.rates("a") == {1e-3: 1.44, 2e-3: 1.3}
    assert Found(1.0, [run("a", SEARCH, rate, 1, None) for rate in (2e-3, 1e-3)]).best_rate("a") == 1e-3


def test_a_run_fails_by_a_step_after_a_quarter_at_which_one_at_no_higher_rate_was_far_below():
    def at(step, loss, rate=2):
        return Result("a", SEARCH, rate, 1, STEPS, [[0, 4.0], [step, loss]])

    assert too_high(at(50, 3.1), [at(50, 2.0, rate=1)], 1.0) == "step 50: loss 3.100, another run's 2.000"
    assert not too_high(at(50, 2.9), [at(50, 2.0, rate=1)], 1.0)
    assert not too_high(at(50, 3.1), [at(50, 2.0, rate=3)], 1.0), "slow, not failed"
    assert not too_high(at(20, 3.9), [at(20, 2.0, rate=1)], 1.0), "before a quarter"
    assert not too_high(at(50, 3.1), [replace(at(50, 2.0, rate=1), steps=60)], 1.0), "of another schedule"


def test_sensitivity_counts_a_failed_run_with_the_loss_before_training_and_is_none_where_a_rate_is_missing():
    """arXiv:2309.14322"""
    losses = {1: 2.0, 2: 1.5, 3: 9.0, 4: None}
    runs = [run("a", SEARCH, rate, seed, loss) for seed in (1, 2) for rate, loss in losses.items()]
    runs += [run("b", SEARCH, rate, seed, None) for seed in (1, 2) for rate in losses]
    a, b = report_of(runs, losses, seeds=[1, 2])[0].arms
    assert a.sensitivity.median == pytest.approx((2.0 + 1.5 + 4.0 + 4.0) / 4 - 1.5) and b.sensitivity is None
    assert report_of(runs[1:], losses, seeds=[1, 2])[0].arms[0].sensitivity is None
    assert report_of([one for one in runs if one.seed == 1], losses, seeds=[1])[0].arms[0].sensitivity is None, "no zero width"


@pytest.mark.parametrize("beside", [-0.25, 0.0, 0.2, 0.28])
def test_what_the_best_rate_costs_beside_a_better_one_is_at_most_what_the_sample_says(beside):
    half, draw, held = 0.576, np.random.default_rng(0), 0
    rates = {round(3e-3 * math.exp(step * half), 6): step * half for step in (-1, 0, 1)}
    for _ in range(300):
        runs = [run("a", SEARCH, rate, 1, 1.5 + 0.04 * (x - beside) ** 2 + draw.normal(0, 0.003)) for rate, x in rates.items()]
        found = Found(1.0, runs)
        chosen = rates[found.best_rate("a")]
        if chosen:
            continue
        sample = found.sample([run("a", FRESH, 3e-3, i, 1.5 + draw.normal(0, 0.003)) for i in range(8)])
        held += with_cost(found, "a", sample).cost < 0.04 * beside**2
    assert held <= 0.1 * 300


def test_beyond_a_cliff_the_cost_is_no_more_than_the_rise_on_the_other_side_and_at_an_end_it_has_no_bound():
    found = Found(1.0, [run("a", SEARCH, rate, 1, loss) for rate, loss in ((1e-3, 1.51), (2e-3, 1.5), (4e-3, None))])
    sample = found.sample([run("a", FRESH, 2e-3, i, loss) for i, loss in enumerate(CLOSE)])
    assert 0.01 < with_cost(found, "a", sample).cost < 0.02
    found.results.pop()
    assert with_cost(found, "a", sample).cost == math.inf
    runs = [run(arm, SEARCH, rate, 1, 1.5 + 0.1 * (rate > 1e-3)) for arm in "ab" for rate in (1e-3, 3e-3)]
    runs += of_arms(a=CLOSE, b=[loss + 0.5 for loss in CLOSE])
    made, _ = report_of(runs, (1e-3, 3e-3), seeds=[1])
    assert made.arms[1].at_end == "lowest" and "(no bound)" in words(made) and not made.arms[1].against.verdict
    assert "at the end of those that were trained: a (lowest), b (lowest). Add rates." in words(made)


DRIFT = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]  # from cycle to cycle, the same for all that run in it


def timed(**typical):
    noise = {OWN_AGAIN: [1.0, 1.01] * 6}  # A/A reaches 1 %
    return {name: [ms * slow * more for slow, more in zip(np.repeat(DRIFT, 2), noise.get(name, [1] * 12), strict=True)]
            for name, ms in typical.items()}  # fmt: skip


@pytest.mark.parametrize(("slower", "differs"), [(1.003, False), (1.5, True)])
def test_a_step_takes_longer_only_beyond_a_a_and_equal_time_is_that_of_runs_with_their_own_schedule(slower, differs):
    times = {
        "a": timed(fused=2.0, torch=6.0, again=2.0),
        "b": timed(fused=2 * slower, torch=6.0, again=2 * slower) | {"baseline a": timed(own=2.0)["own"]},
    }
    runs = of_arms(a=CLOSE, b=[loss - 0.1 for loss in CLOSE])
    shorter = [run("b", TIME, 1e-3, seed, loss + 0.1, steps=67) for seed, loss in enumerate(CLOSE)]
    made, _ = report_of([*runs, *shorter], times=times)
    a, b = made.arms
    assert b.price.of_baseline.median == pytest.approx(slower) and b.slower == differs and not a.slower
    assert b.price.over_torch == paired_ratio([6 * slow for slow in DRIFT], [2 * slower * slow for slow in DRIFT])
    assert a.price.of_baseline == Interval(1.0, 1.0, 1.0) and b.steps == (67 if differs else STEPS)
    assert ("no difference in the time of a step was found" in words(made)) == (not differs)
    if differs:
        sample, against = b.equal_time
        assert sample.losses == [loss + 0.1 for loss in CLOSE] and against.verdict == "higher" and b.against.verdict == "lower"
        assert report_of(runs, times=times)[0].arms[1].equal_time is None, "the shorter runs are not there yet"


def test_a_report_is_json_and_its_pictures_have_each_difference_and_what_failed(tmp_path, monkeypatch):
    runs, rates = searched()
    made, study = report_of([*runs, run("b", SEARCH, 3e-2, 1, None), run("b", FRESH, 3e-3, 1009, None)], rates, seeds=[1])
    found, drawn = Found(1.0, runs), {}
    monkeypatch.setattr("measure.plots.save_figure", lambda figure, path: drawn.update({path.stem: figure.axes[0]}))
    report.write(made, study, found, {"gpu": None, "versions": {}, "git": None}, tmp_path)
    assert "NaN" not in (text := (tmp_path / "report.json").read_text()) and "Infinity" not in text
    assert json.loads(text)["report"]["arms"][1]["sample"]["failed"] == 1
    loss = made.arms[1].against.loss
    assert drawn["differences"].get_yticklabels()[0].get_text() == "b, 1 of 6 failed"
    assert [text.get_text() for text in drawn["differences"].texts] == [interval_text(loss)]
    assert loss.median in [line.get_xdata()[0] for line in drawn["differences"].lines if line.get_marker() == "o"]
    text = (tmp_path / "report.md").read_text().replace("\n", " ")
    assert "fails in 1 of 6 runs at 0.003, in 0 of 1 at 0.001" in text and "## All runs of the search" in text


def test_a_study_of_one_rate_has_no_table_of_a_search(tmp_path, monkeypatch):
    made, study = report_of(runs := of_arms(a=CLOSE, b=CLOSE))
    monkeypatch.setattr("measure.plots.save_figure", lambda figure, path: None)
    report.write(made, study, Found(1.0, runs), {"gpu": None, "versions": {}, "git": None}, tmp_path)
    assert "search" not in (tmp_path / "report.md").read_text()


def test_in_wandb_a_study_is_a_run_for_each_arm_rate_and_seed_and_a_summary(tmp_path):
    runs = of_arms(a=CLOSE, b=CLOSE)
    made, study = report_of(runs)
    (tmp_path / "rates.png").touch()
    *logged, summary = tracking.runs_of(study, made, Found(1.0, runs), tmp_path)
    for one, result in zip(logged, runs, strict=True):
        assert [one.config[key] for key in ("arm", "stage", "rate", "seed")] == list(vars(result).values())[:4]
        assert one.config["optim"]["lr"] == result.rate and one.summary["val/last"] == result.last
        assert [[step, values["val/loss"]] for step, values in one.lines] == result.evaluated
    assert [line[0] for line in summary.tables["arms"][1]] == ["a", "b"] and summary.pictures == [tmp_path / "rates.png"]


def test_spikes_are_counted_once():
    losses = np.linspace(3, 2, 200) + 0.001 * np.sin(np.arange(200))
    losses[100:103] += 1
    assert spikes(losses, 10) == 1 and spikes(np.linspace(3, 2, 200), 10) == 0
