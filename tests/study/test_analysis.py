"""What a study says of drawn losses whose truth is known."""

import math

import numpy as np
import pytest
import torch

from configs import Config
from measure.statistics import Interval
from study.analysis import analyse, best_rate, saved, sensitivity, steps_to
from study.arms import FOLDER, Arm, Study, study_of
from study.probes import spikes
from study.runs import AGAIN, Found, Result, over, read

RATES = [1e-3, 3e-3]


def drawn(seeds, handicap, noise, draw):
    """Losses of two arms: of a seed in common, of the run, and the second arm's handicap."""
    found = Found()
    common = draw.normal(0, noise, 2 * seeds)
    plan = [("a", RATES, range(seeds), 0.0), ("b", RATES, range(seeds), handicap)]
    for name, rates, its, more in [*plan, ("a" + AGAIN, [RATES[0]], range(seeds, 2 * seeds), 0.0)]:
        for rate in rates:
            for seed in its:
                last = 1.6 + more + 0.05 * (rate > 2e-3) + common[seed] + draw.normal(0, noise)
                found.results.append(Result(name, rate, seed, [(0, 4.0), (50, last + 0.3), (100, last)]))
    return found, Study([Arm("a", Config()), Arm("b", Config())], RATES, list(range(seeds)), {})


def test_equal_arms_are_called_different_in_at_most_2_of_20_studies():
    draw = np.random.default_rng(0)
    called = [analyse(study, found).arms[1].different for found, study in (drawn(3, 0.0, 0.006, draw) for _ in range(20))]
    assert sum(called) <= 2


def test_a_handicap_of_2_hundredths_is_found_with_5_seeds():
    draw = np.random.default_rng(0)
    arms = [analyse(study, found).arms[1] for found, study in (drawn(5, 0.02, 0.003, draw) for _ in range(20))]
    assert sum(arm.different and arm.difference.median > 0.01 for arm in arms) >= 18


def test_sensitivity_is_that_of_the_paper():
    found = Found([Result("a", rate, 1, [(0, 4.0), (9, loss)]) for rate, loss in [(1, 2.0), (2, 1.5), (3, 9.0), (4, math.nan)]])
    assert sensitivity(found, "a", 1) == pytest.approx((2.0 + 1.5 + 4.0 + 4.0) / 4 - 1.5)
    assert best_rate(found, "a") == 2


def test_steps_saved_are_those_to_the_loss_that_both_reach():
    base = Result("a", 1, 1, [(0, 4.0), (100, 2.0)])
    faster = Result("b", 1, 1, [(0, 4.0), (50, 2.0), (100, 1.5)])
    assert steps_to(faster, 2.0) == 50 and saved(faster, base) == pytest.approx(2.0)
    assert saved(base, faster) == pytest.approx(0.5)


def test_a_run_is_over_if_it_is_not_finite_or_far_above_its_arms_others():
    others = [Result("a", 1, 1, [(0, 4.0), (50, 2.0)])]
    fine, losses = Result("a", 2, 1, [(0, 4.0), (50, 2.9)]), torch.ones(50)
    assert not over(fine, losses, 100, others, 1.0)
    assert (
        over(Result("a", 2, 1, [(0, 4.0), (50, 3.1)]), losses, 100, others, 1.0) == "step 50: loss 3.100, another run's 2.000"
    )
    assert "not finite" in over(fine, losses / 0 * 0, 100, [], 1.0)
    assert not over(Result("a", 2, 1, [(0, 4.0), (20, 3.9)]), losses, 100, [Result("a", 1, 1, [(0, 4.0), (20, 2.0)])], 1.0)


def test_spikes_are_counted_once():
    losses = np.linspace(3, 2, 200) + 0.001 * np.sin(np.arange(200))
    losses[100:103] += 1
    assert spikes(losses, 10) == 1 and spikes(np.linspace(3, 2, 200), 10) == 0


def test_a_line_that_was_cut_short_is_made_again(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"arm": "a", "times": {"torch": [1.0]}}\n{"arm": "a", "ra')
    assert read(path).times == {"a": {"torch": [1.0]}} and path.read_text().count("\n") == 1 == len(
        path.read_text().splitlines()
    )


def test_an_arm_is_what_is_swept_but_for_rate_and_seed():
    study = study_of(["norm.kind=layernorm,rmsnorm", "model.qk_norm=false,true", "optim.lr=1e-3,3e-3", "seed=range(1,4)"])
    assert len(study.arms) == 4 and study.rates == RATES and study.seeds == [1, 2, 3]
    assert study.arms[-1].cfg.model.qk_norm and study.arms[-1].at(3e-3, 2).optim.lr == 3e-3


def test_intervals_of_one_seed_call_nothing_different():
    from study.analysis import is_different

    assert not is_different(Interval(0.1, 0.1, 0.1), Interval(0.0, 0.0, 0.0))


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_every_named_study_can_run(name):
    study = study_of([f"study={name}", "train.steps=10000"])
    assert len(study.arms) > 1 and len(study.seeds) > 2 and study.words.keys() == {"claim", "source", "limits"}
    assert all(arm.cfg.train.steps == 10000 for arm in study.arms)
