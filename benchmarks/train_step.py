"""A training step of ours beside nanoGPT's: time, memory, and where the GPU time goes. GPT-2 124M, eager and compiled.

python -m benchmarks.train_step --nanogpt ../nanoGPT                         a checkout beside the project, which is only read
python -m benchmarks.train_step --mode compiled --dropout 0                  some of it; records add up in one file
python -m benchmarks.train_step --ours model.residual_dtype=compute          one more contender, by overrides of our config
python -m benchmarks.train_step --device cpu --nanogpt ../nanoGPT            the default run's model on a CPU

All contenders of a cell have the same sizes, initial weights, batches and optimizer (fused AdamW, clipping, learning rates).
They run in alternating blocks (measure/schedule.py): each cycle an order and its reverse. A first cycle, and the first step of
each block, are not counted. A step is all from the copy of the batch to the cleared gradients. Each project does it its own
way: ours by `training.step`, nanoGPT's by its model.py and optimizer, in the order of its train.py.

Before anything is timed, both models must compute the same loss and gradients from the same weights in fp64. Without dropout,
the first step of all contenders must also give the same loss to the rounding of the run's precision.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import command, contenders, training_tables
from benchmarks.command import Record
from benchmarks.contenders import (
    COMPILED,
    EAGER,
    NANOGPT,
    OURS,
    SIZES,
    TORCH_NORMS,
    Contender,
    PeerError,
    built,
    check_models,
    lineup,
    token_stream,
)
from configs import Config, ConfigError, machine
from data import Batches
from measure.comparison import cycle_times
from measure.progress import progress, show_current
from measure.schedule import LEAD_IN, block_length, run_blocks
from measure.statistics import LEAST_SAMPLES, paired_ratio, spread
from measure.timing import allocated_gb, describe, free_memory
from model import GPT
from training.attribution import by_name, launches, profile_step, shares
from training.clock import StepClock
from training.environment import peak_flops
from training.precision import Precision

PROGRAM = "train_step"
KEY = ("mode", "dropout", "contender", "layers", "heads", "width", "context", "vocabulary", "batch_size", "precision")
ROUNDS = (12, 6)  # cycles of blocks by default, and with --quick: in multiples of three contenders no one is favoured
KERNELS_KEPT = 20  # of the longest, in a record
# How far the mean losses of two ways to compute the same may be apart, relatively: one rounding of a logit is 2^-9 in bf16.
ROUNDING = {torch.bfloat16: 2e-3, torch.float16: 5e-4, torch.float32: 1e-5}


def options_of(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = command.parser(PROGRAM, __doc__.splitlines()[0], ROUNDS)
    parser.add_argument("--nanogpt", type=Path, metavar="PATH", help="a checkout of nanoGPT (left out, and said to be missing)")
    parser.add_argument(
        "--ours", nargs="+", action="append", default=[], metavar="KEY=VALUE",
        help="one more contender: our step with these overrides; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--common", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of all, nanoGPT's sizes among them"
    )
    parser.add_argument("--size", choices=tuple(SIZES), help="(gpt2; tiny on the CPU)")
    parser.add_argument("--mode", nargs="+", choices=(EAGER, COMPILED), help="(both; eager alone on the CPU)")
    parser.add_argument("--dropout", nargs="+", type=float, help="(0 and 0.1; 0 alone with --quick)")
    parser.add_argument("--no-profile", action="store_true", help="leave the breakdown out")
    options = command.parse(parser, argv, ROUNDS)
    on_cpu = options.device == "cpu"
    options.size = options.size or ("tiny" if on_cpu else "gpt2")
    options.mode = options.mode or ([EAGER] if on_cpu else [EAGER, COMPILED])
    options.dropout = options.dropout or ([0.0] if options.quick else [0.0, 0.1])
    return parser, options


def measure_cell(
    found: dict[str, Config],
    module: ModuleType | None,
    precision: Precision,
    mode: str,
    rounds: int,
    profiled: bool,
    done: Callable[[str], None],
) -> list[Record]:
    """A record for each contender.

    Args:
        done: told what is done after each unit of work, in all those of `work_of`.

    Raises:
        PeerError: the first steps' losses differ by more than rounding, without dropout.
    """
    cfg, device = found[OURS], precision.device
    torch.compiler.reset()
    # one compiled model is one entry for the code of GPT.forward
    torch._dynamo.config.recompile_limit = max(8, 2 * len(found))
    warm_libraries(precision)
    entrants, errors = built(found, module, precision, mode)
    batches = Batches(token_stream(cfg), context=cfg.model.context, batch_size=cfg.train.batch_size, seed=cfg.seed)
    warm: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}  # of the first step, and of the last
    for name in list(entrants):
        before = allocated_gb(device)
        try:
            warm[name], losses[name] = block_of(entrants[name], batches, range(cfg.ablate.warmup_steps), device)[:2]
            entrants[name].resident_gb += allocated_gb(device) - before
        except Exception as error:  # a contender's failure is a result
            errors[name] = describe(error)
            del entrants[name]
            free_memory(device)
        done(f"{mode}, {name}: warm-up")
    if cfg.model.dropout == 0:
        check_losses({name: losses[name][0] for name in entrants}, ROUNDING[precision.dtype])
    steps = block_length(list(warm.values())) if warm else 0
    steps = cfg.ablate.block_steps or steps
    taken = dict.fromkeys(entrants, cfg.ablate.warmup_steps)
    peaks: dict[str, list[float]] = {name: [] for name in entrants}

    def block(name: str, cycle: int) -> list[float]:
        held = allocated_gb(device)
        todo = range(taken[name], taken[name] + LEAD_IN + steps)
        times, (_, losses[name][1]), peak_gb = block_of(entrants[name], batches, todo, device, LEAD_IN)
        taken[name] = todo.stop
        if peak_gb is not None:
            peaks[name].append(peak_gb - held + entrants[name].resident_gb)  # other contenders' memory is not its own
        done(f"{mode}, {name}: cycle {cycle} of {rounds}")
        return times

    blocks = run_blocks(block, rounds, cfg.seed, list(entrants))
    records = []
    our_flops = next((c.model.flops_per_token() for c in entrants.values() if isinstance(c.model, GPT)), None)
    versus = next((name for name in (NANOGPT, TORCH_NORMS) if name in entrants), None)
    for name in [*found, *([NANOGPT] if module is not None else [])]:
        record: Record = {**cell_of(found.get(name, cfg), mode, name, precision)}
        if name in entrants:
            model = entrants[name].model
            flops = model.flops_per_token() if isinstance(model, GPT) else our_flops
            record |= times_of(blocks[name], found[OURS], flops, precision)
            record |= {"peak_gb": round(max(peaks[name]), 6) if peaks[name] else None}
            record |= {"first_loss": round(losses[name][0], 6), "last_loss": round(losses[name][1], 6)}
            if versus is not None and name != versus:
                ratio = paired_ratio(cycle_times(blocks[versus]), cycle_times(blocks[name]))
                record |= {"versus": versus, "speedup": round(ratio.median, 4)}
                if rounds >= LEAST_SAMPLES:
                    record |= {"speedup_95": [round(ratio.low, 4), round(ratio.high, 4)]}
            if profiled:
                record |= breakdown_of(entrants[name], batches, taken[name], mode, device, record["ms"])
                done(f"{mode}, {name}: profile")
            record |= {"blocks_ms": [[round(ms, 4) for ms in times] for times in blocks[name]]}
        else:
            record |= {"ms": None, "error": errors[name]}
        records.append(record)
    return records


def block_of(
    contender: Contender, batches: Batches, todo: range, device: torch.device, lead_in: int = 0
) -> tuple[list[float], list[float], float | None]:
    """Takes steps one by one: milliseconds after the lead-in, losses of the first and the last step, peak GiB."""
    clock = StepClock(device, warmup=lead_in)
    drawn, losses = [batches[step] for step in todo], []
    for step, batch in zip(todo, drawn, strict=True):
        with clock.step():
            loss = contender.step(batch, step)
        losses.append(loss)
    return list(clock.steps_ms), [losses[0].item(), losses[-1].item()], clock.peak_gb


def check_losses(first: dict[str, float], tolerance: float) -> None:
    """Checks that all timed steps compute the same loss, in their own precision. Raises PeerError."""
    if not first:
        return
    middle = median(first.values())
    for name, loss in first.items():
        if not abs(loss - middle) <= tolerance * middle:
            others = ", ".join(f"{other} {value:.6f}" for other, value in first.items())
            raise PeerError(
                f"{name}: its first loss is {loss:.6f}, further from the others' than rounding explains ({tolerance:g} of it): "
                f"{others}. Contenders that compute different things are not timed against each other."
            )


def times_of(blocks: list[list[float]], cfg: Config, flops: int | None, precision: Precision) -> Record:
    """Milliseconds a step over all counted blocks, and the rates that follow from the median. `flops` are a token's."""
    times = spread([ms for block in blocks for ms in block])
    tokens_per_s = 1000 * cfg.train.batch_size * cfg.model.context / times.median
    peak = peak_flops(precision.device, precision.dtype)
    mfu = flops * tokens_per_s / peak if peak and flops else None
    return {
        "ms": round(times.median, 4),
        "p10": round(times.p10, 4),
        "p90": round(times.p90, 4),
        "tokens_per_s": round(tokens_per_s, 1),
        "mfu": None if mfu is None else round(mfu, 4),
        "steps": sum(map(len, blocks)),
    }


