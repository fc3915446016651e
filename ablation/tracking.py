"""The ablation in W&B: one group, a run for each arm of each cell, and a run with the summary and the plots."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from statistics import fmean

import configs
from ablation.arms import switched
from ablation.records import Ablation, ArmTimes, Cell, Parity
from configs import Config, ConfigError
from configs.rules import NANOGPT
from configs.schema import WandbMode
from measure.statistics import spread
from measure.tables import label
from training.tracking import Tracker, agent_job, described, settle

PAIR_COLUMNS: list[str | int] = ["cell", "arm", "base", "speed-up", "low", "high", "ms", "ms low", "ms high"]
PARITY_COLUMNS: list[str | int] = ["configuration", "arm", "holds", "arm − torch, nats", "low", "high", "of seeds", "verdict"]


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

    def tracker(name: str, its: list[str], cfg: Config) -> Tracker:
        nonlocal logging
        named = f"{logging.name or group}/{name}"
        tags = list(dict.fromkeys([*(logging.tags or []), "ablation", *its]))
        run = Tracker(logging, folder, group=group, name=named, tags=tags, config=configs.to_dict(cfg))
        logging = replace(logging, wandb=run.mode)
        facts.extend([run.note] if run.note else [])
        return run

    for cell in found.cells:
        for arm, times in cell.arms.items():
            own = variants[tuple(cell.overrides.items())]
            own = copy.deepcopy(own) if arm == NANOGPT else switched(own, arm)
            own.train.compile = cell.mode == "compiled"
            name = "_".join([*cell.overrides.values(), cell.mode, arm.replace(" ", "-")])
            run = tracker(name, [arm, cell.mode, own.norm.impl.value, own.norm.kind.value], own)
            for step, ms in enumerate(chain(*times.blocks_ms)):
                run.log({"perf/step_ms": ms}, step)
            run.summarise(figures(cell, times))
            run.finish(0)
    summary = tracker("summary", ["summary"], cfg)
    verdicts = {"cells": [cell.verdict for cell in found.cells], "parity": [one.verdict for one in found.parity]}
    summary.summarise({f"verdicts/{what}": said for what, said in verdicts.items()})
    summary.summarise(dict(chain(*map(scalars, found.cells))))
    summary.log_table("tables/cells", ["cell", "verdict"], [[label(c.overrides, c.mode), c.verdict] for c in found.cells])
    summary.log_table("tables/pairs", PAIR_COLUMNS, [row for cell in found.cells for row in rows(cell)])
    if found.parity:
        summary.log_table("tables/parity", PARITY_COLUMNS, [parity_row(one) for one in found.parity])
    for picture in sorted(folder.glob("*.png")):
        summary.log_image(f"plots/{picture.stem}", picture, 0)
    summary.finish(0)
    return described(summary.mode, facts)


def scalars(cell: Cell) -> Iterator[tuple[str, float]]:
    """The speed-ups of a cell and the ends of their intervals, by name: for the columns of W&B's table of runs."""
    for base in cell.opponents:
        for name, value in vars(cell.against(base).speedup).items():
            yield f"speedup/{label(cell.overrides, cell.mode)}/over {base}/{name}", value


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
    return [label(one.overrides), one.arm, one.holds, *means, one.val_spread, one.verdict]


def rows(cell: Cell) -> list[list]:
    """A row for each pair of arms."""
    name = label(cell.overrides, cell.mode)
    return [
        [name, arm, base, *vars(pair.speedup).values(), *vars(pair.difference_ms).values()]
        for base, of in cell.pairs.items()
        for arm, pair in of.items()
    ]
