"""Weak scaling of a training step: the batch of a GPU stays, the number of GPUs grows. DDP and FSDP2.

python -m benchmarks.scaling                                    GPT-2 both ways, GPT-2 XL sharded, on 1, 2, 4 … of the GPUs here
python -m benchmarks.scaling --model gpt2 --parallel ddp --ranks 1 8 --compile     some of it
python -m benchmarks.scaling --device cpu                       to try it: the default run's model, ranks that talk over gloo

torchrun starts the processes of each model and number of ranks once. They stay until the end. In a turn, one cell trains a
fresh model for some uncounted and some counted steps, and all other processes wait without work. A round gives every cell two
turns, in some order and then in its reverse. The step is train.py's. A single rank runs under torchrun too, so that only the
number of ranks differs. `alone` is the plain step of one process, without wrapper and other ranks.

Efficiency is tokens/s of a GPU with N ranks over that with one rank: the geometric mean over rounds of the ratio within a
round. Rounds are few, so the 95 % interval is Student's, of the logarithms. The single rank runs on the first GPU and is
measured again in each run, so measure all numbers of ranks together. With FSDP2 each of N GPUs does an Nth of the optimizer's
work, so efficiency may be above 1.
"""

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

import configs
from benchmarks import command, scaling_tables
from benchmarks.command import Record
from benchmarks.scaling_ranks import Job, JobError
from configs import ConfigError, machine, rules
from measure.comparison import cycle_times
from measure.progress import progress, show_current
from measure.schedule import block_orders
from measure.statistics import mean_interval, spread
from training.precision import Precision

PROGRAM = "scaling"
KEY = ("model", "parallel", "ranks", "batch_size", "context", "precision", "compiled", "common", "nccl")
ROUNDS = (3, 1)  # by default, and with --quick
ALONE, DDP, FSDP = "alone", "ddp", "fsdp"


@dataclass(frozen=True)
class Size:
    overrides: tuple[str, ...]
    batch_size: int  # sequences of a rank
    parallel: tuple[str, ...] = (ALONE, DDP, FSDP)  # by default
    # Steps that open a turn and are not counted. The first compiles the loss. A GPU that waited for its turn begins at its
    # highest clock and is held back to its power limit later: on H200s GPT-2's steps went from 62.5 to 67 ms behind the 27th.
    warm_up: int = 60


SIZES = {
    "tiny": Size(("model.vocab_size=2048",), 8, warm_up=5),  # the default run's
    "gpt2": Size(("model.vocab_size=50304",), 32),
    # 25 GB of weights, gradients and optimizer state unsharded. With 4 sequences a step waited for the host.
    "gpt2_xl": Size(("model.vocab_size=50304",), 32, (FSDP,), warm_up=4),
}


@dataclass(frozen=True)
class Cell:
    model: str
    parallel: str
    ranks: int
    overrides: tuple[str, ...]  # of the config that its ranks train with
    batch_size: int  # sequences of a rank
    context: int
    precision: str
    compiled: bool
    common: str  # overrides that the user gave
    nccl: str  # settings of NCCL in the environment, which may decide how fast it is

    @property
    def name(self) -> str:
        """Among the cells of one run."""
        return f"{self.model} {self.parallel} {self.ranks}"

    @property
    def job(self) -> tuple[str, int]:
        """Cells share one where they need as many processes, and where what is compiled for one fits the other."""
        return self.model, self.ranks

    @property
    def step_tokens(self) -> int:
        return self.ranks * self.batch_size * self.context


@dataclass
class Measured:
    """The results of a cell's turns."""

    blocks_ms: list[list[float]] = field(default_factory=list)  # of each turn, the counted steps
    peak_gb: float | None = None
    error: str | None = None


