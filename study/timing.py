"""The time of an arm's step by the ablation's protocol: short blocks that alternate, paired, with an interval.

measure/schedule.py has the order of the blocks. An arm is timed beside itself once more (A/A: the difference that the protocol
measures where there is none), beside its own model with PyTorch's norms, and beside the baseline. A step is the captured one,
so the GPU does not wait for the host, and blocks can be shorter than those of ablate.py. Each block begins at the first step of
the same run; its first step is not counted.
"""

import copy
from statistics import median

import torch

from configs import Config
from configs.schema import NormImpl
from data import Corpus
from measure.clock import StepClock
from measure.comparison import TORCH
from measure.schedule import LEAD_IN, LEAST_STEPS, block_length, run_blocks
from measure.statistics import LEAST_SAMPLES
from study.arms import Arm
from study.engine import Engine
from training.precision import MixedPrecision

BASELINE, OWN_AGAIN = "baseline", "again"  # contenders; the others are named after their norm.impl
BLOCK_MS = 50.0


def cycles_of(cfg: Config, device: torch.device) -> int:
    """No timing on a CPU by default: no kernel of a norm runs there. None of runs with too few steps for a block."""
    cycles = cfg.compare.timing_cycles
    cycles = cycles if cycles is not None else LEAST_SAMPLES * (device.type == "cuda")
    return cycles if cfg.train.steps >= LEAD_IN + LEAST_STEPS else 0


def block_times(
    arm: Arm, baseline: Arm, engine: Engine, cycles: int, precision: MixedPrecision, corpus: Corpus
) -> dict[str, list[float]]:
    """By contender the median step of each block in ms, two blocks a cycle.

    Args:
        engine: of the arm.
    """
    torch_cfg = copy.deepcopy(engine.cfg)
    torch_cfg.norm.impl = NormImpl.torch
    plan = {str(arm.cfg.norm.impl): (engine.cfg, arm), OWN_AGAIN: (engine.cfg, arm), TORCH: (torch_cfg, arm)}
    if arm.name != baseline.name:
        plan[BASELINE] = (baseline.at(engine.cfg.optim.lr, engine.cfg.seed), baseline)
    engines: dict[str, Engine] = {}
    for name, (cfg, of) in plan.items():
        engines[name] = Engine(cfg, precision, corpus, of.fill) if engines else engine
        engines[name].begin(cfg)

    def steps_ms(name: str, steps: int) -> list[float]:
        engine, clock = engines[name], StepClock(precision.device, warmup=LEAD_IN)
        engine.restart()
        for _ in range(LEAD_IN + steps):
            with clock.step():
                engine.advance(1)
        return clock.steps_ms

    steps = block_length([steps_ms(name, LEAST_STEPS) for name in engines], BLOCK_MS)
    steps = min(steps, engine.cfg.train.steps - LEAD_IN)
    blocks = run_blocks(lambda name, cycle: steps_ms(name, steps), list(engines), cycles, engine.cfg.seed)
    return {name: [round(median(block), 4) for block in of] for name, of in blocks.items()}
