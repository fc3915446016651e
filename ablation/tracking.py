"""The ablation in W&B: one group, a run for each arm of each cell, and a run with the summary and the plots."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from statistics import fmean

import configs
from ablation.records import Ablation, ArmTimes, Cell, Parity
from configs import Config, ConfigError
from configs.schema import NormImpl, WandbMode
from measure.comparison import FUSED
from measure.statistics import spread
from measure.tables import label
from training.tracking import Tracker, agent_job, described, settle

# Of both intervals and their ends, in the order in which report.md has them.
CELL_COLUMNS: list[str | int] = [
    "cell",
    *("times as fast", "low", "high", "A/A times as fast", "A/A low", "A/A high"),
    *("ms over torch", "ms low", "ms high", "A/A ms over torch", "A/A ms low", "A/A ms high"),
    "verdict",
]


def log(found: Ablation, variants: Mapping[tuple, Config], folder: Path) -> str:
    """Logs the ablation, and nothing where W&B is disabled. After a start that fails, the other runs are kept offline.

    Args:
        variants: the configs by the items of their cells' overrides.

    Returns:
        The mode, and why.

    Raises:
        ConfigError: this is the job of a W&B agent.
    """
    cfg = next(iter(variants.values()))
    logging, facts = settle(cfg.logging)
    if agent_job() and logging.wandb is not WandbMode.disabled:
        raise ConfigError("an ablation is several runs, the job of a W&B agent is one. Sweep with ablate.py KEY=A,B instead.")
    group = logging.group or folder.name
    tags = logging.tags or []

    def tracker(name: str, its: list[str], cfg: Config) -> Tracker:
        nonlocal logging
        run = Tracker(
            logging,
            folder,
            group=group,
            name=f"{logging.name or group}/{name}",
            tags=list(dict.fromkeys([*tags, "ablation", *its])),
            config=configs.to_dict(cfg),
        )
        logging = replace(logging, wandb=run.mode)
        facts.extend([run.note] if run.note else [])
        return run

    for cell in found.cells:
        for arm, times in cell.arms.items():
            own = copy.deepcopy(variants[tuple(cell.overrides.items())])
            own.norm.impl = NormImpl.fused if arm == FUSED else NormImpl.torch
            own.train.compile = cell.mode == "compiled"
            run = tracker(
                "_".join([*cell.overrides.values(), cell.mode, arm.replace(" ", "-")]),
                [arm, cell.mode, own.norm.impl.value, own.norm.kind.value],
                own,
            )
            for step, ms in enumerate(ms for block in times.blocks_ms for ms in block):
                run.log({"perf/step_ms": ms}, step)
            run.summarise(figures(cell, times))
            run.finish(0)
    summary = tracker("summary", ["summary"], cfg)
    verdicts = {"cells": [cell.verdict for cell in found.cells], "parity": [one.verdict for one in found.parity]}
    summary.summarise({f"verdicts/{what}": said for what, said in verdicts.items()})
    summary.log_table("tables/cells", CELL_COLUMNS, [row(cell) for cell in found.cells])
    summary.summarise(dict(chain(*map(scalars, found.cells))))
    if found.parity:
        columns: list[str | int] = ["configuration", "holds", "fused − torch, nats", "low", "high", "of seeds", "verdict"]
        summary.log_table("tables/parity", columns, [parity_row(one) for one in found.parity])
    for picture in sorted(folder.glob("*.png")):
        summary.log_image(f"plots/{picture.stem}", picture, 0)
    summary.finish(0)
    return described(summary.mode, facts)


def scalars(cell: Cell) -> Iterator[tuple[str, float]]:
    """The speed-up of a cell and the ends of its interval, by name: for the columns of W&B's table of runs."""
    for name, value in vars(cell.fused.speedup).items():
        yield f"times_as_fast/{label(cell.overrides, cell.mode)}/{name}", value


def figures(cell: Cell, times: ArmTimes) -> dict[str, float | None]:
    """The figures of an arm in the report, under the names that train.py logs to W&B."""
    steps = list(chain(*times.blocks_ms))
    whole = spread(steps)
    return {
        **{f"perf/step_ms_{name}": ms for name, ms in asdict(whole).items()},
        **{f"perf/{part}_ms": getattr(times, f"{part}_ms") for part in ("forward", "backward", "optimizer")},
        "perf/tokens_per_s": 1000 * cell.tokens_per_step / fmean(steps),
        "perf/peak_gb": times.peak_gb,
        "perf/launches": times.launches,
    }


def parity_row(one: Parity) -> list:
    difference = one.val_difference
    means = [difference.median, difference.low, difference.high]
    return [label(one.overrides), one.holds, *means, one.val_spread, one.verdict]


def row(cell: Cell) -> list:
    intervals = (cell.fused.speedup, cell.control.speedup, cell.fused.difference_ms, cell.control.difference_ms)
    return [label(cell.overrides, cell.mode), *(x for one in intervals for x in (one.median, one.low, one.high)), cell.verdict]
