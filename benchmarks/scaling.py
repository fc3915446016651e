"""Weak scaling of a training step: the batch of a GPU stays, the number of GPUs grows. DDP and FSDP2.

python -m benchmarks.scaling                                    GPT-2 both ways, GPT-2 XL sharded, on 1, 2, 4 … of the GPUs here
python -m benchmarks.scaling --model gpt2 --parallel ddp --ranks 1 8 --compile     some of it
python -m benchmarks.scaling --device cpu                       to try it: the default run's model, ranks that talk over gloo

In a turn as many processes start as a cell has ranks, as torchrun would start them; they train a fresh model for some uncounted
and some counted steps, and end. A round gives every cell two turns, in some order and then in its reverse. The step is
train.py's. A single rank is wrapped too, so that only the number of ranks differs.

Efficiency is tokens/s of a GPU with N ranks over that with one rank: the geometric mean over rounds of the ratio within a
round. Rounds are few, so the 95 % interval is Student's, of the logarithms. The single rank runs on the first GPU and is
measured again in each run, so measure all numbers of ranks together. With FSDP2 each of N GPUs does an Nth of the optimizer's
work, so efficiency may be above 1.
"""

import argparse
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import configs
from benchmarks import command
from benchmarks.command import Record
from configs import Config, ConfigError, machine, rules
from data import Batches
from measure.clock import StepClock
from measure.comparison import cycle_times
from measure.progress import progress, show_current
from measure.schedule import block_orders, no_garbage_collection
from measure.statistics import mean_interval, spread
from measure.tables import NOTHING, compact_markdown
from train import training_step
from training.build import build
from training.distributed import World, join
from training.step import MixedPrecision

ROUNDS = (3, 1)  # by default, and with --quick
DDP, FSDP = "ddp", "fsdp"
START = "spawn"  # how ranks start: each in an interpreter of its own, as CUDA needs it


@dataclass(frozen=True)
class Size:
    batch_size: int  # sequences of a rank
    vocab_size: int
    parallel: tuple[str, ...] = (DDP, FSDP)  # by default
    # Steps that open a turn and are not counted. The first compiles the loss. A GPU that waited for its turn begins at its
    # highest clock and is held back to its power limit later: on H200s GPT-2's steps went from 62.5 to 67 ms behind the 27th.
    warm_up: int = 60


SIZES = {
    "tiny": Size(8, 2048, warm_up=5),  # the default run's
    "gpt2": Size(32, 50304),
    # 25 GB of weights, gradients and optimizer state unsharded. With 4 sequences a step waited for the host.
    "gpt2_xl": Size(32, 50304, (FSDP,), warm_up=4),
}


