"""How often compare.py errs: studies that are drawn, whose truth is known, by the plan and the analysis of real ones.

python -m benchmarks.study_errors                  about half an hour on one CPU core
python -m benchmarks.study_errors --studies 20     to try it

The loss of an arm rises from its best rate as a parabola in log rate, and beyond CLIFF as a cliff. Drawn are the noise of a run
and whether it fails. A record is one kind of study: the share of studies in which a difference was called between arms
that have none (`errors`), and in which that of the last arm was found (`power`). `welch` is the share of errors of Welch's
t-test in the same studies, with the same correction by Holm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from scipy import stats

from benchmarks import command, report
from benchmarks.command import Record
from measure.differences import LEVEL, holm
from measure.progress import progress
from study.analysis import Report, analyse
from study.arms import Arm, Study
from study.config import Config
from study.plan import make_all
from study.runs import Found, Result

SPREAD = 0.006  # nats, of a run of an arm that trains well
SHIFT = 0.02  # nats, of the last arm in the studies that tell the power
# Of the arms beside the baseline in a study of seven arms on an H100, at the best rate of each.
RECORDED = (0.0032, 0.13, 0.0192, 0.0165, 0.0022, 0.0056)
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
    fails: float = 0.0  # chance of a run of any arm
    flat: bool = False  # all rates are equally good
    difference: float = 0.0  # of the last arm


EQUAL, ONE_NOISY = (SPREAD,) * 6, (6 * SPREAD, *(SPREAD,) * 5)
TWICE, THRICE = (2 * SPREAD,) * 5 + (SPREAD,), (3 * SPREAD,) * 5 + (SPREAD,)
KINDS = (
    *(Kind("equal spreads", (SPREAD,) * arms, seeds) for arms, seeds in product((1, 2, 6), (3, 4, 5, 8))),
    *(Kind("one arm six times as noisy", ONE_NOISY[: arms or 1], seeds) for arms, seeds in product((1, 6), (3, 5, 8))),
    *(Kind("all but the last twice as noisy", TWICE, seeds) for seeds in (3, 8)),
    *(Kind("all but the last three times as noisy", THRICE, seeds) for seeds in (3, 8)),
    *(Kind("recorded spreads", RECORDED, seeds) for seeds in (3, 5, 8)),
    *(Kind("recorded spreads, runs fail", RECORDED, seeds, fails=share) for share, seeds in product((0.1, 0.3), (3, 5, 8))),
    Kind("five rates, fresh seeds", EQUAL, 8, GRID),
    Kind("five rates, fresh seeds, recorded spreads", RECORDED, 8, GRID),
    *(Kind("five rates, fresh seeds, recorded spreads, runs fail", RECORDED, 8, GRID, fails=share) for share in (0.1, 0.3)),
    Kind("five rates, fresh seeds, runs fail", EQUAL, 8, GRID, fails=0.3),
    Kind("five equally good rates, fresh seeds", EQUAL, 8, GRID, flat=True),
)


def drawn(kind: Kind, draw: np.random.Generator) -> Report:
    arms = [Arm(f"arm {number}", Config()) for number in range(len(kind.spreads) + 1)]
    arms[0].cfg.train.steps, arms[0].cfg.compare.fresh = STEPS, kind.seeds
    one = len(kind.rates) == 1
    study, found = Study(arms, list(kind.rates), list(range(1, kind.seeds + 1 if one else 2)), {}), Found()
    spreads = dict(zip((arm.name for arm in arms), (SPREAD, *kind.spreads), strict=True))
    best = {arm.name: math.log(3e-3) + (0.0 if one else draw.uniform(-1, 1) * math.log(10) / 4) for arm in arms}

    def train(arm: Arm, stage: str, rates: Sequence[float], seeds: Sequence[int], until: int | None = None) -> None:
        shift = kind.difference if arm is arms[-1] else 0.0
        for seed, rate in product(seeds, rates):
            beside = 0.0 if kind.flat else math.log(rate) - best[arm.name]
            curve = CURVE * beside**2 + max(beside - CLIFF, 0.0)
            loss = BEST + shift + curve + draw.normal(0, spreads[arm.name])
            over = "drawn" if draw.random() < kind.fails else ""
            found.add(Result(arm.name, stage, rate, seed, STEPS, [[0, 4.0], [until or STEPS, loss]], over).__dict__)

    make_all(study, found, train)
    return analyse(study, found)


def record(kind: Kind, studies: int, draw: np.random.Generator) -> Record:
    errors = power = welch = shifted = 0
    for number in range(studies):
        report = drawn(kind, draw)
        base, *others = report.arms
        errors += any(arm.against and (arm.against.verdict or arm.against.fails) for arm in others)
        pairs = [(arm.sample.losses, base.sample.losses) for arm in others]
        p = [float(stats.ttest_ind(*pair, equal_var=False).pvalue) for pair in pairs if min(map(len, pair)) > 1]
        welch += min(holm(p), default=1.0) <= LEVEL
        if number % 4 == 0:  # power needs fewer studies
            last = drawn(replace(kind, difference=SHIFT), draw).arms[-1].against
            shifted, power = shifted + 1, power + bool(last and last.verdict == "higher")
    shares = {"errors": errors / studies, "power": power / shifted, "welch": welch / studies}
    facts = {"kind": kind.said, "arms": len(kind.spreads), "seeds": kind.seeds, "fails": kind.fails, "studies": studies}
    return facts | {name: round(share, 4) for name, share in shares.items()}


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
    print(report.text(results.finish()))


if __name__ == "__main__":
    main()
