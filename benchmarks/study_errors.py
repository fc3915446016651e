"""How often compare.py errs: studies that are drawn, whose truth is known, by the plan and the analysis of real ones.

python -m benchmarks.study_errors                  about ten minutes on one CPU core
python -m benchmarks.study_errors --studies 20     to try it

The loss of an arm rises from its best rate as a parabola in log rate, and beyond CLIFF as a cliff. Drawn are the noise of a run
and whether it fails. A record is one kind of study: the share of studies in which a difference was called between arms
that have none (`errors`), in which that of the last arm was found (`power`), in which the interval of the last arm holds the
truth (`covers`), and how many times "no difference" was said of an arm with a failed run (`silent`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.command import Record
from configs import Config
from measure.progress import progress
from measure.tables import compact_markdown
from study.analysis import analyse
from study.arms import Arm, Study
from study.plan import Session, runs_of
from study.runs import Found, Result

SPREAD = 0.006  # nats, of a run of an arm that trains well
NOISY = 6.0  # times as much
# Of the arms of benchmarks/results/nvidia-h100/study/overview beside the baseline, at the best rate of each.
RECORDED = (0.0032, 0.0056, 0.0192, 0.0165, 0.0022, 0.13)
STEPS, BEST = 1000, 1.5
CURVE, CLIFF = 0.04, 0.8  # nats at one in log rate beside the best; log rate beyond it
GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


@dataclass(frozen=True)
class Kind:
    """A kind of study."""

    said: str
    spreads: Sequence[float]  # of the arms beside the baseline
    seeds: int  # that are compared
    rates: Sequence[float] = GRID[2:3]
    search: int = 0  # seeds that choose the rate; 0: those that are compared
    fails: float = 0.0  # chance of a run of any arm
    flat: bool = False  # all rates are equally good
    difference: float = 0.0  # of the last arm


EQUAL, ONE_NOISY = (SPREAD,) * 6, (NOISY * SPREAD, *(SPREAD,) * 5)
KINDS = (
    *(Kind("one rate, equal spreads", EQUAL, seeds) for seeds in (3, 5, 8)),
    *(Kind("one rate, one arm six times as noisy", ONE_NOISY, seeds) for seeds in (3, 8)),
    *(Kind("one rate, recorded spreads", RECORDED, seeds) for seeds in (3, 8)),
    *(Kind("one rate, recorded spreads, runs fail", RECORDED, 5, fails=share) for share in (0.1, 0.3)),
    *(Kind("one rate, one arm beside the baseline, equal spreads", EQUAL[:1], seeds) for seeds in (3, 8)),
    *(Kind("one rate, one arm beside the baseline, six times as noisy", ONE_NOISY[:1], seeds) for seeds in (3, 8)),
    Kind("five rates, fresh seeds", RECORDED, 8, GRID, 1),
    Kind("five rates, fresh seeds, runs fail", RECORDED, 8, GRID, 2, fails=0.1),
    Kind("five equally good rates, fresh seeds", EQUAL, 8, GRID, 1, flat=True),
    Kind("five equally good rates, chosen by the seeds that are compared", EQUAL, 3, GRID, flat=True),
)
SHIFT = 0.02  # nats, of the last arm in the studies that tell the power


@dataclass
class Drawn(Session):
    """An arm whose runs are drawn. Its loss at its best rate is BEST + `shift`."""

    shift: float = 0.0
    spread: float = SPREAD
    fails: float = 0.0
    best: float | None = None  # log rate; None: all are equally good
    draw: np.random.Generator = field(default_factory=np.random.default_rng)

    def make(self, stage: str, seeds: Sequence[int], rates: Sequence[float], name: str = "", until: int | None = None) -> None:
        for seed in seeds:
            for rate in rates:
                beside = 0.0 if self.best is None else math.log(rate) - self.best
                loss = BEST + self.shift + CURVE * beside**2 + max(beside - CLIFF, 0.0) + self.draw.normal(0, self.spread)
                over = "step 500: drawn" if self.draw.random() < self.fails else ""
                evaluated = [[0, 4.0], [until or STEPS, 4.0 if over else loss]]
                self.found.results.append(Result(name or self.arm.name, rate, seed, evaluated, over, stage=stage, steps=STEPS))


def drawn(kind: Kind, draw: np.random.Generator) -> tuple[Any, float]:
    """The report of a study, and the true difference of its last arm."""
    arms = [Arm(f"arm {number}", Config()) for number in range(len(kind.spreads) + 1)]
    arms[0].cfg.train.steps, arms[0].cfg.compare.fresh = STEPS, kind.seeds if kind.search else 0
    study, found = Study(arms, list(kind.rates), list(range(1, (kind.search or kind.seeds) + 1)), {}), Found()
    for arm, spread in zip(arms, (SPREAD, *kind.spreads), strict=True):
        best = None if kind.flat or len(kind.rates) == 1 else math.log(3e-3) + draw.uniform(-1, 1) * math.log(10) / 4
        shift = kind.difference if arm is arms[-1] else 0.0
        own: Any = {"shift": shift, "spread": spread, "fails": kind.fails, "best": best, "draw": draw}
        nothing: Any = None
        runs_of(Drawn(arm, found, nothing, nothing, nothing, {}, lambda: None, **own), study)
    return analyse(study, found), kind.difference


def record(kind: Kind, studies: int, draw: np.random.Generator) -> Record:
    errors = power = covers = intervals = silent = 0
    for _ in range(studies):
        report, _ = drawn(kind, draw)
        others = [arm for arm in report.arms if arm.against is not None]
        errors += any(of.lower or of.higher or of.fails for arm in others if (of := arm.against))
        silent += sum(bool(arm.sample.failed and arm.against and arm.against.none) for arm in others)
        power_report, truth = drawn(replace(kind, difference=SHIFT), draw)
        last = power_report.arms[-1].against
        assert last is not None
        power += last.higher
        if last.loss is not None:
            intervals, covers = intervals + 1, covers + last.loss.holds(truth)
    shares = {"errors": errors / studies, "power": power / studies, "covers": covers / max(intervals, 1), "silent": silent}
    facts = {"kind": kind.said, "arms": len(kind.spreads), "seeds": kind.seeds, "fails": kind.fails, "studies": studies}
    return facts | {name: round(share, 4) for name, share in shares.items()}


def markdown(file: dict[str, Any]) -> str:
    rows = [
        [
            of["kind"] + (f": {100 * of['fails']:.0f} %" if of["fails"] else ""), str(of["arms"]), str(of["seeds"]),
            f"{100 * of['errors']:.1f} %", f"{100 * of['power']:.0f} %", f"{100 * of['covers']:.0f} %", str(of["silent"]),
        ]
        for of in file["records"]
    ]  # fmt: skip
    header = [
        "studies of",
        "arms",
        "seeds",
        "a false difference",
        f"{SHIFT:g} found",
        "interval covers",
        "failures passed over",
    ]
    return compact_markdown(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser("study_errors", __doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument("--studies", type=command.positive, default=1000, help="of each kind (%(default)s)")
    options = command.parse(parser, argv)
    results, draw = command.open_results(options, published=True), np.random.default_rng(0)
    with progress(len(KINDS), "study_errors", "kind") as bar:
        for kind in KINDS:
            results.add([record(kind, options.studies, draw)])
            bar.update()
    print(markdown({"records": results.finish()}))


if __name__ == "__main__":
    main()
