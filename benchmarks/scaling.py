"""Weak scaling of a training step: the batch of a GPU stays, the number of GPUs grows. DDP and FSDP2.

python -m benchmarks.scaling                                       GPT-2, both ways, on 1, 2, 4 … of the GPUs here
python -m benchmarks.scaling train.compile=true --parallel ddp --ranks 1 8         some of it, with keys of train.py
python -m benchmarks.scaling model=gpt2_xl --parallel fsdp --warm-up 4 --steps 4   25 GB of weights and their state
python -m benchmarks.scaling --device cpu                          to try it: the default run's model, ranks that talk over gloo

A turn is a run of torchrun: as many processes as a cell has ranks train a fresh model for some uncounted and some counted
steps, and end. A round gives every cell two turns, in some order and then in its reverse. The step is
train.py's. A single rank is wrapped too, so that only the number of ranks differs.

Efficiency is tokens/s of a GPU with N ranks over that with one rank: the geometric mean over rounds of the ratio within a
round. Rounds are few, so the 95 % interval is Student's, of the logarithms. The single rank runs on the first GPU and is
measured again in each run, so measure all numbers of ranks together. With FSDP2 each of N GPUs does an Nth of the optimizer's
work, so efficiency may be above 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

import configs
from benchmarks import command
from benchmarks.command import Record
from configs import machine, rules
from data import Batches
from measure.clock import StepClock
from measure.comparison import cycle_times
from measure.progress import progress, show_current
from measure.schedule import block_orders, no_garbage_collection
from measure.sources import ROOT, code
from measure.statistics import geometric_mean, spread
from measure.tables import NOTHING, compact_markdown
from training.build import build
from training.command import use_one_thread
from training.distributed import World, join
from training.inputs import Inputs
from training.precision import MixedPrecision
from training.step import TrainingStep

PARALLEL = ("ddp", "fsdp")
KEYS = {  # on a GPU GPT-2. With 4 sequences a step of GPT-2 XL waited for the host.
    "cuda": ["model=gpt2", "model.vocab_size=50304", "train.batch_size=32"],
    "cpu": ["model=tiny", "model.vocab_size=2048", "train.batch_size=8"],
}


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser("scaling", __doc__, rounds=3)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="of train.py; train.batch_size is that of a GPU")
    parser.add_argument("--parallel", nargs="+", choices=PARALLEL, default=PARALLEL, help="(both)")
    parser.add_argument(
        "--ranks", nargs="+", type=command.positive, metavar="N",
        help="with 1 among them, for efficiency (powers of two up to the GPUs here; 1 2 on the CPU)",
    )  # fmt: skip
    # The first step compiles the loss. A GPU that waited for its turn begins at its highest clock and is held back to its power
    # limit later: on H200s GPT-2's steps went from 62.5 to 67 ms behind the 27th.
    parser.add_argument("--warm-up", type=command.positive, default=60, help="steps of a turn before those (%(default)s)")
    parser.add_argument("--steps", type=command.positive, default=25, help="counted in a turn (%(default)s)")
    options = command.parse(parser, argv)
    gpus = torch.cuda.device_count() if options.device.type == "cuda" else 2
    options.ranks = sorted(options.ranks or [2**i for i in range(gpus.bit_length())])
    return options


def cell_of(options: argparse.Namespace, parallel: str, ranks: int) -> tuple[Record, list[str]]:
    """The facts of a cell, as recorded, and the config that its ranks train with.

    Raises:
        ConfigError: a key, a value or a combination that can't be used.
    """
    keys = [*KEYS[options.device.type], *options.keys]
    batch_size = configs.compose_only(keys, configs.Config).train.batch_size
    keys += [f"device={options.device.type}", f"parallel={parallel}", f"train.batch_size={batch_size * ranks}"]
    keys += [f"train.steps={options.warm_up + options.steps}"]
    cfg = configs.compose_only(keys, configs.Config)
    on = replace(machine.inspect(cfg.device), ranks=ranks, by_torchrun=True)
    rules.check(cfg, on)
    # without NCCL_VERSION: NVIDIA's images set that, and it is not the version in use
    nccl = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_") and k != "NCCL_VERSION"]
    facts = {
        "model": [key for key in keys if key.startswith("model=")][-1].removeprefix("model="),
        "parallel": parallel,
        "ranks": ranks,
        "batch_size": batch_size,
        "context": cfg.model.context,
        "precision": str(MixedPrecision.of(cfg.train.precision, on)),
        "compiled": cfg.train.compile,
        "common": " ".join(key for key in options.keys if not key.startswith(("model=", "train.compile="))),
        "nccl": " ".join(nccl) if on.device == "cuda" else "",  # which may decide how fast it is
    }
    return facts, keys


def turn(ranks: int, warm_up: int, keys: Sequence[str]) -> dict[str, Any]:
    """What `step_times` finds in as many processes. Raises CalledProcessError: a rank failed, and torchrun printed why."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words = [*torchrun, "-m", "benchmarks.scaling", str(answer), str(warm_up), *keys]
        subprocess.run(words, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        return json.loads(answer.read_text())


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of(argv)
    cells = {f"{way} {ranks}": cell_of(options, way, ranks) for way in options.parallel for ranks in options.ranks}
    results = command.open_results(options)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in cells}
    with progress(2 * options.rounds * len(cells), "scaling", "turn") as bar:
        for order in block_orders(list(cells), options.rounds, 0):
            for name in order:
                show_current(bar, name)
                facts, keys = cells[name]
                turns[name].append(turn(facts["ranks"], options.warm_up, keys))
                results.of_others.append(turns[name][-1]["code"])
                bar.update()
            results.records.clear()  # those of fewer rounds
            results.add(
                record_of(facts, turns[name], turns.get(f"{facts['parallel']} 1")) for name, (facts, _) in cells.items()
            )
    print(markdown({"records": results.finish()}))


