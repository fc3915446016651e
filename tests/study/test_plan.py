"""The order of a study's runs, with drawn losses in place of training."""

import math

import numpy as np
import pytest

from benchmarks.study_errors import Drawn
from configs import Config
from study.arms import Arm, Study
from study.fit import cost
from study.plan import best_of_race, next_rates, runs_of
from study.runs import AGAIN, FRESH, RACE, SEARCH, Found, Result


@pytest.mark.parametrize("best", [3e-3, 2.2e-3, 5e-3, 3e-4, 1e-4, 5e-2])
def test_the_search_ends_near_the_best_rate_wherever_that_is(best):
    given, trained = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2], {}
    more = [1e-3, 3e-3]
    while more:
        trained |= {rate: 1.5 + 0.05 * (math.log(rate) - math.log(best)) ** 2 for rate in more}
        more = next_rates(given, trained, min(trained, key=trained.get))
    found = min(trained, key=trained.get)
    assert abs(math.log(found / best)) < 0.15 and len(trained) <= 2 + 8
    assert min(trained) < found < max(trained), "it has neighbours on both sides"


@pytest.mark.parametrize(("curve", "noise"), [(0.05, 0.002), (0.05, 0.006), (0.01, 0.006)])
def test_what_the_rate_costs_that_a_search_ends_with_is_what_the_fit_says(curve, noise):
    draw, paid, told = np.random.default_rng(0), [], []
    for _ in range(200):
        best, trained, more = math.log(3e-3) + draw.uniform(-0.6, 0.6), {}, [1e-3, 3e-3]
        while more:
            trained |= {rate: curve * (math.log(rate) - best) ** 2 + draw.normal(0, noise) for rate in more}
            more = next_rates([3e-4, 1e-3, 3e-3, 1e-2], trained, min(trained, key=trained.get))
        found = min(trained, key=trained.get)
        paid.append(curve * (math.log(found) - best) ** 2)
        told.append(cost(trained, dict.fromkeys(trained, noise), found, chosen_by_same=False))
    root = [np.sqrt(np.mean(np.square(of))) for of in (paid, told)]
    assert root[0] / 2 < root[1] < root[0] + 2 * noise


def test_the_two_best_of_a_race_go_on_and_one_that_failed_does_not():
    assert best_of_race({1: [3.0, 2.0], 2: [2.0, 2.1], 3: [2.2, 2.1], 4: []}) == [2, 3]


def test_every_stage_has_its_runs_and_seeds_that_chose_the_rate_are_not_fresh():
    study = Study([Arm("a", Config()), Arm("b", Config())], [1e-3, 3e-3, 1e-2], [1, 2], {})
    study.cfg.train.steps, study.cfg.compare.fresh = 1000, 4
    found = Found()
    for arm in study.arms:
        drawn = Drawn(arm, found, None, None, None, {}, lambda: None, best=math.log(2.5e-3), draw=np.random.default_rng(0))
        runs_of(drawn, study)
    for name in "ab":
        race, search, fresh = (found.of(name, stage) for stage in (RACE, SEARCH, FRESH))
        assert len(race) == 6 and all(run.evaluated[-1][0] == 100 for run in race)
        assert {run.seed for run in search} == {1, 2} and all(run.evaluated[-1][0] == 1000 for run in search)
        assert {run.rate for run in fresh} == {found.best_rate(name)} and {run.seed for run in fresh} == {
            10_000 + i for i in range(4)
        }
    assert [len(found.of(name + AGAIN)) for name in "ab"] == [4, 0]


def test_one_rate_is_no_choice(tmp_path):
    study, found = Study([Arm("a", Config())], [1e-3], [1, 2, 3], {}), Found()
    runs_of(Drawn(study.arms[0], found, None, None, None, {}, lambda: None), study)
    assert [len(found.of(name)) for name in ("a", "a" + AGAIN)] == [3, 3] and not found.of("a", FRESH)
    assert isinstance(found.results[0], Result)
