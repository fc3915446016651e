"""What torchrun starts for benchmarks.scaling: each rank waits for turns, and in a turn trains a fresh model for some steps."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import configs
from ablation.turns import collection_paused
from benchmarks.timing import describe, free_memory
from benchmarks.tokens import token_stream
from configs import Config, machine
from configs.schema import Parallel
from data import Batches
from model import GPT
from training.checkpoint import TrainState
from training.clock import StepClock
from training.distributed import ALONE, World, join, shard
from training.precision import Precision
from training.step import adamw, compile_model, prepare, training_step

# Keys of the store in which ranks and the program that started them meet. An empty turn is the end.
JOINED, FAILED, TURN, ANSWER = "joined", "failed", "turn {}", "answer {}"
HOST = "127.0.0.1"


def measure(cfg: Config, steps: int, world: World) -> dict[str, Any]:
    """Milliseconds of each of the last `steps` of the steps, and the most GiB that one held on any rank (None but on CUDA).

    A step is train.py's, from the copy of the batch to the cleared gradients. The times are this rank's: ranks wait for one
    another in every step, so they are the slowest's.

    Args:
        cfg: train.steps are made. parallel is ddp, fsdp, or auto, which here is a model that nothing is wrapped around.
        world: ALONE for such a model.
    """
    on = machine.inspect(cfg.device)
    precision = Precision.settle(cfg.train.precision, on)
    assert cfg.model.vocab_size is not None
    if cfg.train.compile:
        torch.compiler.reset()  # the models of earlier turns count towards the limit of recompilations; a loss alone does not
    torch.manual_seed(cfg.seed)
    with precision.device:  # weights drawn there, in no time; train.py draws them on the CPU
        model = GPT(cfg.model, cfg.norm, cfg.model.vocab_size)
    prepare(model, cfg.train, on)
    sharded = cfg.parallel is Parallel.fsdp
    if sharded:
        shard(model, precision, world.size, compiled=cfg.train.compile)
    state = TrainState(model, adamw(model, cfg.optim), precision.scaler(), tokenizer="")
    forward: Callable[..., Tensor] = model
    if cfg.train.compile and not sharded:
        forward = compile_model(model, cfg.train)
    forward = world.replicate(forward)

    batches = Batches(
        tokens_of(cfg, world.size),
        context=cfg.model.context,
        batch_size=cfg.train.batch_size,
        seed=cfg.seed,
        rank=world.rank,
        ranks=world.size,
    )
    clock = StepClock(precision.device, warmup=cfg.train.steps - steps)
    drawn = [batches[step] for step in range(cfg.train.steps)]
    with collection_paused():
        for step, batch in enumerate(drawn):
            with clock.step():
                training_step(forward, state, batch, step, cfg, precision, world)
    times = [round(ms, 4) for ms in clock.steps_ms]
    peak = None if clock.peak_gb is None else world.max(round(clock.peak_gb * 2**30)) / 2**30
    return {"steps_ms": times, "peak_gb": peak}


def tokens_of(cfg: Config, ranks: int) -> np.ndarray:
    """As many tokens whatever the number of ranks: drawing them takes time, and what is in them does not matter."""
    assert cfg.model.vocab_size is not None
    return _tokens(cfg.model.vocab_size, cfg.model.context, cfg.train.batch_size // ranks, cfg.seed)


@cache
def _tokens(vocab_size: int, context: int, batch_size: int, seed: int) -> np.ndarray:
    cfg = Config(seed=seed)
    cfg.model.vocab_size, cfg.model.context, cfg.train.batch_size = vocab_size, context, batch_size
    return token_stream(cfg)


@cache
def _composed(overrides: tuple[str, ...]) -> Config:
    return configs.compose_only(overrides)  # the program that started this one has checked it


def take_turns(store: dist.Store) -> World:
    """Answers one turn after the other until an empty one."""
    world = join()
    if world.leads:
        store.set(JOINED, "")
    number = 0
    while asked := store.get(TURN.format(number)):  # waits for it, without work
        turn = json.loads(asked)
        cfg = _composed(tuple(turn["overrides"]))
        answer = measure(cfg, turn["steps"], ALONE if cfg.parallel is Parallel.auto else world)
        free_memory(torch.device(machine.inspect(cfg.device).device))
        if world.leads:
            store.set(ANSWER.format(number), json.dumps(answer))
        number += 1
    return world


def main(argv: Sequence[str] | None = None) -> None:
    (port,) = sys.argv[1:] if argv is None else argv
    store = dist.TCPStore(HOST, int(port), is_master=False, timeout=timedelta(days=1))
    try:
        world = take_turns(store)
    except Exception as error:
        # the first to fail; the others then fail because they wait for it
        store.compare_set(FAILED, "", f"rank {os.environ['RANK']}: {describe(error)}")
        raise
    world.leave(0)


if __name__ == "__main__":
    main()
