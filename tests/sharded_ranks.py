"""Several runs one after the other on the same ranks, as starting ranks takes longer than the runs."""

import json
import multiprocessing
import os
import socket
from functools import partial
from pathlib import Path

import torch
import torch.distributed.fsdp  # takes seconds, so once for all ranks

import configs
import train
from configs import Config
from configs.machine import Machine
from configs.schema import TrainConfig
from model import GPT
from tests.runs import read_json
from training import distributed
from training.checkpoint import TrainState
from training.optimizer import adamw
from training.precision import Precision
from training.resume import settle
from training.run import open_run
from training.sharding import shard
from training.step import training_step

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.ranks", "tests.sharded_ranks"])


def train_one_after_the_other(ranks: int, jobs: dict[Path, list[str]]) -> list[dict]:
    """Runs of `ranks` processes: overrides by folder.

    Returns:
        What each rank saw, by the folder's name: the numbers of the model that it holds in the end, and how often its gradients
        were reduced; and `_overflow`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = next(iter(jobs)).parent / f"results_of_{ranks}"
    results.mkdir(parents=True)
    listed = [(str(folder), overrides) for folder, overrides in jobs.items()]
    started = [
        processes.Process(target=_rank, args=(rank, ranks, port, listed, str(results)), daemon=True) for rank in range(ranks)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(400)
        assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
    found = [read_json(results / f"{rank}.json") for rank in range(ranks)]
    for rank, counted in enumerate(found):
        assert "error" not in counted, f"rank {rank}: {counted['error']}"
    return found


def _rank(rank: int, ranks: int, port: int, jobs: list[tuple[str, list[str]]], results: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.compile = partial(torch.compile, backend="eager")  # what is traced, without minutes of a C++ compiler
    world, on, found = distributed.join(), Machine("cpu", ranks=ranks, by_torchrun=True), {}
    counted = _watch()
    for folder, overrides in jobs:
        try:
            cfg = configs.load(overrides, on=on)
            origin = world.first(partial(settle, cfg, Path(folder), [], chosen=True))
            with open_run(origin, torch.device("cpu"), world=world) as run:
                run.plot = lambda: None  # type: ignore[method-assign]
                train.train(cfg, run, on, world)
        except BaseException as error:
            found["error"] = f"{folder}: {type(error).__name__}: {error}"
            break
        parameters = [getattr(p, "_local_tensor", p) for p in counted["model"].parameters()]
        found[Path(folder).name] = {"held": sum(p.numel() for p in parameters), "reduced": counted["reduced"]}
    if "error" not in found and ranks == 2:
        found["overflow"] = _overflow(world)
    (Path(results) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    world.leave(0)


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
        if step == 1 and world.rank == world.size - 1:
            hook = model.register_forward_hook(lambda *call: call[-1] * float("inf"))
        training_step(model, state, (tokens, tokens), step, cfg, precision, world)
        if step == 1 and world.rank == world.size - 1:
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
