"""What do fused norms buy, and what do they cost? The same training step with several norms, side by side.

python ablate.py                                             the default run's model and data
python ablate.py model=gpt2 norm.kind=layernorm,rmsnorm model.dropout=0.0,0.1
python ablate.py ablate.arms=[torch,compiled,liger,fused]    another library's norms too, where it is installed
python ablate.py ablate.arms=[torch,compiled,fused,nanogpt] ablate.nanogpt=../nanoGPT
python ablate.py init_from=runs/FOLDER                       in the weights of a run, of its model and its tokenizer
python ablate.py … resume=runs/FOLDER                        goes on behind the last cycle of an ablation that was stopped
python ablate.py --help                                      what it measures, and the keys it has of its own

Ends with exit code 1 if parity fails or the disk is full, 2 if the configuration is wrong, 3 if the device has too little
memory, 130, 143, 129 and 138 by Ctrl-C, SIGTERM, SIGHUP and SIGUSR1, which keep all finished cycles.
"""

import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback where Ctrl-C comes during the imports, which take seconds

import torch

import configs
import ops
from ablation import kept, nanogpt, parity, records, report, timing, tracking
from ablation.arms import Arm, build_arm, check_initial_weights, check_same, load_initial_weights
from ablation.gpu_time import attribute, loss_bytes, norm_bytes
from ablation.kept import Cycle, Kept
from ablation.masks import check_masks
from ablation.records import Ablation, Cell
from ablation.variants import COMPILED, EAGER, Variant, variants_of
from configs import Config, ConfigError, command_line, machine, rules
from configs.rules import NANOGPT
from configs.schema import NormImpl, Placement, Switch
from data import Batches, Corpus, load_corpus
from measure.attribution import by_name, launches, profile_step, shares
from measure.comparison import AGAIN, TORCH, compare_all, conclusion, cycle_times
from measure.environment import environment
from measure.gpu import gpu_state_during
from measure.progress import progress
from measure.sources import fingerprints
from measure.tables import capital, label
from measure.timing import copy_bandwidth, free_memory, side_stream
from model import GPT
from training.console import show, take_any_encoding
from training.interrupt import Stopped, exit_on_signals
from training.precision import Precision
from training.storage import StorageError, claim, relative, replace_text

OUT_OF_MEMORY = 3  # exit code
SWEPT = (
    "The configuration below is the first of those that were swept; what is compared and train.compile are set by ablate.py."
)


def main(arguments: Sequence[str] | None = None) -> int:
    take_any_encoding()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "--help"} & set(arguments):
        show(help_text())
        return 0
    folder: Path | None = None
    exit_on_signals()
    try:
        machine.refuse_ranks("ablate.py")
        variants = variants_of(arguments)
        folder, cycles = place(variants)
        with unless_empty(folder):
            found = ablate(variants, shlex.join(["python", "ablate.py", *arguments]), folder, cycles)
    except ConfigError as error:
        return command_line.refuse(error)
    except StorageError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        hint = "Lower train.batch_size, raise train.accumulation, or leave parity out: ablate.parity_seeds=0."
        print(f"out of memory: {str(error).splitlines()[0]}\n{hint}\nreport so far: {folder}/report.md", file=sys.stderr)
        return OUT_OF_MEMORY
    except (KeyboardInterrupt, Stopped) as stop:
        told = "stopped before the first cycle was measured"
        if folder is not None and (folder / kept.FILE).is_file():
            told = f"stopped; cycles kept: {cycles}. To go on: the same command with resume={relative(folder)}"
        if folder is not None and (folder / "report.md").is_file():
            told += f"\nreport so far: {relative(folder)}/report.md"
        print(told, file=sys.stderr)
        return exit_code(stop)
    show(report.table(found))
    show(f"report: {relative(folder)}/report.md")
    try:
        show(f"W&B: {tracking.log(found, {tuple(variant.overrides.items()): variant.cfg for variant in variants}, folder)}")
    except Exception as error:  # the report is there
        print(f"W&B does not have all of it: {type(error).__name__}: {error}", file=sys.stderr)
    except (KeyboardInterrupt, Stopped) as stop:
        print("stopped; the report is whole, W&B does not have all of it", file=sys.stderr)
        return exit_code(stop)
    return 0 if all(one.holds for one in found.parity) else 1


# ---- the ablation: each variant eager and compiled, then its parity ----------------------------------------------------------