# ---- a rank of a turn, which torchrun starts ---------------------------------------------------------------------------------


def step_times(cfg: configs.Config, warm_up: int, world: World) -> dict[str, Any]:
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


def rank(answer: str, warm_up: str, *keys: str) -> None:
    """One rank of a turn. answer: where the first writes what it found."""
    world = join()
    use_one_thread()
    found = step_times(configs.compose_only(keys, configs.Config), int(warm_up), world)
    if world.leads:
        Path(answer).write_text(json.dumps(found))
    world.leave(0)


def record_of(facts: Record, turns: Sequence[dict[str, Any]], of_one: Sequence[dict[str, Any]] | None) -> Record:
    """Efficiency is the milliseconds of one rank, if it was measured, over those of many, which is the ratio of a rank's
    tokens/s; of a single round it has no interval."""
    blocks_ms = [turn["steps_ms"] for turn in turns]
    times = spread([ms for block in blocks_ms for ms in block])
    of_rank = 1000 * facts["batch_size"] * facts["context"] / times.median
    record: Record = {**facts, "ms": round(times.median, 4), "p10": round(times.p10, 4), "p90": round(times.p90, 4)}
    record |= {"tokens_per_s": round(facts["ranks"] * of_rank, 1), "tokens_per_s_of_rank": round(of_rank, 1)}
    if of_one:
        pairs = zip(cycle_times([turn["steps_ms"] for turn in of_one]), cycle_times(blocks_ms), strict=True)
        ratios = [one_ms / many_ms for one_ms, many_ms in pairs]
        mean, low, high = (round(value, 4) for value in vars(geometric_mean(ratios)).values())
        record |= {"efficiency": mean, "efficiency_95": [low, high] if len(ratios) > 1 else None}
    peak_gb = None if turns[0]["peak_gb"] is None else round(max(turn["peak_gb"] for turn in turns), 6)
    return record | {"peak_gb": peak_gb, "blocks_ms": blocks_ms}


HEADER = ("", "GPUs", "ms", "p10", "p90", "tokens/s", "per GPU", "efficiency (95 %)", "GiB")


def markdown(file: dict[str, Any]) -> str:
    """A table for each model and what it is trained with."""

    def title(r: Record) -> str:
        words = [f"{r['model']}: {r['batch_size']} × {r['context']} tokens a GPU", r["precision"]]
        return ", ".join(filter(None, [*words, "compiled" if r["compiled"] else "eager", r["common"], r["nccl"]]))

    def row(r: Record) -> list[str]:
        cells = [r["parallel"], str(r["ranks"]), *(f"{r[key]:.2f}" for key in ("ms", "p10", "p90"))]
        cells += [f"{r[key]:,.0f}" for key in ("tokens_per_s", "tokens_per_s_of_rank")]
        interval = " ({:.3f} to {:.3f})".format(*r["efficiency_95"]) if r.get("efficiency_95") else ""
        cells.append(f"{r['efficiency']:.3f}{interval}" if "efficiency" in r else NOTHING)
        return [*cells, NOTHING if r["peak_gb"] is None else f"{r['peak_gb']:.2f}"]

    tables = [(name, compact_markdown(HEADER, map(row, of))) for name, of in groupby(file["records"], title)]
    return "\n\n".join(f"{name}\n\n{table}" for name, table in tables)


if __name__ == "__main__":
    rank(*sys.argv[1:]) if torch.distributed.is_torchelastic_launched() else main()
