"""A study in W&B: one group, one run for each arm, rate and seed, and a run with the table and the pictures."""

from dataclasses import replace
from pathlib import Path

import configs
from study.analysis import Report
from study.arms import Study
from study.report import HEADER, row
from study.runs import AGAIN, read
from training.tracking import Tracker, described, settle


def log(study: Study, made: Report, folder: Path) -> str:
    """Logs all runs, and nothing where W&B is disabled. Returns the mode, and why."""
    logging, facts = settle(study.cfg.logging)
    group = logging.group or folder.name
    arms = {arm.name: arm for arm in study.arms} | {study.baseline.name + AGAIN: study.baseline}

    def tracker(name: str, config: dict) -> Tracker:
        nonlocal logging
        tags = [*(logging.tags or []), "study"]
        run = Tracker(logging, folder, group=group, name=f"{logging.name or group}/{name}", tags=tags, config=config)
        logging = replace(logging, wandb=run.mode)
        facts.extend([run.note] if run.note else [])
        return run

    for result in read(folder / "runs.jsonl").results:
        config = configs.to_dict(arms[result.arm].at(result.rate, result.seed))
        name = f"{result.arm} lr={result.rate:g} seed={result.seed}"
        run = tracker(name, config | {"arm": result.arm, "rate": result.rate})  # seed is a key of the config
        for step, loss in result.evaluated:
            run.log({"val/loss": loss}, step)
        run.summarise({"val/last": result.last, "val/best": result.best, "spikes": result.spikes, "over": result.over})
        run.finish(0)
    summary = tracker("summary", configs.to_dict(study.cfg))
    summary.log_table("tables/arms", list(HEADER), [list(row(arm)) for arm in made.arms])
    for picture in sorted(folder.glob("*.png")):
        summary.log_image(f"plots/{picture.stem}", picture, 0)
    summary.finish(0)
    return described(summary.mode, facts)