def ablate(variants: Sequence[Variant], command: str, folder: Path, cycles: Kept) -> Ablation:
    """Times every variant and compares its losses.

    `folder` gets the report, its data and its pictures, anew after each cell, so that what was measured stays if a later part
    fails. `cycles` gets each cycle, and may have some.

    Raises:
        ConfigError: the data, the model or the weights of some variant refuse what its config asks for, before any is measured.
        torch.OutOfMemoryError: a model did not fit; the report so far says so.
    """
    replace_text(folder / "config.yaml", configs.to_yaml(variants[0].cfg))
    works = [prepare(variant) for variant in variants]
    device = works[0].precision.device
    sizes = [work.size for work in works]
    if len(set(sizes)) > 1:
        sizes = [f"{label(work.overrides)}: {work.size}" for work in works]
    found = Ablation(
        cells=[],
        parity=[],
        environment=facts(device),
        command=command,
        config=(folder / "config.yaml").read_text(encoding="utf-8"),
        kernels=ops.backend_for(device) != "PyTorch reference",
        notes=[*([SWEPT] if len(variants) > 1 else []), *dict.fromkeys(sizes)],
    )
    began, parts = time.monotonic(), sum(len(variant.modes) + bool(variant.tested) for variant in variants)

    def write() -> None:
        """The report so far. With fewer parts done than there are, it says that it is not finished."""
        found.environment["minutes"] = round((time.monotonic() - began) / 60, 1)
        so_far = replace(found, unfinished=f"{done} of {parts} parts") if done < parts else found
        records.save(so_far, folder)
        report.write(so_far, folder)

    done = 0
    with progress(sum(map(calls_of, works)), "ablate", "unit") as bar:
        try:
            for work in works:
                for mode in work.variant.modes:
                    bar.set_description(label(work.overrides, mode))
                    free_memory(device)
                    cell, stop = measure(work, mode, cycles, found.notes, bar.update)
                    found.cells.append(cell)
                    if stop:
                        whole = len(cell.arms[TORCH].blocks_ms) // 2
                        found.notes.append(f"{label(work.overrides, mode)} was stopped after {whole} cycles.")
                    done += not stop
                    write()
                    if stop:
                        raise stop
                if tested := work.variant.tested:
                    bar.set_description(label(work.overrides, "parity"))
                    free_memory(device)
                    how = {"overrides": work.overrides, "progress": bar.update}
                    found.parity.extend(parity.parity(work.cfg, work.precision, work.corpus, tested, **how))
                    done += 1
                    write()
        except torch.OutOfMemoryError:
            found.notes.append("Out of memory.")
            write()
            raise
    cycles.remove()  # the report has them
    return found


def facts(device: torch.device) -> dict[str, Any]:
    return environment(device) | {"sources": fingerprints()}


@dataclass(frozen=True)
class Work:
    """A variant with what it is measured by."""

    variant: Variant
    precision: Precision
    corpus: Corpus
    vocabulary: int  # of the embedding
    size: str  # of a step, in words

    @property
    def cfg(self) -> Config:
        return self.variant.cfg

    @property
    def overrides(self) -> dict[str, str]:
        return self.variant.overrides


def prepare(variant: Variant) -> Work:
    """All that may be refused.

    Raises:
        ConfigError: the data, the model or the weights refuse what the config asks for.
    """
    cfg = variant.cfg
    precision = Precision.settle(cfg.train.precision, machine.inspect(cfg.device))
    with command_line.as_config_errors():
        corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
        with torch.device("meta"):
            model = GPT(cfg.model, cfg.norm, corpus.tokenizer.vocab_size, cfg.loss)
    check_initial_weights(cfg, corpus.tokenizer)
    if cfg.ablate.nanogpt:
        module = nanogpt.load(Path(cfg.ablate.nanogpt))
        off = nanogpt.check_same_model(module, nanogpt.sized(cfg, model.vocab_size))
        show(f"nanoGPT's model and ours compute the same: loss and gradients in fp64 agree to {off:.0e}")
    # A smaller vocabulary and a smaller batch give the norms a larger share of the time.
    size = (
        f"A model of {model.parameter_count():,} parameters, {cfg.model.size}, a vocabulary of "
        f"{model.vocab_size:,}; {cfg.train.batch_size} × {cfg.model.context} tokens a step, in {precision}."
        + (f" It begins with the weights of {cfg.init_from}." if cfg.init_from else "")
        + f" Compared: {cfg.ablate.switch.key}. All arms{' but nanogpt' if NANOGPT in cfg.ablate.arms else ''} have "
        + (f"loss.impl={cfg.loss.impl}." if cfg.ablate.switch is Switch.norm else f"norm.impl={cfg.norm.impl}.")
        + ("" if cfg.norm.placement is Placement.pre else " The Amdahl limit counts the bytes of norm.placement=pre.")
    )
    return Work(variant, precision, corpus, model.vocab_size, size)


