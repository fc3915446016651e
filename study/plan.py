"""The order of a study's runs: rates first, then fresh seeds at the best rate of each arm.

race     every given rate, with the seeds of the command, for the first compare.race_steps of its schedule. Two rates go on
search   these to the end, and rates around the best one until on either side it has a neighbour within half a step of the given
         rates; then the lowest point of the parabola through the three. The best of all is the arm's rate
fresh    the arm at its rate with compare.fresh seeds that had no part in the choice. The baseline has as many again: A/A
time     with compare.equal_time: a slower arm with a schedule of the steps that it has time for, with the fresh seeds

A single rate is no choice: its seeds are compared as they are. What is in the file already is not made again, so a study may be
stopped, and may grow: by seeds, rates, arms and stages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from data import Corpus
from measure.timing import free_memory
from study import fit
from study.analysis import noise_of, price, steps_at_equal_time
from study.arms import AGAIN_SEEDS, FRESH_SEEDS, Arm, Study
from study.engine import Engine
from study.runs import AGAIN, FRESH, RACE, SEARCH, TIME, Found, keep, read, train
from study.timing import block_times, cycles_of
from training.step import MixedPrecision

MOST_RATES = 8  # that the search adds to the given ones


def train_all(
    study: Study,
    precision: MixedPrecision,
    corpus: Corpus,
    path: Path,
    made: Mapping[str, str] | None = None,
    done: Callable[[], object] = lambda: None,
) -> Found:
    """Makes the runs that `path` lacks.

    Args:
        made: what each line says of code, versions and card.
        done: called after each run.
    """
    found = read(path, study.cfg.compare.diverged)

    def session(arm: Arm) -> Session:
        return Session(arm, found, precision, corpus, path, dict(made or {}), done)

    for arm in study.arms:
        runs_of(own := session(arm), study)
        own.time(study.baseline, cycles_of(study.cfg, precision.device))
    if study.cfg.compare.equal_time:
        prices = {arm.name: price(found, arm, study.baseline.name) for arm in study.arms}
        lengths = steps_at_equal_time(prices, study.cfg.train.steps, noise_of(prices))
        for arm in study.arms:
            if lengths.get(arm.name, study.cfg.train.steps) < study.cfg.train.steps:
                shorter = session(arm.of_length(lengths[arm.name]))
                shorter.make(TIME, judges(study, FRESH_SEEDS), [found.best_rate(arm.name)])
    return found


def judges(study: Study, first: int) -> list[int]:
    """The seeds that are compared. `first` is the first of those that had no part in the choice of a rate."""
    fresh = study.cfg.compare.fresh if len(study.rates) > 1 else 0
    if first == FRESH_SEEDS and len(study.rates) == 1:
        return study.seeds
    return [first + i for i in range(fresh or len(study.seeds) * (first == AGAIN_SEEDS))]


def runs_of(own: "Session", study: Study) -> None:
    """All runs of an arm but those of equal time."""
    search(own, study)
    rate = own.found.best_rate(own.arm.name)
    if len(study.rates) > 1:
        own.make(FRESH, judges(study, FRESH_SEEDS), [rate])
    if own.arm.name == study.baseline.name:
        own.make(SEARCH, judges(study, AGAIN_SEEDS), [rate], own.arm.name + AGAIN)


def search(own: "Session", study: Study) -> None:
    """The stages race and search of an arm."""
    found, name, compare = own.found, own.arm.name, study.cfg.compare
    rates, until = sorted(study.rates), study.cfg.train.steps // 10 if compare.race_steps is None else compare.race_steps
    if until and len(rates) > 2:
        own.make(RACE, study.seeds, rates, until=until)
        raced = {rate: [run.last for run in found.at(name, rate, RACE) if not found.failed(run)] for rate in rates}
        rates = best_of_race(raced)
    own.make(SEARCH, study.seeds, rates)
    while more := next_rates(study.rates, found.rates(name), found.best_rate(name)):
        own.make(SEARCH, study.seeds, more)


def best_of_race(losses: Mapping[float, Sequence[float]]) -> list[float]:
    """The two rates with the lowest mean over the runs that did not fail; one without such runs comes last."""
    return sorted(sorted(losses, key=lambda rate: fmean(losses[rate]) if losses[rate] else math.inf)[:2])


def next_rates(given: Sequence[float], trained: Mapping[float, float], best: float) -> list[float]:
    """What to train next, by the mean losses so far; nothing if the best rate has what the head of this file asks for."""
    if len(given) < 2 or len(trained.keys() - set(given)) >= MOST_RATES:
        return []
    half = (max(given) / min(given)) ** (0.5 / (len(given) - 1))
    wanted = []
    for factor in (1 / half, half):
        between = [rate for rate in trained if 1 < (rate / best if factor > 1 else best / rate) < 1.05 * half]
        wanted += [] if between else [float(f"{best * factor:.3g}")]
    if wanted:
        return wanted
    if (points := fit.beside(trained, best)) is None:
        return []
    turn, _ = fit.lowest(*points)
    known = min(abs(math.log(rate) - turn) for rate in trained) < math.log(half) / 5
    return [] if known else [float(f"{math.exp(turn):.3g}")]


@dataclass
class Session:
    """An arm with its engine, which is built when the first run needs it."""

    arm: Arm
    found: Found
    precision: MixedPrecision
    corpus: Corpus
    path: Path
    made: Mapping[str, str]
    done: Callable[[], object]
    engine: Engine | None = field(default=None, init=False)

    def ready(self) -> Engine:
        if self.engine is None:
            free_memory(self.precision.device)
            self.engine = Engine(self.arm.cfg, self.precision, self.corpus, self.arm.fill)
        return self.engine

    def make(self, stage: str, seeds: Sequence[int], rates: Sequence[float], name: str = "", until: int | None = None) -> None:
        """The runs of these that there are not yet."""
        name = name or self.arm.name
        had = {
            (run.seed, run.rate) for run in self.found.of(name, stage) if stage != TIME or run.steps == self.arm.cfg.train.steps
        }
        for seed in seeds:
            for rate in sorted(rates):
                if (seed, rate) not in had:
                    engine = self.ready()
                    engine.begin(self.arm.at(rate, seed))
                    others = [run for run in self.found.of(name) if (run.stage == TIME) == (stage == TIME)]
                    keep(self.path, self.found, train(engine, name, stage, others, until) | {"made": dict(self.made)})
                self.done()

    def time(self, baseline: Arm, cycles: int) -> None:
        if cycles and self.arm.name not in self.found.times:
            engine = self.ready()
            if engine.step == 0:
                engine.begin(self.arm.cfg)
            times = block_times(self.arm, baseline, engine, cycles, self.precision, self.corpus)
            keep(self.path, self.found, {"arm": self.arm.name, "times": times, "made": dict(self.made)})
