"""All runs of a study, one after the other, each kept as a line as soon as it is over.

A run is stopped, and counts as diverged, if a training or validation loss is not finite, or if after a quarter of its steps
its validation loss is more than compare.diverged nats above the lowest that an earlier run of its arm had at the same step, at
this rate or a lower one: a run that is slow at a low rate has not diverged. The order of runs is fixed (arm, seed, rate from
low to high), so a study that was killed goes on with the same decisions.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import product
from statistics import fmean
from typing import Any

import torch

from data import Corpus
from measure.store import Store
from measure.timing import free_memory
from study.arms import Arm, Study
from study.engine import Engine
from study.probes import probe, spikes
from study.timing import block_times, cycles_of
from training.precision import MixedPrecision

AGAIN = " (A/A)"  # ends the name of the baseline's runs with other seeds


@dataclass
class Result:
    """One run. Losses are in nats per token."""

    arm: str
    rate: float
    seed: int
    evaluated: list[list[Any]]  # step and validation loss; step 0 is before training
    over: str = ""  # why the run was stopped
    grad_norm: float = math.nan  # median over the steps
    spikes: int = 0
    probes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def last(self) -> float:
        return self.evaluated[-1][1]

    @property
    def best(self) -> float:
        return min(loss for _, loss in self.evaluated)

    @property
    def initial(self) -> float:
        return self.evaluated[0][1]

    @property
    def counted(self) -> float:
        """The last loss, also that of a run that was stopped; at most the loss before training, which stands for NaN too."""
        return min(self.initial, self.last)  # of a number and NaN the first


@dataclass
class Found:
    """What runs.jsonl has: results and, by arm and contender, the times of study/timing.py."""

    results: list[Result] = field(default_factory=list)
    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def of(self, arm: str) -> list[Result]:
        return [result for result in self.results if result.arm == arm]

    def at(self, arm: str, rate: float) -> list[Result]:
        """In the order of seeds."""
        return sorted((run for run in self.of(arm) if run.rate == rate), key=lambda run: run.seed)

    def best_rate(self, arm: str) -> float:
        """The rate with the lowest mean of last losses over seeds."""
        rates = dict.fromkeys(run.rate for run in self.of(arm))
        return min(rates, key=lambda rate: fmean(run.counted for run in self.at(arm, rate)))

    def add(self, line: dict[str, Any]) -> None:
        if "times" in line:
            self.times[line["arm"]] = line["times"]
        else:
            self.results.append(Result(**line))


def train_all(
    study: Study, precision: MixedPrecision, corpus: Corpus, store: Store, done: Callable[[], object] = lambda: None
) -> Found:
    """Makes the runs that `store` lacks.

    The A/A runs are the baseline's at its best rate, with as many other seeds.

    Args:
        done: called after each run.
    """
    found, cycles = Found(), cycles_of(study.cfg, precision.device)
    for line in store.lines:
        found.add(line)

    def keep(line: dict[str, Any]) -> None:
        store.add(line)
        found.add(line)

    def runs_of(arm: Arm, name: str, rates: list[float], seeds: list[int], cycles: int) -> None:
        had = {(result.seed, result.rate) for result in found.of(name)}
        for _ in had:
            done()
        left = [pair for pair in product(seeds, sorted(rates)) if pair not in had]
        untimed = cycles > 0 and name not in found.times
        if not left and not untimed:
            return
        free_memory(precision.device)
        engine = Engine(arm.at(rates[0], seeds[0]), precision, corpus, arm.fill)
        for seed, rate in left:
            engine.begin(arm.at(rate, seed))
            keep(asdict(_run(engine, name, found.of(name))))
            done()
        if untimed:
            times = block_times(arm, study.baseline, engine, cycles, precision, corpus)
            keep({"arm": name, "times": times})

    for arm in study.arms:
        runs_of(arm, arm.name, study.rates, study.seeds, cycles)
    others = [max(study.seeds) + 1 + i for i in range(len(study.seeds))]
    runs_of(study.baseline, study.baseline.name + AGAIN, [found.best_rate(study.baseline.name)], others, cycles=0)
    return found


def _run(engine: Engine, name: str, others: list[Result]) -> Result:
    """One run to its end, from a state that `begin` made."""
    cfg, total = engine.cfg, engine.cfg.train.steps
    every = cfg.eval.every or total
    look = max(total // 4, 1) if cfg.compare.probe_every is None else cfg.compare.probe_every
    # Before training all windows tell the same, and the whole validation set takes as long as a hundred steps of a small model.
    result = Result(name, cfg.optim.lr, cfg.seed, [[0, engine.evaluate(most=1)]])
    stops = sorted({*range(every, total, every), *(range(look, total, look) if look else ()), total})
    for stop in stops:
        engine.advance(stop - engine.step)
        losses = engine.losses[:stop].cpu()
        if look and (stop % look == 0 or stop == total):
            result.probes.append({"step": stop, **probe(engine)})
        if stop % every == 0 or stop == total:
            result.evaluated.append([stop, engine.evaluate()])
            result.over = over(result, losses, total, others, cfg.compare.diverged)
        if result.over:
            break
    result.grad_norm = engine.grad_norms[: engine.step].median().item()
    result.spikes = spikes(losses.numpy(), total // 20)
    return result


def over(result: Result, losses: torch.Tensor, steps: int, others: list[Result], threshold: float) -> str:
    """Why the run is over by the rule above, or nothing."""
    step, loss = result.evaluated[-1]
    if not (math.isfinite(loss) and bool(losses.isfinite().all())):
        return f"step {step}: loss not finite"
    same = [dict(other.evaluated).get(step, math.inf) for other in others if other.rate <= result.rate]
    lowest = min(same, default=math.inf)
    if step >= steps / 4 and loss > lowest + threshold:
        return f"step {step}: loss {loss:.3f}, another run's {lowest:.3f}"
    return ""
