"""A study in W&B: one group, one run for each arm, rate and seed, and a run with the table and the pictures."""

from pathlib import Path

import configs
from study.analysis import Report
from study.arms import Study
from study.report import table
from study.runs import Found
from training.tracking import Group


def log(study: Study, made: Report, found: Found, folder: Path) -> str:
    """Logs all runs, and nothing where W&B is disabled. Returns the mode, and why."""
    group = Group(study.cfg.logging, folder, "study")
    arms = {arm.name: arm for arm in study.arms}
    for result in found.results:
        if (arm := arms.get(result.arm)) is None:  # of an earlier command in this folder
            continue
        config = configs.to_dict(arm.at(result.rate, result.seed))  # seed is a key of it
        name = f"{result.arm} {result.stage} lr={result.rate:g} seed={result.seed}"
        run = group.start(name, config | {"arm": result.arm, "rate": result.rate, "stage": result.stage})
        for step, loss in result.evaluated:
            if loss is not None:
                run.log({"val/loss": loss}, step)
        run.summarise({"val/last": result.evaluated[-1][1], "spikes": result.spikes, "over": result.over})
        run.finish(0)
    return group.sum_up(configs.to_dict(study.cfg), {}, {"arms": table(made)})
