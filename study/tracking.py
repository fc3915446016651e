"""A study in W&B: one group, one run for each arm, rate and seed, and a run with the table and the pictures."""

from collections.abc import Iterator
from pathlib import Path

import configs
from study.analysis import Report
from study.arms import Study
from study.report import table
from study.runs import Found
from training.tracking import Logged


def runs_of(study: Study, made: Report, found: Found, folder: Path) -> Iterator[Logged]:
    arms = {arm.name: arm for arm in study.arms}
    for result in found.results:
        if (arm := arms.get(result.arm)) is None:  # of an earlier command in this folder
            continue
        config = configs.to_dict(arm.at(result.rate, result.seed))  # seed is a key of it
        config |= {"arm": result.arm, "rate": result.rate, "stage": result.stage}
        name = f"{result.arm} {result.stage} lr={result.rate:g} seed={result.seed}"
        lines = ((step, {"val/loss": loss}) for step, loss in result.evaluated if loss is not None)
        yield Logged(name, config, lines, {"val/last": result.evaluated[-1][1], "spikes": result.spikes, "over": result.over})
    yield Logged(
        "summary", configs.to_dict(study.cfg), (), {}, tables={"arms": table(made)}, pictures=sorted(folder.glob("*.png"))
    )
