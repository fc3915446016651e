"""Runs of several ranks on the CPU, each a forked process."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing import start_processes

import tests.forks  # noqa: F401  # what is imported before a fork
from configs.machine import Machine
from tests.runs import no_space, train_here
from training import checkpoint, distributed
from training.evaluation import Evaluation
from training.inputs import Inputs
from training.step import TrainingStep


def train_together(ranks: int, overrides: list[str], folder: Path, **acts: list[int]) -> list[dict]:
    """What each rank tells of a run in `folder`: its exit code or error, the steps it did, and the seeds and rows it was given.

    `acts` are [rank, step], counted from 1: in that step `nan` makes the loss of that rank NaN, `full` its disk full; `look`
    sends it SIGTERM in its evaluation of that number."""
    return on_ranks(ranks, _train, overrides, folder, acts)


def on_ranks(ranks: int, act: Callable[..., dict], *arguments: object) -> list[dict]:
    """What `act(world, on, *arguments)` returns on each rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's, on a free port
    start_processes(_rank, (ranks, store.port, act, arguments), ranks, daemon=True, start_method="forkserver")
    told = dist.PrefixStore("attempt 0", store)  # as of World.store
    return [json.loads(told.get(f"told {rank}")) for rank in range(ranks)]


def _rank(rank: int, ranks: int, port: int, act: Callable[..., dict], arguments: tuple) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # errors are raised by start_processes
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    world = distributed.join()
    told = act(world, Machine("cpu", ranks=ranks, by_torchrun=True), *arguments)
    world.store.set(f"told {rank}", json.dumps(told))
    world.leave(0)


def _train(world: distributed.World, on: Machine, overrides: list[str], folder: Path, acts: dict[str, list[int]]) -> dict:
    told: dict = {"steps": 0, "seeds": [], "rows": [], "reduced": 0, "looked": 0, "ended": None}
    _watch(world, told, acts)
    try:
        train_here(overrides, folder, on=on, world=world)
    except SystemExit as end:
        told["ended"] = end.code
    except Exception as error:
        told["ended"] = f"{type(error).__name__}: {error}"
    return told


def _watch(world: distributed.World, told: dict, acts: dict[str, list[int]]) -> None:
    read, step, replicate, evaluate = Inputs.read, TrainingStep.__call__, distributed.World.replicate, Evaluation.__call__

    def here(act: str, number: int) -> bool:
        return acts.get(act) == [world.rank, number]

    def reads(self):
        found = read(self)
        told["seeds"] += found.seeds.flatten().tolist()
        told["rows"] += found.tokens.tolist()
        return found

    def steps(self, index):
        if here("nan", index + 1):
            self.state.model.register_forward_hook(lambda *call: call[-1] * float("nan"))
        if here("full", index + 1):
            checkpoint.serialize = no_space
        step(self, index)
        told["steps"] += 1

    def looks(self, before_batch):
        told["looked"] += 1
        if here("look", told["looked"]):
            signal.raise_signal(signal.SIGTERM)
        return evaluate(self, before_batch)

    def counted(self, forward):
        def hook(_, bucket):
            told["reduced"] += 1
            bucket.buffer().div_(world.size)
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

        ddp = replicate(self, forward)
        ddp.register_comm_hook(None, hook)
        return ddp

    Inputs.read, TrainingStep.__call__, Evaluation.__call__ = reads, steps, looks  # type: ignore[method-assign]
    if acts.get("count"):
        distributed.World.replicate = counted  # type: ignore[method-assign]