def options_of(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = command.parser(PROGRAM, __doc__.splitlines()[0], ROUNDS)
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
    parser.add_argument(
        "--timeout", type=command.positive, default=300, metavar="S", help="seconds for a start, and for a turn (%(default)s)"
    )
    options = command.parse(parser, argv, ROUNDS)
    on_cpu = options.device == "cpu"
    options.model = options.model or (["tiny"] if on_cpu else ["gpt2"] if options.quick else ["gpt2", "gpt2_xl"])
    options.ranks = sorted(set(options.ranks or ([1, 2] if on_cpu else powers_of_two(torch.cuda.device_count()))))
    if not on_cpu and options.ranks and options.ranks[-1] > torch.cuda.device_count() > 0:
        parser.error(
            f"--ranks {options.ranks[-1]}: each rank needs a GPU of its own, and there are {torch.cuda.device_count()}"
        )
    return parser, options


def powers_of_two(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length())]


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
            option = key.rpartition(".")[2].replace("_", "-")
            raise ConfigError(f"--common {text}: {key} is set by --{option}. Leave it out.")
    overrides = (*(f"{key}={value}" for key, value in own.items()), *size.overrides, *options.common)
    cfg = configs.compose_only(overrides)
    on = replace(machine.inspect(cfg.device), ranks=ranks, by_torchrun=True)
    rules.check(cfg, on)
    return Cell(
        model=model,
        parallel=parallel,
        ranks=ranks,
        overrides=overrides,
        batch_size=batch_size,
        context=cfg.model.context,
        precision=Precision.settle(cfg.train.precision, on).name,
        compiled=options.compile,
        common=" ".join(options.common),
        nccl=nccl_settings() if on.device == "cuda" else "",
    )


def nccl_settings() -> str:
    """NCCL's settings in the environment, without NCCL_VERSION: NVIDIA's images set that, and it is not the version in use."""
    return " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_") and k != "NCCL_VERSION")


def start(jobs: Mapping[tuple[str, int], Job], found: Mapping[Cell, Measured]) -> None:
    """Starts all jobs at once, because imports take most of the time. A job that does not start fails all its cells."""
    for job in jobs.values():
        job.start()
    for which, job in jobs.items():
        try:
            job.join()
        except JobError as error:
            for cell, measured in found.items():
                if cell.job == which:
                    measured.error = str(error)


def take_turn(cell: Cell, measured: Measured, job: Job, steps: int) -> None:
    """Gives a cell a turn, unless it failed before."""
    if measured.error is not None:
        return
    try:
        answer = job.turn(cell.overrides, steps)
    except JobError as error:  # a cell's failure is a result
        measured.error = str(error)
        return
    measured.blocks_ms.append(answer["steps_ms"])
    if answer["peak_gb"] is not None:
        measured.peak_gb = max(measured.peak_gb or 0.0, answer["peak_gb"])


def records_of(found: Mapping[Cell, Measured]) -> list[Record]:
    """A record for each cell, once every cell has had the turns of as many rounds."""
    by_name = {cell.name: measured for cell, measured in found.items()}
    records = []
    for cell, measured in found.items():
        record: Record = {name: getattr(cell, name) for name in KEY}
        if measured.error is not None:
            records.append({**record, "ms": None, "error": measured.error})
            continue
        times = spread([ms for block in measured.blocks_ms for ms in block])
        tokens_per_s = 1000 * cell.step_tokens / times.median
        record |= {"ms": round(times.median, 4), "p10": round(times.p10, 4), "p90": round(times.p90, 4)}
        record |= {"tokens_per_s": round(tokens_per_s, 1), "tokens_per_s_of_rank": round(tokens_per_s / cell.ranks, 1)}
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


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser, options = options_of(argv)
    device = command.pick_device(parser, options)
    try:
        cells = cells_of(options)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if device.type == "cuda" else None
    results = command.open_results(PROGRAM, options, device, [], argv, nccl)
    found = {cell: Measured() for cell in cells}
    by_name = {cell.name: cell for cell in cells}
    jobs = {cell.job: Job(cell.ranks, options.timeout) for cell in cells}
    try:
        with progress(2 * options.rounds * len(cells), PROGRAM, "turn") as bar:
            show_current(bar, "start")
            start(jobs, found)
            for order in block_orders(list(by_name), options.rounds, 0):
                for name in order:
                    show_current(bar, name)
                    take_turn(by_name[name], found[by_name[name]], jobs[by_name[name].job], options.steps)
                    bar.update()
                results.records = records_of(found)
                results.save()
    finally:
        for job in jobs.values():
            job.dismiss()
        for job in jobs.values():
            job.end()
    print(scaling_tables.scaling_text(results.finish()["records"]))


if __name__ == "__main__":
    command.run(main)