def calls_of(work: Work) -> int:
    """How often the bar moves for a variant."""
    counts = [len(work.variant.arms(mode)) for mode in work.variant.modes]
    timed = sum(timing.calls_of(arms, work.cfg.ablate.cycles) + on_gpu(work) * arms for arms in counts)
    return timed + parity.steps_of(work.cfg, len(work.variant.tested)) * bool(work.variant.tested)


def on_gpu(work: Work) -> bool:
    return work.precision.device.type == "cuda"


# ---- one cell ----------------------------------------------------------------------------------------------------------------


def measure(
    work: Work, mode: str, cycles: Kept, notes: list[str], done: Callable[[], object]
) -> tuple[Cell, BaseException | None]:
    """The cell of a variant, eager or compiled, and what stopped it early: None, or the exception to raise.

    `notes` gets a sentence if some of its cycles are of an earlier process.
    """
    variant, cfg = work.variant, work.cfg
    torch.compiler.reset()
    arms = arms_of(work, mode)
    check_same([arm for arm in arms.values() if arm.other is None])
    batches = Batches(work.corpus.train.tokens, context=cfg.model.context, batch_size=cfg.train.batch_size, seed=cfg.seed)
    may_fail = {NANOGPT, *rules.LIBRARIES} - {variant.subject}

    def earlier(names: Collection[str]) -> list[Cycle]:
        if found := cycles.of(variant.overrides, mode, names):
            notes.append(
                f"{capital(label(variant.overrides, mode))}: {len(found)} of {cfg.ablate.cycles} cycles are of an earlier "
                "process, which was stopped. The others follow a warm-up and an uncounted cycle of their own."
            )
        return found

    def keep(*cycle: Any) -> None:
        cycles.add(Cycle(variant.overrides, mode, *cycle))

    times, failed, stop = timing.time_arms(arms, batches, done, may_fail, earlier, keep)
    arms = {name: arms[name] for name in times}
    left_out = {**variant.refused, **failed}
    if mode == COMPILED and NormImpl.compiled in cfg.ablate.arms:
        left_out[NormImpl.compiled] = "In a model that is compiled whole it is torch."
    masks = [check_masks(arm, compiled=mode == COMPILED) for name, arm in arms.items() if name != AGAIN and not stop]
    cell = Cell(
        overrides=variant.overrides,
        mode=mode,
        tokens_per_step=cfg.train.batch_size * cfg.model.context,
        arms=times,
        subject=variant.subject,
        pairs=compare_all({name: of.blocks_ms for name, of in times.items()}),
        verdict="",
        left_out=left_out,
        masks=[one for one in masks if one],
    )
    cell = replace(cell, verdict=conclusion(cell.subject, {base: cell.against(base) for base in cell.opponents}, cell.control))
    return (cell if stop or not on_gpu(work) else profiled(cell, work, arms, batches, done)), stop


def arms_of(work: Work, mode: str) -> dict[str, Arm]:
    tokenizer, compiled = work.corpus.tokenizer, mode == COMPILED
    arms: dict[str, Arm] = {}
    for name in work.variant.arms(mode):
        if name == NANOGPT:
            module = nanogpt.load(Path(work.cfg.ablate.nanogpt or ""))
            arms[name] = nanogpt.nanogpt_arm(module, arms[TORCH], compiled=compiled)
            continue
        arms[name] = build_arm(name, work.cfg, work.precision, tokenizer.vocab_size, compiled=compiled, like=arms.get(TORCH))
        if name == TORCH:
            load_initial_weights(arms[TORCH], tokenizer)
    return arms


