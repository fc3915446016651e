"""The order of a study's runs: rates first, then fresh seeds at the best rate of each arm.

race         every given rate, with the seeds of the command, for the first compare.race_steps of its schedule. Two rates go on
search       these two to the end, and then rates around the best one, until on either side it has a neighbour within half a
             step of the given rates, or a quarter where that one fails; also beyond the given ones. A rate fails if no run
             trains there, with MORE other seeds too: by chance it would otherwise end the search beside a better rate
fresh        the arm at its best rate with compare.fresh seeds that had no part in the choice: these are compared
A/A          the baseline with as many seeds again
equal time   with compare.equal_time: an arm whose step takes longer than the fastest one's, with a schedule of the steps that
             it has time for, and the fresh seeds

A single rate is no choice: the seeds of the command are compared. What is in the file already is not made again, so a study may
be stopped, and may grow: by seeds, rates, arms and stages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from study.arms import MORE_SEEDS, Arm, Study
from study.runs import CONTROL, FRESH, RACE, SEARCH, TIME, Found

MOST_RATES = 8  # that the search adds to the given ones
MORE = 4  # seeds, for a rate at which every run failed


class Train(Protocol):
    """study.runs.Runs.train, or one that draws runs."""

    def __call__(
        self, arm: Arm, stage: str, rates: Sequence[float], seeds: Sequence[int], until: int | None = None
    ) -> None: ...


def make_all(study: Study, found: Found, train: Train, time: Callable[[Arm], None] = lambda arm: None) -> None:
    for arm in study.arms:
        search(study, arm, found, train)
        rate = found.best_rate(arm.name) if len(study.rates) > 1 else study.rates[0]
        train(arm, FRESH, [rate], study.compared)
        if arm.name == study.baseline.name:
            train(arm, CONTROL, [rate], study.again)
        time(arm)


def least_runs(study: Study) -> int:
    """The runs of `make_all` without the rates and seeds that the search adds by what it finds."""
    rates = len(study.rates)
    raced = rates if race_steps(study) else 0
    searched = 2 if raced else rates if rates > 1 else 0
    return len(study.arms) * ((raced + searched) * len(study.seeds) + len(study.compared)) + len(study.again)


def make_equal_time(study: Study, found: Found, train: Train, steps: Mapping[str, int]) -> None:
    """
    Args:
        steps: by arm, those that it makes while the fastest arm makes all; empty where nothing was timed.
    """
    for arm in study.arms:
        if arm.name in steps and steps[arm.name] < arm.cfg.train.steps:
            train(arm.of_length(steps[arm.name]), TIME, [found.best_rate(arm.name)], study.compared)


def search(study: Study, arm: Arm, found: Found, train: Train) -> None:
    """The stages race and search of an arm."""
    rates = study.rates
    if len(rates) == 1:
        return
    if until := race_steps(study):
        train(arm, RACE, rates, study.seeds, until)
        raced = found.rates(arm.name, RACE)
        rates = sorted(rates, key=raced.__getitem__)[:2]
    while rates:
        train(arm, SEARCH, rates, study.seeds)
        for number in range(MORE):
            failing = [rate for rate, loss in found.rates(arm.name).items() if math.isinf(loss)]
            train(arm, SEARCH, failing, [MORE_SEEDS + number])
        rates = beside(study.rates, found.rates(arm.name), found.best_rate(arm.name))


def race_steps(study: Study) -> int:
    """The steps of a run of the race; 0 if there is none."""
    steps = study.cfg.compare.race_steps
    return 0 if len(study.rates) < 3 else study.cfg.train.steps // 10 if steps is None else steps


def beside(given: Sequence[float], losses: Mapping[float, float], best: float) -> list[float]:
    """The rates around the best one that it lacks.

    Args:
        losses: by rate that was trained.
    """
    step, wanted = math.log(max(given) / min(given)) / (len(given) - 1), []
    if len(losses.keys() - set(given)) >= MOST_RATES:
        return []
    for sign in (-1, 1):
        distance, near = min(((far, r) for r in losses if (far := sign * math.log(r / best)) > 0), default=(math.inf, best))
        parts = 4 if math.isinf(losses[near]) and math.isfinite(losses[best]) else 2
        if distance > 1.1 * step / parts:
            wanted.append(float(f"{best * math.exp(sign * step / parts):.3g}"))
    return [rate for rate in wanted if rate not in losses]  # as given rates may be closer than what is written of one
