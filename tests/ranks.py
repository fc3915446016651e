"""Runs of several ranks on the CPU, each a forked process."""

import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import torch

from configs.machine import Machine
from tests.forks import processes
from tests.runs import no_space, read_json, train_here
from training import checkpoint, distributed
from training.evaluation import Evaluation
from training.inputs import Inputs
from training.step import TrainingStep


def train_together(ranks: int, overrides: list[str], folder: Path, **acts: list[int]) -> list[dict]:
    """What each rank tells of a run in `folder`: its exit code or error, the steps it did, and the seeds and rows it was given.

    `acts` are [rank, step], counted from 1: in that step `nan` makes the loss of that rank NaN, `full` its disk full; `look`
    sends it SIGTERM in its evaluation of that number."""
    return on_ranks(ranks, _train, folder, overrides, folder, acts)


def on_ranks(ranks: int, act: Callable[..., dict], files: Path, *arguments: object) -> list[dict]:
    """What `act(world, on, *arguments)` returns on each rank. What the ranks write is kept beside `files`, under its name."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's, on a free port
    files.parent.mkdir(parents=True, exist_ok=True)
    started = [
        processes.Process(target=_rank, args=(rank, ranks, store.port, act, files, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for rank, process in enumerate(started):
        _of(files, rank, "err").touch()
        process.start()
    _join(started, files)
    return [read_json(_of(files, rank, "json")) for rank in range(ranks)]


def _join(started: list, files: Path) -> None:
    """Waits for all ranks to end well. Where one does not, the others are ended, and what each wrote is the error's message."""
    left, deadline = list(started), time.monotonic() + 400  # four ranks start on two cores that other tests use too
    while left and all(process.exitcode in (None, 0) for process in started) and time.monotonic() < deadline:
        wait([process.sentinel for process in left], 1)
        left = [process for process in left if process.exitcode is None]
    codes = [process.exitcode for process in started]  # None: it goes on, as a rank does that waits for one that died
    for process in left:
        process.kill()
        process.join()
    said = (f"rank {rank} ended with {code}\n{_of(files, rank, 'err').read_text()}" for rank, code in enumerate(codes))
    assert codes == [0] * len(codes), "\n".join(said)


def _of(files: Path, rank: int, kind: str) -> Path:
    return Path(f"{files}_rank_{rank}.{kind}")


def _rank(rank: int, ranks: int, port: int, act: Callable[..., dict], files: Path, arguments: tuple) -> None:
    os.dup2(os.open(_of(files, rank, "err"), os.O_WRONLY | os.O_CREAT), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    world = distributed.join()
    told = act(world, Machine("cpu", ranks=ranks, by_torchrun=True), *arguments)
    _of(files, rank, "json").write_text(json.dumps(told), encoding="utf-8")
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
            return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

        ddp = replicate(self, forward)
        ddp.register_comm_hook(None, hook)
        return ddp

    Inputs.read, TrainingStep.__call__, Evaluation.__call__ = reads, steps, looks  # type: ignore[method-assign]
    if acts.get("count"):
        distributed.World.replicate = counted  # type: ignore[method-assign]
