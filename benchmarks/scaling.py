"""Weak scaling of a training step: the batch of a GPU stays, the number of GPUs grows. DDP and FSDP2.

python -m benchmarks.scaling                                    GPT-2 both ways, GPT-2 XL sharded, on 1, 2, 4 … of the GPUs here
python -m benchmarks.scaling --model gpt2 --parallel ddp --ranks 1 8 --compile     some of it
python -m benchmarks.scaling --device cpu                       to try it: the default run's model, ranks that talk over gloo

In a turn, torchrun starts as many processes as a cell has ranks; they train a fresh model for some uncounted and some counted
steps, and end. A round gives every cell two turns, in some order and then in its reverse. The step is train.py's. A single rank
runs under torchrun too, so that only the number of ranks differs. `alone` is the plain step of one process, without wrapper and
other ranks.

Efficiency is tokens/s of a GPU with N ranks over that with one rank: the geometric mean over rounds of the ratio within a
round. Rounds are few, so the 95 % interval is Student's, of the logarithms. The single rank runs on the first GPU and is
measured again in each run, so measure all numbers of ranks together. With FSDP2 each of N GPUs does an Nth of the optimizer's
work, so efficiency may be above 1.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import configs
from benchmarks import command
from benchmarks.command import SCRATCH, Record
from configs import Config, ConfigError, machine, rules
from configs.schema import Parallel
from data import Batches
from measure.clock import StepClock
from measure.comparison import cycle_times
from measure.progress import progress, show_current
from measure.schedule import block_orders, no_garbage_collection
from measure.sources import ROOT
from measure.statistics import mean_interval, spread
from measure.tables import NOTHING, aligned, compact_markdown
from measure.timing import describe
from train import training_step
from training.build import build
from training.distributed import ALONE as ONE_PROCESS
from training.distributed import World, join
from training.precision import Precision

PROGRAM = "scaling"
ROUNDS = (3, 1)  # by default, and with --quick
ALONE, DDP, FSDP = "alone", "ddp", "fsdp"


@dataclass(frozen=True)
class Size:
    batch_size: int  # sequences of a rank
    vocab_size: int
    parallel: tuple[str, ...] = (ALONE, DDP, FSDP)  # by default
    # Steps that open a turn and are not counted. The first compiles the loss. A GPU that waited for its turn begins at its
    # highest clock and is held back to its power limit later: on H200s GPT-2's steps went from 62.5 to 67 ms behind the 27th.
    warm_up: int = 60


SIZES = {
    "tiny": Size(8, 2048, warm_up=5),  # the default run's
    "gpt2": Size(32, 50304),
    # 25 GB of weights, gradients and optimizer state unsharded. With 4 sequences a step waited for the host.
    "gpt2_xl": Size(32, 50304, (FSDP,), warm_up=4),
}


@dataclass(frozen=True)
class Cell:
    model: str
    parallel: str
    ranks: int
    batch_size: int  # sequences of a rank
    context: int
    precision: str
    compiled: bool
    common: str  # overrides that the user gave
    nccl: str  # settings of NCCL in the environment, which may decide how fast it is
    overrides: tuple[str, ...]  # of the config that its ranks train with; not recorded

    @property
    def name(self) -> str:
        """Among the cells of one run."""
        return f"{self.model} {self.parallel} {self.ranks}"


@dataclass
class Measured:
    """The results of a cell's turns."""

    blocks_ms: list[list[float]] = field(default_factory=list)  # of each turn, the counted steps
    peak_gb: float | None = None
    error: str | None = None

    def add(self, turn: dict[str, Any]) -> None:
        self.blocks_ms.append(turn["steps_ms"])
        if turn["peak_gb"] is not None:
            self.peak_gb = max(self.peak_gb or 0.0, turn["peak_gb"])


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    parser = command.parser(PROGRAM, __doc__.splitlines()[0], rounds=ROUNDS)
    parser.add_argument(
        "--model", nargs="+", choices=tuple(SIZES), metavar="MODEL",
        help=f"of {', '.join(SIZES)} (gpt2 gpt2_xl; gpt2 with --quick; tiny on the CPU)",
    )  # fmt: skip
    parser.add_argument(
        "--parallel", nargs="+", choices=(ALONE, DDP, FSDP), metavar="HOW",
        help=f"of {ALONE}, {DDP}, {FSDP} (all; {FSDP} for gpt2_xl)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", nargs="+", type=command.positive, metavar="N",
        help="with 1 among them, for efficiency (powers of two up to the GPUs here; 1 2 on the CPU)",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=command.positive, metavar="B",
        help=f"sequences of each rank ({', '.join(f'{size.batch_size} for {name}' for name, size in SIZES.items())})",
    )  # fmt: skip
    parser.add_argument("--steps", type=command.positive, default=25, help="counted in a turn (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="compiled models, each anew in every turn (eager)")
    parser.add_argument("--common", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of the config of all")
    options = command.parse(parser, argv, ROUNDS)
    on_cpu, gpus = options.device == "cpu", torch.cuda.device_count()
    options.model = options.model or (["tiny"] if on_cpu else ["gpt2"] if options.quick else ["gpt2", "gpt2_xl"])
    options.ranks = sorted(set(options.ranks or ([1, 2] if on_cpu else [2**i for i in range(gpus.bit_length())])))
    if not on_cpu and options.ranks[-1] > gpus:
        parser.error(f"--ranks {options.ranks[-1]}: each rank needs a GPU of its own, and there are {gpus}")
    return options


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Raises ConfigError: a key, a value or a combination that can't be used."""
    machine.refuse_ranks(f"-m benchmarks.{PROGRAM}")  # which starts torchrun itself
    return [
        cell_of(options, model, parallel, ranks)
        for model in dict.fromkeys(options.model)
        for parallel in dict.fromkeys(options.parallel or SIZES[model].parallel)
        for ranks in ([1] if parallel == ALONE else options.ranks)
    ]


def cell_of(options: argparse.Namespace, model: str, parallel: str, ranks: int) -> Cell:
    size = SIZES[model]
    batch_size = options.batch_size or size.batch_size
    own = {
        "model": model,
        "device": options.device,
        "parallel": "auto" if parallel == ALONE else parallel,
        "train.batch_size": batch_size * ranks,
        "train.compile": str(options.compile).lower(),
        "train.steps": size.warm_up + options.steps,
    }
    for text in options.common:
        if (key := text.partition("=")[0].lstrip("+")) in own:
            raise ConfigError(f"--common {text}: {key} has an option of its own, see --help. Leave it out.")
    overrides = (*(f"{key}={value}" for key, value in own.items()), f"model.vocab_size={size.vocab_size}", *options.common)
    cfg = configs.compose_only(overrides)
    on = replace(machine.inspect(cfg.device), ranks=ranks, by_torchrun=True)
    rules.check(cfg, on)
    # without NCCL_VERSION: NVIDIA's images set that, and it is not the version in use
    nccl = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_") and k != "NCCL_VERSION"]
    return Cell(
        model=model,
        parallel=parallel,
        ranks=ranks,
        batch_size=batch_size,
        context=cfg.model.context,
        precision=Precision.settle(cfg.train.precision, on).name,
        compiled=options.compile,
        common=" ".join(options.common),
        nccl=" ".join(nccl) if on.device == "cuda" else "",
        overrides=overrides,
    )


# ---- a turn -----------------------------------------------------------------------------------------------------------------


TIMEOUT_S = 600.0
RANK = "rank"  # the argument with which torchrun starts this module
ANSWER, FAILED = SCRATCH / "scaling.answer", SCRATCH / "scaling.failed"  # what the ranks of a turn leave behind
SIGNAL = re.compile(r"Signal \d+ \((?!SIGTERM)(\w+)\) received by PID")  # torchrun reports it; it ends all others by SIGTERM


class TurnError(RuntimeError):
    """A turn failed; the text says why."""


def turn(cell: Cell, steps: int) -> dict[str, Any]:
    """What `measure` finds in as many processes as the cell has ranks."""
    log = SCRATCH / f"scaling_{cell.name.replace(' ', '_')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    for file in (ANSWER, FAILED):
        file.unlink(missing_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cell.ranks}", "-m", f"benchmarks.{PROGRAM}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *torchrun, RANK, str(SCRATCH.resolve()), str(steps), *cell.overrides],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # torchrun's own choice, but only where there are several ranks
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            why = f"torchrun ended with {process.wait(TIMEOUT_S)}"
        except subprocess.TimeoutExpired:
            why = f"no answer in {TIMEOUT_S:g} s"
        finally:
            process.terminate()  # torchrun then ends its ranks
            process.wait()
    if ANSWER.exists():
        return json.loads(ANSWER.read_text())
    why = FAILED.read_text() if FAILED.exists() else why
    killed = SIGNAL.search(log.read_text(errors="replace"))
    raise TurnError(f"{why}{f' (a rank was ended by {killed[1]})' if killed else ''}; its output is in {log}")


def rank(folder: str, steps: str, *overrides: str) -> None:
    """One process of a turn."""
    world = join()
    try:
        answer = measure(configs.compose_only(overrides), int(steps), world)  # the program that started this has checked them
    except Exception as error:
        with suppress(FileExistsError), Path(folder, FAILED.name).open("x") as file:  # the others fail because they wait for it
            file.write(f"rank {world.rank}: {describe(error)}")
        raise
    if world.leads:
        Path(folder, ANSWER.name).write_text(json.dumps(answer))
    world.leave(0)


def measure(cfg: Config, steps: int, world: World) -> dict[str, Any]:
    """Milliseconds of each of the last `steps` steps, and the peak GiB of any rank (None except on CUDA).

    A step is train.py's, from the copy of the batch to the cleared gradients. The times are this rank's: ranks wait for one
    another in every step, so they are the slowest's.

    Args:
        cfg: train.steps are made. parallel is ddp, fsdp, or auto, which here is a model that nothing is wrapped around.
    """
    world = ONE_PROCESS if cfg.parallel is Parallel.auto else world
    precision = Precision.settle(cfg.train.precision, machine.inspect(cfg.device))
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
    options = options_of(sys.argv[1:] if argv is None else argv)
    try:
        cells = {cell.name: cell for cell in cells_of(options)}
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if options.device == "cuda" else None
    results = command.open_results(options, [], nccl)
    found = {cell: Measured() for cell in cells.values()}
    with progress(2 * options.rounds * len(cells), PROGRAM, "turn") as bar:
        for order in block_orders(list(cells), options.rounds, 0):
            for name in order:
                show_current(bar, name)
                if (measured := found[cells[name]]).error is None:
                    try:
                        measured.add(turn(cells[name], options.steps))
                    except TurnError as error:  # a cell's failure is a result
                        measured.error = str(error)
                bar.update()
            results.records = records_of(found)
            results.save()
    records = results.finish()["records"]
    print("\n\n".join(f"{title}\n{aligned(*table)}" for title, table in tables(records).items()))
    for r in records:
        if r["ms"] is None:
            print(f"failed: {r['model']}, {r['parallel']} on {r['ranks']}: {r['error']}")


def records_of(found: Mapping[Cell, Measured]) -> list[Record]:
    """A record for each cell, once every cell has had the turns of as many rounds."""
    by_name = {cell.name: measured for cell, measured in found.items()}
    records = []
    for cell, measured in found.items():
        record: Record = {name: value for name, value in vars(cell).items() if name != "overrides"}
        if measured.error is not None:
            records.append({**record, "ms": None, "error": measured.error})
            continue
        times = spread([ms for block in measured.blocks_ms for ms in block])
        of_rank = 1000 * cell.batch_size * cell.context / times.median
        record |= {"ms": round(times.median, 4), "p10": round(times.p10, 4), "p90": round(times.p90, 4)}
        record |= {"tokens_per_s": round(cell.ranks * of_rank, 1), "tokens_per_s_of_rank": round(of_rank, 1)}
        record |= ratio_of("efficiency", by_name.get(replace(cell, ranks=1).name), measured)
        record |= ratio_of("of_alone", by_name.get(replace(cell, ranks=1, parallel=ALONE).name), measured)
        record |= {"peak_gb": None if measured.peak_gb is None else round(measured.peak_gb, 6)}
        records.append({**record, "blocks_ms": measured.blocks_ms})
    return records


def ratio_of(name: str, base: Measured | None, measured: Measured) -> Record:
    """tokens/s of a rank over those of `base`, which has the same batch a rank: base's milliseconds over these.

    Nothing where `base` was not measured; of a single round without an interval.
    """
    if base is None or base.error is not None:
        return {}
    pairs = zip(cycle_times(base.blocks_ms), cycle_times(measured.blocks_ms), strict=True)
    logarithms = [math.log(base_ms / ms) for base_ms, ms in pairs]
    mean = mean_interval(logarithms)
    ratio, low, high = (round(math.exp(value), 4) for value in (mean.median, mean.low, mean.high))
    return {name: ratio, f"{name}_95": [low, high] if len(logarithms) > 1 else None}


# ---- tables ----------------------------------------------------------------------------------------------------------------


HEADER = ("", "GPUs", "ms", "p10", "p90", "tokens/s", "per GPU", "efficiency", "95 %", "of alone", "95 %", "GiB")


def tables(records: Sequence[Record]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Header and rows by title: a table for each model and what it is trained with, without empty columns."""
    lines: dict[str, list[list[str]]] = {}
    for r in sorted((r for r in records if r["ms"] is not None), key=lambda r: (r["parallel"], r["ranks"])):
        words = [f"{r['model']}: {r['batch_size']} × {r['context']} tokens a GPU", r["precision"]]
        words += ["compiled" if r["compiled"] else "eager", r["common"], r["nccl"]]
        lines.setdefault(", ".join(filter(None, words)), []).append(_row(r))
    found = {}
    for title, rows in lines.items():
        columns = [column for column in zip(HEADER, *rows, strict=True) if set(column[1:]) != {NOTHING}]
        header, *rest = zip(*columns, strict=True)
        found[title] = list(header), list(map(list, rest))
    return found


def _row(r: Record) -> list[str]:
    return [
        r["parallel"],
        str(r["ranks"]),
        *(f"{r[key]:.2f}" for key in ("ms", "p10", "p90")),
        *(f"{r[key]:,.0f}" for key in ("tokens_per_s", "tokens_per_s_of_rank")),
        *_ratio(r, "efficiency"),
        *_ratio(r, "of_alone"),
        NOTHING if r["peak_gb"] is None else f"{r['peak_gb']:.2f}",
    ]


def _ratio(r: Record, name: str) -> list[str]:
    interval = r.get(f"{name}_95")
    return [f"{r[name]:.3f}" if name in r else NOTHING, "{:.3f} to {:.3f}".format(*interval) if interval else NOTHING]


def markdown(file: dict[str, Any]) -> str:
    return "\n\n".join(f"{title}\n\n{compact_markdown(*table)}" for title, table in tables(file["records"]).items())


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        rank(*sys.argv[2:])
    else:
        command.run(main)
