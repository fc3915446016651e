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
from configs.machine import Machine
from model import GPT
from tests.runs import read_json
from training import distributed
from training.resume import settle
from training.run import open_run

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.ranks", "tests.sharded_ranks"])


def train_one_after_the_other(ranks: int, jobs: dict[Path, list[str]]) -> list[dict[str, dict[str, int]]]:
    """Runs of `ranks` processes: overrides by folder.

    Returns:
        What each rank counted, by the folder's name: numbers of the model that it holds in the end, and its reduced gradients.
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
    (Path(results) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    world.leave(0)


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
