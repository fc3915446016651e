"""The order of a study's runs, with drawn losses in place of training."""

import math

import pytest

from study.arms import AGAIN_SEEDS, FRESH_SEEDS, MORE_SEEDS, Arm, Study
from study.config import Config
from study.plan import MORE, MOST_RATES, beside, least_runs, make_all, make_equal_time
from study.runs import CONTROL, FRESH, RACE, SEARCH, TIME, Found, Result

GIVEN = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]


def drawn(rates, seeds, best=2.5e-3, arms="ab", fails=lambda rate, seed: False, **keys):
    """A study of these arms after its plan; the loss of a run depends on its rate alone."""
    study, found = Study([Arm(name, Config()) for name in arms], rates, seeds, {}), Found()
    for arm in study.arms:
        arm.cfg.train.steps = 1000
    for name, value in keys.items():
        setattr(study.cfg.compare, name, value)

    def train(arm, stage, rates, seeds, until=None):
        for seed in seeds:
            for rate in rates:
                loss = 1.5 + 0.05 * math.log(rate / best) ** 2
                steps = arm.cfg.train.steps
                over = "step 500: loss not finite" if fails(rate, seed) else ""
                run = Result(arm.name, stage, rate, seed, steps, [[0, 4.0], [until or steps, loss]], over)
                if not any((one.arm, one.stage, one.rate, one.seed) == (arm.name, stage, rate, seed) for one in found.results):
                    found.add(vars(run))

    make_all(study, found, train)
    return study, found, train


@pytest.mark.parametrize(("rates", "keys"), [(GIVEN, {}), (GIVEN, {"race_steps": 0}), (GIVEN[:2], {"fresh": 3}), ([1e-3], {})])
def test_what_is_said_before_a_study_starts_is_the_runs_that_it_makes_but_for_added_rates(rates, keys):
    study, found, _ = drawn(rates, [1, 2], **keys)
    assert least_runs(study) == len([run for run in found.results if run.rate in rates or run.stage in (FRESH, CONTROL)])


@pytest.mark.parametrize("best", [3e-3, 2.2e-3, 5e-3, 3e-4, 1e-4, 5e-2])
def test_the_search_ends_near_the_best_rate_wherever_that_is_with_neighbours_on_both_sides(best):
    _, found, _ = drawn(GIVEN, [1], best, arms="a")
    rates, half = list(found.rates("a")), (3e-2 / 3e-4) ** (1 / 8)
    chosen = found.best_rate("a")
    at = rates.index(chosen)
    assert abs(math.log(chosen / best)) <= 0.55 * math.log(half) and len(rates) <= 2 + MOST_RATES
    assert rates[at] / rates[at - 1] < half**1.1 and rates[at + 1] / rates[at] < half**1.1


def test_a_search_that_finds_no_end_stops():
    trained = dict.fromkeys([*GIVEN, *(1e-4 / 2**i for i in range(MOST_RATES))], 2.0)
    assert beside(GIVEN, trained | {1e-6: 1.0}, 1e-6) == []


def test_beside_a_rate_that_fails_another_one_is_nearer():
    losses = {1e-3: 1.6, 1.78e-3: 1.52, 3e-3: 1.5, 1e-2: math.inf}
    assert beside(GIVEN, losses, 3e-3) == [pytest.approx(3e-3 * 10**0.125, rel=0.01)]
    assert beside(GIVEN, losses | {4e-3: math.inf}, 3e-3) == []


def test_a_run_that_fails_by_chance_does_not_end_the_search_and_a_rate_fails_where_no_seed_trains():
    """Beyond 5e-3 all runs fail, and below it those of the command's seed."""
    _, found, _ = drawn(GIVEN, [1], best=3e-3, arms="a", fails=lambda rate, seed: rate > 5e-3 or (seed == 1 and rate > 1.5e-3))
    chosen = found.best_rate("a")
    assert abs(math.log(chosen / 3e-3)) < 0.16
    seeds = {rate: [run.seed for run in found.of("a", SEARCH, rate=rate)] for rate in found.rates("a")}
    assert seeds[chosen] == [1, MORE_SEEDS]
    failed = [rate for rate, loss in found.rates("a").items() if math.isinf(loss)]
    assert failed and all(seeds[rate] == [1, *(MORE_SEEDS + i for i in range(MORE))] for rate in failed)


def test_every_stage_has_its_runs_and_seeds_that_chose_the_rate_are_not_fresh():
    _, found, _ = drawn(GIVEN, [1, 2], fresh=4)
    for name in "ab":
        race, search, fresh = (found.of(name, stage) for stage in (RACE, SEARCH, FRESH))
        assert len(race) == 2 * 5 and all(run.evaluated[-1][0] == 100 for run in race)
        assert {run.seed for run in search} == {1, 2} and all(run.evaluated[-1][0] == 1000 for run in search)
        assert 3e-4 not in found.rates(name) and {run.rate for run in fresh} == {found.best_rate(name)}
        assert [run.seed for run in fresh] == [FRESH_SEEDS + i for i in range(4)]
    assert [run.seed for run in found.of("a", CONTROL)] == [AGAIN_SEEDS + i for i in range(4)] and not found.of("b", CONTROL)
    _, found, _ = drawn([1e-3], [1, 2, 3])
    assert [len(found.of("a", stage)) for stage in (RACE, SEARCH, FRESH, CONTROL)] == [0, 0, 3, 3], "one rate is no choice"
    _, found, _ = drawn(GIVEN, [1], race_steps=0)
    assert set(GIVEN) < set(found.rates("a")) and not found.of("a", RACE), "all rates run to the end"


def test_a_slower_arm_is_trained_again_with_the_steps_that_it_has_time_for_on_the_seeds_that_are_compared():
    study, found, train = drawn(GIVEN, [1], fresh=4)
    make_equal_time(study, found, train, {"a": 1000, "b": 460})
    runs = found.of("b", TIME)
    assert not found.of("a", TIME) and {(run.rate, run.steps) for run in runs} == {(found.best_rate("b"), 460)}
    assert [run.seed for run in runs] == study.compared
