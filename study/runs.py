"""The runs of a study, each kept as a line as soon as it is over, and what may be read off them.

A run fails, and is stopped, if a training or validation loss is not finite, or if after a quarter of its steps its validation
loss is more than compare.diverged nats above the lowest that another run of its arm had at the same step, at this rate or a
lower one: a run that is slow at a low rate has not failed. A run that was not stopped is judged so by all runs of the study, so
what failed does not depend on their order.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from study.engine import Engine
from study.probes import probe, spikes
from training.storage import as_storage_errors

AGAIN = " (A/A)"  # ends the name of the baseline's runs with other seeds
RACE, SEARCH, FRESH, TIME = "race", "search", "fresh", "time"  # stages: study/plan.py says what each is for


@dataclass
class Result:
    """One run. Losses are in nats per token."""

    arm: str
    rate: float
    seed: int
    evaluated: list[list[Any]]  # step and validation loss; step 0 is before training. None: not finite, for JSON has no NaN
    over: str = ""  # why the run was stopped
    grad_norm: float | None = None  # median over the steps
    spikes: int = 0
    probes: list[dict[str, Any]] = field(default_factory=list)
    stage: str = SEARCH
    steps: int = 0  # of its schedule; 0: a line of an older version, with those of the study

    @property
    def last(self) -> float:
        return _number(self.evaluated[-1][1])

    @property
    def initial(self) -> float:
        return _number(self.evaluated[0][1])


def _number(loss: float | None) -> float:
    return math.nan if loss is None else loss


@dataclass
class Found:
    """What runs.jsonl has: results and, by arm and contender, the times of study/timing.py."""

    results: list[Result] = field(default_factory=list)
    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    diverged: float = 1.0  # nats, see the head of this file
    made: list[dict[str, str]] = field(default_factory=list)  # by which code, versions and card: each once

    def of(self, arm: str, *stages: str) -> list[Result]:
        """In the order of seeds; of all stages if none is named."""
        runs = [run for run in self.results if run.arm == arm and (not stages or run.stage in stages)]
        return sorted(runs, key=lambda run: run.seed)

    def at(self, arm: str, rate: float, stage: str = SEARCH) -> list[Result]:
        return [run for run in self.of(arm, stage) if run.rate == rate]

    def failed(self, run: Result) -> bool:
        own = run.arm.removesuffix(AGAIN)
        others = [other for name in (own, own + AGAIN) for other in self.of(name) if other.stage != TIME]
        return (
            bool(run.over) or not math.isfinite(run.last) or (run.stage != TIME and bool(too_high(run, others, self.diverged)))
        )

    def rates(self, arm: str) -> dict[float, float]:
        """By rate that was trained to the end, the lowest first: the mean last loss of the runs that did not fail; infinite if
        more than half failed."""
        found = {}
        for rate in sorted({run.rate for run in self.of(arm, SEARCH)}):
            runs = self.at(arm, rate)
            trained = [run.last for run in runs if not self.failed(run)]
            found[rate] = fmean(trained) if 2 * len(trained) >= len(runs) else math.inf
        return found

    def best_rate(self, arm: str) -> float:
        """That with the lowest mean loss; the lowest one where all fail.

        Raises:
            ValueError: the arm has no runs.
        """
        rates = self.rates(arm)
        return min(rates, key=rates.__getitem__)

    def judged(self, arm: str, rate: float) -> list[Result]:
        """The runs that are compared: with seeds that had no part in the choice of the rate, where there are some."""
        return self.at(arm, rate, FRESH) or self.at(arm, rate)

    def add(self, line: dict[str, Any]) -> None:
        made = line.pop("made", {})
        if made not in self.made:
            self.made.append(made)
        if "times" in line:
            self.times[line["arm"]] = line["times"]
        else:
            self.results.append(Result(**line))


def read(path: Path, diverged: float = 1.0) -> Found:
    """The lines of a study. A last line that was cut short is removed from the file."""
    found = Found(diverged=diverged)
    if path.is_file():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        os.truncate(path, len(whole))
        for line in whole.decode().splitlines():
            found.add(json.loads(line, parse_constant=lambda name: None))  # of an older version
    return found


def keep(path: Path, found: Found, line: dict[str, Any]) -> None:
    with as_storage_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    found.add(line)


def train(engine: Engine, name: str, stage: str, others: Sequence[Result], until: int | None = None) -> dict[str, Any]:
    """One run, from a state that `Engine.begin` made; to its end, or to step `until` of its schedule. Its line."""
    cfg, total = engine.cfg, engine.cfg.train.steps
    end, every = until or total, cfg.eval.every or total
    look = max(total // 4, 1) if cfg.compare.probe_every is None else cfg.compare.probe_every
    # Before training all windows tell the same, and the whole validation set takes as long as a hundred steps of a small model.
    result = Result(name, cfg.optim.lr, cfg.seed, [[0, engine.evaluate(most=1)]], stage=stage, steps=total)
    stops = sorted({*range(every, end, every), *(range(look, end, look) if look else ()), end})
    for stop in stops:
        engine.advance(stop - engine.step)
        losses = engine.losses[:stop].cpu()
        if look and (stop % look == 0 or stop == total):
            result.probes.append({"step": stop, **probe(engine)})
        if stop % every == 0 or stop == end:
            result.evaluated.append([stop, engine.evaluate()])
            result.over = over(result, losses, total, others, cfg.compare.diverged)
        if result.over:
            break
    result.grad_norm = engine.grad_norms[: engine.step].median().item()
    result.spikes = spikes(losses.numpy(), total // 20)
    return finite(asdict(result))


def finite(value: Any) -> Any:
    """Plain data with None for what is not finite, for which JSON has no number."""
    if isinstance(value, dict):
        return {key: finite(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [finite(of) for of in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def over(result: Result, losses: torch.Tensor, steps: int, others: Sequence[Result], threshold: float) -> str:
    """Why the run is over by the rule above, or nothing."""
    step = result.evaluated[-1][0]
    if not (math.isfinite(result.last) and bool(losses.isfinite().all())):
        return f"step {step}: loss not finite"
    return too_high(result, others, threshold) if step >= steps / 4 else ""


def too_high(run: Result, others: Sequence[Result], threshold: float) -> str:
    step = run.evaluated[-1][0]
    same = [_number(dict(map(tuple, other.evaluated)).get(step)) for other in others if other.rate <= run.rate]
    lowest = min((loss for loss in same if math.isfinite(loss)), default=math.inf)
    return f"step {step}: loss {run.last:.3f}, another run's {lowest:.3f}" if run.last > lowest + threshold else ""
