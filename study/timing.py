"""The time of an arm's step by the ablation's protocol: short blocks that alternate, paired, with an interval.

measure/schedule.py has the order of the blocks. An arm is timed beside itself once more (A/A: the difference that the protocol
measures where there is none), beside its own model with PyTorch's norms, and beside the baseline. A step is the captured one,
so the GPU does not wait for the host, and blocks can be shorter than those of ablate.py. Each block begins at the first step of
the same run; its first step is not counted.
"""

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

import torch

from configs.schema import NormImpl
from data import Corpus
from measure.clock import StepClock
from measure.comparison import TORCH
from measure.schedule import LEAD_IN, LEAST_STEPS, block_length, run_blocks
from measure.statistics import LEAST_SAMPLES
from study.arms import Arm
from study.config import Config
from study.engine import Engine
from training.precision import MixedPrecision

OWN_AGAIN = "again"  # the arm once more, for A/A
BLOCK_MS = 50.0


def cycles_of(cfg: Config, device: torch.device) -> int:
    """No timing on a CPU by default: no kernel of a norm runs there. None of runs with too few steps for a block."""
    cycles = cfg.compare.timing_cycles
    cycles = cycles if cycles is not None else LEAST_SAMPLES * (device.type == "cuda")
    return cycles if cfg.train.steps >= LEAD_IN + LEAST_STEPS else 0


def as_baseline(name: str) -> str:
    """The contender that this arm is beside the others."""
    return f"baseline {name}"


def contenders(arm: Arm, baseline: Arm) -> dict[str, Arm]:
    """What an arm is timed with, by name: itself after its norm.impl."""
    in_torch = arm.at(arm.cfg.optim.lr, arm.cfg.seed)
    in_torch.norm.impl = NormImpl.torch
    found = {str(arm.cfg.norm.impl): arm, OWN_AGAIN: arm, TORCH: replace(arm, cfg=in_torch)}
    return found if arm.name == baseline.name else found | {as_baseline(baseline.name): baseline}


def block_times(
    of_all: Mapping[str, Arm], engine: Engine, cycles: int, precision: MixedPrecision, corpus: Corpus
) -> dict[str, list[float]]:
    """By contender the median step of each block in ms, two blocks a cycle.

    Args:
        of_all: the contenders; the first one is the arm itself.
        engine: of the arm.
    """
    engines: dict[str, Engine] = {}
    for name, of in of_all.items():
        cfg = of.at(engine.cfg.optim.lr, engine.cfg.seed)
        engines[name] = Engine(cfg, precision, corpus) if engines else engine
        engines[name].begin(cfg)

    def steps_ms(name: str, steps: int) -> list[float]:
        engines[name].restart()
        return StepClock(precision.device, warmup=LEAD_IN).times(lambda _: engines[name].advance(1), range(LEAD_IN + steps))

    steps = block_length([steps_ms(name, LEAST_STEPS) for name in engines], BLOCK_MS)
    steps = min(steps, engine.cfg.train.steps - LEAD_IN)
    blocks = run_blocks(lambda name, cycle: steps_ms(name, steps), list(engines), cycles, engine.cfg.seed)
    return {name: [round(median(block), 4) for block in of] for name, of in blocks.items()}
