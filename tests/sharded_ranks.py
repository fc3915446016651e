"""Several runs one after the other on the same ranks, as starting ranks takes longer than the runs."""

from functools import partial
from pathlib import Path

import torch

import configs
from configs import Config
from configs.machine import Machine
from configs.schema import TrainConfig
from model import GPT
from tests.ranks import go_on_together, on_ranks
from training import distributed
from training.checkpoint import TrainState
from training.distributed import shard
from training.precision import Precision
from training.step import adamw, training_step


def train_one_after_the_other(ranks: int, jobs: dict[Path, list[str]]) -> list[dict]:
    """Runs of `ranks` processes: overrides by folder.

    Returns:
        What each rank saw, by the folder's name: the numbers of the model that it holds in the end, and how often its gradients
        were reduced; and of two ranks what `_overflow` returns.
    """
    return on_ranks(ranks, _train_all, next(iter(jobs)).parent / f"results_of_{ranks}", jobs)


def _train_all(world: distributed.World, on: Machine, jobs: dict[Path, list[str]]) -> dict:
    torch.compile = partial(torch.compile, backend="eager")  # what is traced, without minutes of a C++ compiler
    found, counted = {}, _watch()
    for folder, overrides in jobs.items():
        go_on_together(configs.load(overrides, on=on), folder, on, world)
        parameters = [getattr(p, "_local_tensor", p) for p in counted["model"].parameters()]
        found[folder.name] = {"held": sum(p.numel() for p in parameters), "reduced": counted["reduced"]}
    return found | ({"overflow": _overflow(world)} if world.size == 2 else {})


def _overflow(world: distributed.World) -> list[tuple[float, bool]]:
    """(loss scale, whether a weight moved) after each of three steps in fp16; the gradient of the last rank overflows in the
    second."""
    cfg = Config(train=TrainConfig(batch_size=2 * world.size))
    model, precision = GPT(cfg.model, cfg.norm, 64), Precision(torch.device("cpu"), torch.float16)
    shard(model, precision, world.size, compiled=False)
    state = TrainState(model, adamw(model, cfg.optim), torch.amp.GradScaler("cpu", init_scale=1024.0), tokenizer="")
    tokens, seen = torch.zeros(2, 8, dtype=torch.int64), []
    for step in range(3):
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        factor = float("inf") if step == 1 and world.rank == world.size - 1 else 1.0
        hook = model.register_forward_hook(lambda *call, factor=factor: call[-1] * factor)
        training_step(model, state, (tokens, tokens), step, cfg, precision, world)
        hook.remove()
        moved = any(not torch.equal(old, new.to_local()) for old, new in zip(before, model.parameters(), strict=True))
        seen.append((state.scaler.get_scale(), moved))
    return seen


def _watch() -> dict:
    """The model of the last run and how often its gradients were scattered."""
    collectives = torch.distributed
    name = (
        "reduce_scatter_single" if hasattr(collectives, "reduce_scatter_single") else "reduce_scatter_tensor"
    )  # by PyTorch's age
    counted, build, scatter = {"reduced": 0}, GPT.__init__, getattr(collectives, name)

    def built(model, *arguments):
        build(model, *arguments)
        counted.update(model=model, reduced=0)

    def scattered(*arguments, **options):
        counted["reduced"] += 1
        return scatter(*arguments, **options)

    GPT.__init__ = built  # type: ignore[method-assign]
    setattr(collectives, name, scattered)
    return counted
