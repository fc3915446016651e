"""The ablation in W&B: one group, a run for each arm of each cell, and a run with the summary and the plots."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import fmean

import configs
from ablation.arms import switched
from ablation.config import NANOGPT
from ablation.records import Ablation
from ablation.variants import IS_COMPILED, IS_GRAPH, Variant
from measure.statistics import spread
from training.tracking import Logged


def runs_of(found: Ablation, variants: Sequence[Variant], folder: Path) -> Iterator[Logged]:
    for cell in found.cells:
        cfg = next(variant.cfg for variant in variants if variant.overrides == cell.overrides)
        for arm, times in cell.arms.items():
            own = copy.deepcopy(cfg) if arm == NANOGPT else switched(cfg, arm)
            own.train.compile, own.train.graph = cell.mode in IS_COMPILED, cell.mode in IS_GRAPH
            name = "_".join([*cell.overrides.values(), cell.mode.replace(" ", "-"), arm.replace(" ", "-")])
            steps = list(chain(*times.blocks_ms))
            summary = {f"perf/step_ms_{name}": ms for name, ms in asdict(spread(steps)).items()}
            summary |= {"perf/tokens_per_s": 1000 * cell.tokens_per_step / fmean(steps)}
            summary |= {"perf/peak_gb": times.peak_gb, "perf/launches": times.launches}
            lines = ((step, {"perf/step_ms": ms}) for step, ms in enumerate(steps))
            tags = [arm, cell.mode, own.norm.impl.value, own.norm.kind.value]
            yield Logged(name, configs.to_dict(own), lines, summary, tags)
    values = {
        "verdicts/cells": [cell.verdict for cell in found.cells],
        "verdicts/parity": [one.verdict for one in found.parity],
        # one number each, for the columns of W&B's table of runs
        **{
            f"speedup/{cell.title}/over {base}/{name}": value
            for cell in found.cells
            for base in cell.opponents
            for name, value in vars(cell.against(base).speedup).items()
        },
    }
    yield Logged("summary", configs.to_dict(variants[0].cfg), (), values, pictures=sorted(folder.glob("*.png")))