def breakdown_of(contender: Contender, batches: Batches, step: int, mode: str, device: torch.device, step_ms: float) -> Record:
    """Milliseconds of a step by kind of work, of GPU kernels or of CPU operators. `idle_ms` is the rest of the step.

    Eager nanoGPT's dropouts and norms are known by their kernels' names; its residual adds, and the casts of what its norms
    give, run the same kernels as any other elementwise work and count as other.
    """
    batch, marked = batches[step], contender.model if mode == EAGER else None
    kernels = profile_step(lambda: _discard(contender.step(batch, step)), device, marked)
    found = shares(kernels)
    busy = sum(share.ms for share in found)
    return {
        "breakdown_ms": {share.group: round(share.ms, 4) for share in found},
        "idle_ms": round(max(0.0, step_ms - busy), 4) if device.type == "cuda" else None,
        "launches": launches(kernels),
        "kernels": [[k.name[:120], k.group, round(k.ms, 4), round(k.launches, 1)] for k in by_name(kernels)[:KERNELS_KEPT]],
    }


def _discard(_: Tensor) -> None: ...


def cell_of(cfg: Config, mode: str, name: str, precision: Precision) -> Record:
    m = cfg.model
    return {
        "mode": mode,
        "dropout": m.dropout,
        "contender": name,
        "layers": m.layers,
        "heads": m.heads,
        "width": m.width,
        "context": m.context,
        "vocabulary": m.vocab_size,
        "batch_size": cfg.train.batch_size,
        "precision": precision.name,
    }


