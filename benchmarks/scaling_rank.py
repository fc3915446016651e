"""One rank of a turn of benchmarks/scaling.py, which starts it by torchrun: train.py's step, timed on random tokens."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import configs
from configs import Config, machine
from data import Batches
from measure.clock import StepClock
from measure.schedule import no_garbage_collection
from measure.sources import code
from training.build import build
from training.command import use_one_thread
from training.distributed import World, join
from training.inputs import Inputs
from training.precision import MixedPrecision
from training.step import TrainingStep


def step_times(cfg: Config, warm_up: int, world: World) -> dict[str, Any]:
    """Milliseconds of each step after the first `warm_up`, the peak GiB of any rank (None except on CUDA), and its code.

    A step is train.py's, without a CUDA graph. The times are this rank's: ranks wait for one
    another in every step, so they are the slowest's.
    """
    precision = MixedPrecision.of(cfg.train.precision, machine.inspect(cfg.device))
    assert cfg.model.vocab_size is not None
    model, state, forward = build(cfg, precision, cfg.model.vocab_size, world, draw_on=precision.device)
    batches = Batches(
        _tokens(cfg.model.vocab_size, cfg.model.context, cfg.train.batch_size // world.size, cfg.seed),
        context=cfg.model.context,
        batch_size=cfg.train.batch_size,
        seed=cfg.seed,
        rank=world.rank,
        ranks=world.size,
    )
    clock = StepClock(precision.device, warmup=warm_up)
    inputs = Inputs(batches, cfg, model.dropout_sites, precision.device)
    training_step = TrainingStep(forward, state, inputs, cfg, precision, world)
    with no_garbage_collection():
        times = [round(ms, 4) for ms in clock.times(training_step, range(cfg.train.steps))]
    peak = None if clock.peak_gb is None else world.max(round(clock.peak_gb * 2**30)) / 2**30
    return {"steps_ms": times, "peak_gb": peak, "code": code()}


def _tokens(vocab_size: int, context: int, batch_size: int, seed: int) -> np.ndarray:
    """Random tokens, the frequent ones as frequent as words are (Mandelbrot's law): the gradient of the embedding takes longer
    where rows repeat. They are the same for any number of ranks."""
    weights = 1 / (np.arange(vocab_size) + 2.7)
    count = 64 * batch_size * context + 1  # then they come again in another order
    return np.random.default_rng(seed).choice(vocab_size, size=count, p=weights / weights.sum())


def main(answer: str, warm_up: str, *keys: str) -> None:
    """answer: where the first rank writes what it found."""
    world = join()
    use_one_thread()
    found = step_times(configs.compose_only(keys, Config), int(warm_up), world)
    if world.leads:
        Path(answer).write_text(json.dumps(found))
    world.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