def profiled(cell: Cell, work: Work, arms: dict[str, Arm], batches: Batches, done: Callable[[], object]) -> Cell:
    """The cell with its kernels by kind of work, and with clocks and power while each arm takes steps."""
    cfg, precision, number = work.cfg, work.precision, work.cfg.ablate.warmup_steps
    batch = batches[number]  # always the same
    steps = {name: lambda arm=arm: arm.step(batch, number) for name, arm in arms.items()}
    kernels = {}
    for name, arm in arms.items():
        # Norm sites of eager models are marked; compiled kernels name what they fuse.
        kernels[name] = profile_step(steps[name], precision.device, arm.state.model if cell.mode == EAGER else None)
        done()
    gpu: dict[str, list[dict[str, str]]] = {name: [] for name in arms if name != AGAIN}
    for name in [*gpu, *reversed(gpu)]:  # heat that gathers meanwhile is nobody's
        gpu[name].append(gpu_state_during(steps[name], precision.device))
    of_norms = cfg.ablate.switch is Switch.norm
    attribution = attribute(
        {name: shares(of) for name, of in kernels.items()},
        {base: statistics.median(cycle_times(cell.arms[base].blocks_ms)) for base in cell.opponents},
        cell.subject,
        norm_bytes(cfg, precision) if of_norms else loss_bytes(cfg, precision, work.vocabulary),
        copy_gb_per_s(precision.device),
        "norm" if of_norms else "loss",
    )
    return replace(
        cell,
        arms={name: replace(of, launches=launches(kernels[name])) for name, of in cell.arms.items()},
        gpu=gpu,
        attribution=replace(attribution, kernels={name: by_name(of) for name, of in kernels.items() if name != AGAIN}),
    )


@cache
def copy_gb_per_s(device: torch.device) -> float:
    """The card's own copy bandwidth, measured once in this process."""
    with side_stream(device):
        return copy_bandwidth(device)


# ---- folder and help ---------------------------------------------------------------------------------------------------------


def place(variants: Sequence[Variant]) -> tuple[Path, Kept]:
    """The folder of the ablation, and its cycles: a new one, or with `resume` that of an ablation which was stopped.

    Raises:
        ConfigError: it can't be used.
    """
    cfg = variants[0].cfg
    of = kept.facts_of([(v.overrides, v.cfg) for v in variants], facts(torch.device(machine.inspect(cfg.device).device)))
    wanted = Path(cfg.folder or f"runs/{command_line.now()}_ablation")
    if cfg.resume == "auto" and not cfg.folder:
        raise ConfigError("resume=auto goes on with the ablation in folder=PATH. Name it, or use resume=PATH.")
    if cfg.resume not in ("never", "auto"):
        if cfg.folder:
            raise ConfigError(f"folder={cfg.folder}: with resume=PATH an ablation goes on in PATH. Leave folder out.")
        return Path(cfg.resume), Kept.read(Path(cfg.resume), of)
    if cfg.resume == "auto" and (wanted / kept.FILE).is_file():
        return wanted, Kept.read(wanted, of)
    folder = claim(wanted)
    if folder != wanted:
        show(f"{relative(wanted)} has another run already, so this one is kept in {relative(folder)}.")
    return folder, Kept(folder, of)


@contextmanager
def unless_empty(folder: Path) -> Iterator[None]:
    """Removes the folder afterwards if it has no report and no cycle: the data were refused, or no cycle was finished."""
    try:
        yield
    finally:
        if not any((folder / name).is_file() for name in ("report.md", kept.FILE)):
            (folder / "config.yaml").unlink(missing_ok=True)
            with suppress(OSError):  # what others put there stays
                folder.rmdir()


def exit_code(stop: KeyboardInterrupt | Stopped) -> int:
    return 130 if isinstance(stop, KeyboardInterrupt) else int(stop.code)  # type: ignore[arg-type]  # of a signal: a number


def help_text() -> str:
    described = command_line.describe_keys(Config()).splitlines()
    own = "".join(f"{line}\n" for line in described if line.strip().startswith("ablate."))
    refused = "".join(f"  {key:<33}  {why}\n" for key, why in rules.NOT_IN_ABLATE.items())
    return (
        f"{__doc__}\nKeys of its own, with their defaults:\n\n{own}\n"
        "All others are those of `python train.py --help`, but for these, which are refused:\n\n"
        f"{refused}  {'the impl of ablate.switch':<33}  is what ablate.py compares. Use ablate.arms.\n\n"
        "The report goes into a new folder: runs/TIME_ablation/, or folder=PATH."
    )


if __name__ == "__main__":
    sys.exit(main())