def warm_libraries(precision: Precision) -> None:
    """Runs a product forward and backward, so that library workspaces do not count as the first contender's memory."""
    x = torch.zeros(64, 64, device=precision.device, requires_grad=True)
    with precision.autocast():
        y = nn.functional.linear(x, x, x[0])
    y.float().sum().backward()


def work_of(contenders: int, rounds: int, profiled: bool) -> int:
    """How often measure_cell calls `done`."""
    return contenders * (1 + 2 * (1 + rounds) + profiled)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser, options = options_of(argv)
    if options.plot_only:
        show(command.recorded(options.output / f"{PROGRAM}.json"), options.output)
        return
    device = command.pick_device(parser, options)
    try:
        module = contenders.load_nanogpt(options.nanogpt) if options.nanogpt else None
        if module is None:
            print("missing: nanoGPT (name a checkout of it by --nanogpt PATH)", file=sys.stderr)
        cells = [(dropout, lineup(options, dropout)) for dropout in options.dropout]
        if module is not None:
            check_models(module, {name: cfg for _, found in cells for name, cfg in found.items()})
        results = command.open_results(
            PROGRAM, KEY, options, device, [], argv, {NANOGPT: contenders.fingerprint(module)} if module is not None else None
        )
        count = len(options.ours) + 2 + (module is not None)
        units = len(cells) * len(options.mode) * work_of(count, options.rounds, not options.no_profile)
        with progress(units, PROGRAM, "block") as bar:
            for mode in options.mode:
                for dropout, found in cells:
                    precision = Precision.settle(found[OURS].train.precision, machine.inspect(found[OURS].device))

                    def done(what: str, where: str = f"dropout {dropout:g}") -> None:
                        bar.update()
                        show_current(bar, f"{where}, {what}")

                    results.add(measure_cell(found, module, precision, mode, options.rounds, not options.no_profile, done))
                    free_memory(device)
    except (ConfigError, PeerError) as error:
        raise SystemExit(f"error: {error}") from error
    show({"environment": results.environment, "records": results.records}, results.path.parent)


def show(file: dict[str, Any], folder: Path) -> None:
    print(training_tables.steps_text(file["records"]))
    if picture := training_tables.plot_steps(file, folder):
        print(f"\nplot: {picture}")


if __name__ == "__main__":
    command.run(main)
