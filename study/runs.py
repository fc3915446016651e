"""The runs of a study, each kept as a line as soon as it is over, and what may be read off them.

A run fails, and is stopped, if a training or validation loss is not finite, or if from a quarter of its steps on its validation
loss is more than compare.diverged nats above the lowest that another run of its arm had at the same step, at this rate or a
lower one: a run that is slow at a low rate has not failed. A run that was not stopped is judged so by all runs of its arm, so
what failed does not depend on their order.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from data import Corpus
from measure.differences import Sample
from measure.store import Store
from measure.timing import free_memory
from study.arms import Arm, Study
from study.engine import Engine
from study.probes import probe, spikes
from study.timing import block_times, contenders, cycles_of
from training.precision import MixedPrecision

# Stages: study/plan.py says what each is for.
RACE, SEARCH, FRESH, CONTROL, TIME = "race", "search", "fresh", "A/A", "equal time"


@dataclass
class Result:
    """One run. Losses are in nats per token; None is one that is not finite, since JSON has no number for it."""

    arm: str
    stage: str
    rate: float
    seed: int
    steps: int  # of its schedule
    evaluated: list[list[Any]]  # step and validation loss; step 0 is before training
    over: str = ""  # why the run was stopped
    grad_norm: float | None = None  # median over the steps
    spikes: int = 0
    probes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def last(self) -> float:
        """Infinite if it is not finite."""
        return number(self.evaluated[-1][1])

    @property
    def initial(self) -> float:
        return number(self.evaluated[0][1])


def number(loss: float | None) -> float:
    return math.inf if loss is None else loss


@dataclass
class Found:
    """What runs.jsonl has: results and, by arm and contender, the times of study/timing.py."""

    diverged: float = 1.0  # nats, see the head of this file
    results: list[Result] = field(default_factory=list)
    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def of(self, arm: str, *stages: str, rate: float | None = None) -> list[Result]:
        """The runs of an arm in the order of seeds; of all stages and rates where none is named."""
        runs = [run for run in self.results if run.arm == arm and (not stages or run.stage in stages)]
        return sorted((run for run in runs if rate in (None, run.rate)), key=lambda run: (run.seed, run.rate))

    def failed(self, run: Result) -> bool:
        return bool(run.over or too_high(run, self.of(run.arm), self.diverged))

    def losses(self, runs: Sequence[Result]) -> list[float]:
        """The last losses, infinite of runs that failed."""
        return [math.inf if self.failed(run) else run.last for run in runs]

    def sample(self, runs: Sequence[Result]) -> Sample:
        losses = self.losses(runs)
        trained = [loss for loss in losses if math.isfinite(loss)]
        return Sample(trained, len(losses) - len(trained))

    def rates(self, arm: str, stage: str = SEARCH) -> dict[float, float]:
        """By rate, the lowest first: the median last loss of the runs that trained; infinite if none did."""
        tried = sorted({run.rate for run in self.of(arm, stage)})
        samples = {rate: self.sample(self.of(arm, stage, rate=rate)).losses for rate in tried}
        return {rate: median(losses) if losses else math.inf for rate, losses in samples.items()}

    def best_rate(self, arm: str) -> float:
        """The rate with the lowest median loss in the search; where all are infinite, the lowest rate. Without a search: its
        only one.

        How many of its runs failed does not count, as few seeds do not tell it: of drawn studies in which 30 % of all runs fail
        by chance, a rule that prefers rates at which most train finds false differences in 11 and 16 %, and this one in 4 and
        2 % (benchmarks/study_errors.py, five rates). The seeds that are compared show how often the best rate fails.
        """
        rates = self.rates(arm) or self.rates(arm, FRESH)
        return min(rates, key=rates.__getitem__)

    def add(self, line: Mapping[str, Any]) -> None:
        if "times" in line:
            self.times[line["arm"]] = line["times"]
        elif "evaluated" in line:
            self.results.append(Result(**line))


class Runs:
    """Makes the runs that are not there yet, and keeps them.

    Args:
        done: called after each run.

    Raises:
        ValueError: the store has runs of an arm of this name with other keys.
    """

    def __init__(
        self, study: Study, precision: MixedPrecision, corpus: Corpus, store: Store, done: Callable[[], object] = lambda: None
    ) -> None:
        self.study, self.precision, self.corpus, self.store = study, precision, corpus, store
        self.done = done
        self.found = Found(study.cfg.compare.diverged)
        for line in store.lines:
            self.found.add(line)
        there = {line["arm"] for line in store.lines}
        for arm in study.arms:
            if arm.name in there:  # else its keys may still change
                store.agree(study.facts(arm), arm.name)
        self._arm: tuple[str, int] | None = None

    def engine(self, arm: Arm) -> Engine:
        """Built, and captured, when the first run of the arm needs it."""
        wanted = (arm.name, arm.cfg.train.steps)
        if self._arm != wanted:
            self._engine: Engine | None = None
            free_memory(self.precision.device)
            self._arm, self._engine = wanted, Engine(arm.cfg, self.precision, self.corpus)
        assert self._engine is not None
        return self._engine

    def keep(self, arm: Arm, line: dict[str, Any]) -> None:
        self.store.agree(self.study.facts(arm), arm.name)
        self.store.add(line)
        self.found.add(line)

    def train(self, arm: Arm, stage: str, rates: Sequence[float], seeds: Sequence[int], until: int | None = None) -> None:
        """Those of these runs that there are not; to their end, or to step `until` of their schedule."""
        steps = arm.cfg.train.steps
        had = {(run.seed, run.rate) for run in self.found.of(arm.name, stage) if run.steps == steps}
        for seed in seeds:
            for rate in sorted(rates):
                if (seed, rate) not in had:
                    engine = self.engine(arm)
                    engine.begin(arm.at(rate, seed))
                    self.keep(arm, asdict(train(engine, arm.name, stage, self.found, until or steps)))
                self.done()

    def time(self, arm: Arm) -> None:
        cycles = cycles_of(self.study.cfg, self.precision.device)
        wanted = contenders(arm, self.study.baseline)
        if cycles and wanted.keys() - self.found.times.get(arm.name, {}).keys():  # another baseline is timed anew
            engine = self.engine(arm)
            engine.begin(arm.cfg)
            times = block_times(wanted, engine, cycles, self.precision, self.corpus)
            self.keep(arm, {"arm": arm.name, "times": times})


def train(engine: Engine, name: str, stage: str, found: Found, end: int) -> Result:
    """One run, from a state that `Engine.begin` made."""
    cfg, total = engine.cfg, engine.cfg.train.steps
    every = cfg.eval.every or total
    look = max(total // 4, 1)  # steps between probes
    # Before training all windows tell the same, and the whole validation set takes as long as a hundred steps of a small model.
    result = Result(name, stage, cfg.optim.lr, cfg.seed, total, [[0, engine.evaluation(most=1).loss]])
    stops = sorted({*range(every, end, every), *range(look, end, look), end})
    for stop in stops:
        engine.advance(stop - engine.step)
        losses = engine.losses[:stop].cpu()
        if stop % look == 0 or stop == total:
            result.probes.append({"step": stop, **probe(engine)})
        if stop % every == 0 or stop == end:
            loss = engine.evaluation().loss
            result.evaluated.append([stop, loss if math.isfinite(loss) else None])
            finite = math.isfinite(loss) and bool(losses.isfinite().all())
            too_far = too_high(result, found.of(name), cfg.compare.diverged)
            result.over = too_far if finite else f"step {stop}: loss not finite"
        if result.over:
            break
    grad_norm = engine.grad_norms[: engine.step].median().item()
    result.grad_norm = grad_norm if math.isfinite(grad_norm) else None
    result.spikes = spikes(losses.numpy(), total // 20)
    return result


def too_high(run: Result, others: Sequence[Result], threshold: float) -> str:
    """Why the run has failed by the rule at the head of this file, or nothing."""
    lower = [dict(map(tuple, other.evaluated)) for other in others if other.rate <= run.rate and other.steps == run.steps]
    for step, loss in run.evaluated[1:]:
        lowest = min((number(of[step]) for of in lower if step in of), default=math.inf)
        if step >= run.steps / 4 and number(loss) > lowest + threshold:
            return f"step {step}: loss {number(loss):.3f}, another run's {lowest:.3f}"
    return ""