@dataclass
class Cell:
    """A model on a number of ranks, and what its turns found."""

    facts: Record  # as recorded; model, parallel and ranks tell it from the other cells of a run
    overrides: Sequence[str]  # of the config that its ranks train with
    blocks_ms: list[list[float]] = field(default_factory=list)  # of each turn, the counted steps
    peak_gb: float | None = None
    error: str | None = None

    @property
    def ranks(self) -> int:
        return self.facts["ranks"]


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.parser("scaling", __doc__.splitlines()[0], rounds=ROUNDS)
    parser.add_argument("--model", nargs="+", choices=tuple(SIZES), help="(gpt2 gpt2_xl; gpt2 with --quick; tiny on the CPU)")
    parser.add_argument("--parallel", nargs="+", choices=(DDP, FSDP), help=f"(both; {FSDP} for gpt2_xl)")
    parser.add_argument(
        "--ranks", nargs="+", type=command.positive, metavar="N",
        help="with 1 among them, for efficiency (powers of two up to the GPUs here; 1 2 on the CPU)",
    )  # fmt: skip
    parser.add_argument("--steps", type=command.positive, default=25, help="counted in a turn (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="compiled models, each anew in every turn (eager)")
    parser.add_argument("--common", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of the config of all")
    options = command.parse(parser, argv)
    on_cpu, gpus = options.device.type == "cpu", torch.cuda.device_count()
    options.model = options.model or (["tiny"] if on_cpu else ["gpt2"] if options.quick else ["gpt2", "gpt2_xl"])
    options.ranks = sorted(set(options.ranks or ([1, 2] if on_cpu else [2**i for i in range(gpus.bit_length())])))
    if not on_cpu and options.ranks[-1] > gpus:
        parser.error(f"--ranks {options.ranks[-1]}: each rank needs a GPU of its own, and there are {gpus}")
    return options


def cells_of(options: argparse.Namespace) -> dict[str, Cell]:
    """By "model parallel ranks".

    Raises:
        ConfigError: a key, a value or a combination that can't be used.
    """
    return {
        f"{model} {parallel} {ranks}": cell_of(options, model, parallel, ranks)
        for model in options.model
        for parallel in options.parallel or SIZES[model].parallel
        for ranks in options.ranks
    }


def cell_of(options: argparse.Namespace, model: str, parallel: str, ranks: int) -> Cell:
    size = SIZES[model]
    own = {
        "model": model,
        "device": options.device.type,
        "parallel": parallel,
        "train.batch_size": size.batch_size * ranks,
        "train.compile": str(options.compile).lower(),
        "train.steps": size.warm_up + options.steps,
    }
    if taken := [text for text in options.common if text.partition("=")[0].lstrip("+") in own]:
        raise ConfigError(f"--common {taken[0]}: it has an option of its own, or is fixed. Leave it out.")
    overrides = [*(f"{key}={value}" for key, value in own.items()), f"model.vocab_size={size.vocab_size}", *options.common]
    cfg = configs.compose_only(overrides)
    on = replace(machine.inspect(cfg.device), ranks=ranks, by_torchrun=True)
    rules.check(cfg, on)
    # without NCCL_VERSION: NVIDIA's images set that, and it is not the version in use
    nccl = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_") and k != "NCCL_VERSION"]
    facts = {
        "model": model,
        "parallel": parallel,
        "ranks": ranks,
        "batch_size": size.batch_size,
        "context": cfg.model.context,
        "precision": str(MixedPrecision.of(cfg.train.precision, on)),
        "compiled": options.compile,
        "common": " ".join(options.common),
        "nccl": " ".join(nccl) if on.device == "cuda" else "",  # which may decide how fast it is
    }
    return Cell(facts, overrides)


# ---- a turn -----------------------------------------------------------------------------------------------------------------


def turn(cell: Cell, steps: int) -> dict[str, Any]:
    """What `step_times` finds in as many processes as the cell has ranks.

    Raises:
        ProcessRaisedException, ProcessExitedException: of the first rank that failed; the others are ended.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a free port
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own choice, but only where there are several ranks
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        mp.start_processes(rank, (cell, store.port, steps, answer), nprocs=cell.ranks, start_method=START)
        return json.loads(answer.read_text())


def rank(number: int, cell: Cell, port: int, steps: int, answer: Path) -> None:
    """One process of a turn, with what torchrun tells its ranks."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(cell.ranks), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "scaling", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    world = join()
    found = step_times(configs.compose_only(cell.overrides), steps, world)
    if world.leads:
        answer.write_text(json.dumps(found))
    world.leave(0)


def step_times(cfg: Config, steps: int, world: World) -> dict[str, Any]:
    """Milliseconds of each of the last `steps` steps, and the peak GiB of any rank (None except on CUDA).

    A step is train.py's, from the copy of the batch to the cleared gradients. The times are this rank's: ranks wait for one
    another in every step, so they are the slowest's.
    """
    precision = MixedPrecision.of(cfg.train.precision, machine.inspect(cfg.device))
    assert cfg.model.vocab_size is not None
    _, state, forward = build(cfg, precision, cfg.model.vocab_size, world, draw_on=precision.device)
    batches = Batches(
        _tokens(cfg.model.vocab_size, cfg.model.context, cfg.train.batch_size // world.size, cfg.seed),
        context=cfg.model.context,
        batch_size=cfg.train.batch_size,
        seed=cfg.seed,
        rank=world.rank,
        ranks=world.size,
    )
    clock = StepClock(precision.device, warmup=cfg.train.steps - steps)
    drawn = [batches[step] for step in range(cfg.train.steps)]
    with no_garbage_collection():
        for step, batch in enumerate(drawn):
            with clock.step():
                training_step(forward, state, batch, step, cfg, precision, world)
    times = [round(ms, 4) for ms in clock.steps_ms]
    peak = None if clock.peak_gb is None else world.max(round(clock.peak_gb * 2**30)) / 2**30
    return {"steps_ms": times, "peak_gb": peak}


def _tokens(vocab_size: int, context: int, batch_size: int, seed: int) -> np.ndarray:
    """Random tokens, the frequent ones as frequent as words are (Mandelbrot's law): the gradient of the embedding takes longer
    where rows repeat. They are the same for any number of ranks."""
    weights = 1 / (np.arange(vocab_size) + 2.7)
    count = 64 * batch_size * context + 1  # then they come again in another order
    return np.random.default_rng(seed).choice(vocab_size, size=count, p=weights / weights.sum())


# ---- the program ------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of(argv)
    try:
        cells = cells_of(options)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if options.device.type == "cuda" else None
    results = command.open_results(options, [], nccl)
    with progress(2 * options.rounds * len(cells), "scaling", "turn") as bar:
        for order in block_orders(list(cells), options.rounds, 0):
            for name in order:
                show_current(bar, name)
                take_turn(cells[name], options.steps)
                bar.update()
            results.records = [record_of(cell, cells) for cell in cells.values()]
            results.save()
    print(markdown({"records": results.finish()}))


def take_turn(cell: Cell, steps: int) -> None:
    """A cell's failure is a result; it gets no more turns."""
    if cell.error is not None:
        return
    try:
        found = turn(cell, steps)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        cell.error = f"rank {error.error_index}: {str(error).strip().splitlines()[-1]}"[:300]
        return
    cell.blocks_ms.append(found["steps_ms"])
    if found["peak_gb"] is not None:
        cell.peak_gb = max(cell.peak_gb or 0.0, found["peak_gb"])


def record_of(cell: Cell, cells: Mapping[str, Cell]) -> Record:
    """`cells` are those of the run. Efficiency is one rank's milliseconds over those of many, which is the ratio of a rank's
    tokens/s; of a single round it has no interval."""
    facts = cell.facts
    if cell.error is not None:
        return {**facts, "ms": None, "error": cell.error}
    times = spread([ms for block in cell.blocks_ms for ms in block])
    of_rank = 1000 * facts["batch_size"] * facts["context"] / times.median
    record: Record = {**facts, "ms": round(times.median, 4), "p10": round(times.p10, 4), "p90": round(times.p90, 4)}
    record |= {"tokens_per_s": round(cell.ranks * of_rank, 1), "tokens_per_s_of_rank": round(of_rank, 1)}
    one = cells.get(f"{facts['model']} {facts['parallel']} 1")
    if one is not None and one.error is None:
        pairs = zip(cycle_times(one.blocks_ms), cycle_times(cell.blocks_ms), strict=True)
        logarithms = [math.log(one_ms / many_ms) for one_ms, many_ms in pairs]
        mean = mean_interval(logarithms)
        ratio, *interval = (round(math.exp(value), 4) for value in (mean.median, mean.low, mean.high))
        record |= {"efficiency": ratio, "efficiency_95": interval if len(logarithms) > 1 else None}
    return record | {"peak_gb": None if cell.peak_gb is None else round(cell.peak_gb, 6), "blocks_ms": cell.blocks_ms}


HEADER = ("", "GPUs", "ms", "p10", "p90", "tokens/s", "per GPU", "efficiency (95 %)", "GiB")


def markdown(file: dict[str, Any]) -> str:
    """A table for each model and what it is trained with."""
    found: dict[str, list[list[str]]] = {}
    for r in sorted(file["records"], key=lambda r: (r["parallel"], r["ranks"])):
        words = [f"{r['model']}: {r['batch_size']} × {r['context']} tokens a GPU", r["precision"]]
        words += ["compiled" if r["compiled"] else "eager", r["common"], r["nccl"]]
        rows = found.setdefault(", ".join(filter(None, words)), [])
        if r["ms"] is None:
            rows.append([r["parallel"], str(r["ranks"]), f"failed: {r['error']}", *[NOTHING] * (len(HEADER) - 3)])
            continue
        row = [r["parallel"], str(r["ranks"]), *(f"{r[key]:.2f}" for key in ("ms", "p10", "p90"))]
        row += [f"{r[key]:,.0f}" for key in ("tokens_per_s", "tokens_per_s_of_rank")]
        interval = " ({:.3f} to {:.3f})".format(*r["efficiency_95"]) if r.get("efficiency_95") else ""
        row += [f"{r['efficiency']:.3f}{interval}" if "efficiency" in r else NOTHING]
        rows.append([*row, NOTHING if r["peak_gb"] is None else f"{r['peak_gb']:.2f}"])
    return "\n\n".join(f"{title}\n\n{compact_markdown(HEADER, rows)}" for title, rows in found.items())


if __name__ == "__main__":
    main()
