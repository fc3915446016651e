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
from ablation.arms import Arm, build_arm, check_initial_weights, load_initial_weights, switched
from ablation.gpu_time import attribute, loss_bytes, norm_bytes
from ablation.kept import Cycle, Kept
from ablation.masks import check_masks
from ablation.records import Ablation, Attribution, Cell
from ablation.same import check_same
from configs import Config, ConfigError, command_line, keys, machine, rules
from configs.rules import NANOGPT
from configs.schema import DropoutMasks, NormImpl, Placement, Switch
from data import Batches, Corpus, load_corpus
from measure.attribution import KernelTime, by_name, launches, profile_step, shares
from measure.comparison import AGAIN, FUSED, TORCH, compare_all, conclusion, cycle_times
from measure.gpu import gpu_state_during
from measure.progress import progress
from measure.sources import fingerprints
from measure.tables import capital, label
from measure.timing import copy_bandwidth, free_memory, side_stream
from model import GPT
from training.console import show, take_any_encoding
from training.environment import environment
from training.interrupt import Stopped, exit_on_signals
from training.precision import Precision
from training.storage import StorageError, claim, relative, replace_text
from training.tracking import settle

EAGER, COMPILED = "eager", "compiled"
OUT_OF_MEMORY = 3  # exit code
SWEPT = (
    "The configuration below is the first of those that were swept; what is compared and train.compile are set by ablate.py."
)


@dataclass(frozen=True)
class Variant:
    """One of the swept configurations, whose arms differ in norm.impl alone, or in loss.impl."""

    cfg: Config
    overrides: dict[str, str]  # the swept keys
    refused: dict[str, str]  # arms that this configuration can't have, and why

    @property
    def modes(self) -> list[str]:
        # compiled is torch in a model that is compiled whole, the norms and the loss alike
        return [EAGER, COMPILED] if self.cfg.train.compile and self.subject != NormImpl.compiled else [EAGER]

    @property
    def subject(self) -> str:
        """The arm that the verdict is about: fused, or else the last."""
        ours = [arm for arm in self.cfg.ablate.arms if arm != NANOGPT and arm not in self.refused]
        return FUSED if FUSED in ours else ours[-1]

    def arms(self, mode: str) -> list[str]:
        """The names of a cell's arms: the control first, the subject last, so that all pairs have it as their second."""
        left = {TORCH, self.subject, *self.refused}
        if mode == COMPILED:
            left.add(NormImpl.compiled)  # which there is torch
        others = [arm for arm in self.cfg.ablate.arms if arm not in left]
        return [TORCH, AGAIN, *others, self.subject]

    @property
    def tested(self) -> list[str]:
        """The arms that have a parity test: eager ones that can take the shared dropout masks.

        The error that it allows is that of norm sites whose sums are taken in another order, so a loss has none.
        """
        if self.cfg.ablate.switch is not Switch.norm:
            return []
        found = []
        for arm in self.arms(EAGER)[2:]:
            if arm != NANOGPT:
                cfg = switched(self.cfg, arm)
                cfg.norm.dropout_masks = DropoutMasks.shared
                found += [] if any(rules.refused_by_library(cfg, machine.inspect(cfg.device))) else [arm]
        return found if self.cfg.ablate.parity_seeds else []


def ablate(variants: Sequence[Variant], command: str, folder: Path, cycles: Kept) -> Ablation:
    """Times every variant and compares its losses.

    `folder` gets the report, its data and its pictures, anew after each cell, so that what was measured stays if a later part
    fails. `cycles` gets each cycle, and may have some.

    Raises:
        ConfigError: the data, the model or the weights of some variant refuse what its config asks for, before any is measured.
        torch.OutOfMemoryError: a model did not fit; the report so far says so.
    """
    replace_text(folder / "config.yaml", configs.to_yaml(variants[0].cfg))
    device = torch.device(machine.inspect(variants[0].cfg.device).device)
    corpora = [corpus_of(variant.cfg) for variant in variants]  # all that may be refused, before anything is measured
    precisions = [Precision.settle(variant.cfg.train.precision, machine.inspect(variant.cfg.device)) for variant in variants]
    sizes = [described(v.cfg, corpus, precision) for v, corpus, precision in zip(variants, corpora, precisions, strict=True)]
    for variant, corpus in zip(variants, corpora, strict=True):
        check_initial_weights(variant.cfg, corpus.tokenizer)
        if variant.cfg.ablate.nanogpt:
            module = nanogpt.load(Path(variant.cfg.ablate.nanogpt))
            off = nanogpt.check_same_model(module, nanogpt.sized(variant.cfg, vocabulary_of(variant.cfg, corpus)))
            show(f"nanoGPT's model and ours compute the same: loss and gradients in fp64 agree to {off:.0e}")
    if len(set(sizes)) > 1:
        sizes = [f"{label(variant.overrides)}: {size}" for variant, size in zip(variants, sizes, strict=True)]
    began = time.monotonic()
    parts = sum(len(variant.modes) + bool(variant.tested) for variant in variants)
    done = 0
    found = Ablation(
        cells=[],
        parity=[],
        environment=facts(device),
        command=command,
        config=(folder / "config.yaml").read_text(encoding="utf-8"),
        kernels=ops.backend_for(device) != "PyTorch reference",
        notes=[*([SWEPT] if len(variants) > 1 else []), *dict.fromkeys(sizes)],
    )
    with progress(sum(calls_of(variant, device) for variant in variants), "ablate", "unit") as bar:
        try:
            for variant, corpus, precision in zip(variants, corpora, precisions, strict=True):
                for mode in variant.modes:
                    bar.set_description(label(variant.overrides, mode))
                    free_memory(device)
                    cell, stop = measure(variant, mode, precision, corpus, cycles, found.notes, bar.update)
                    found.cells.append(cell)
                    if stop:
                        whole = len(cell.arms[TORCH].blocks_ms) // 2
                        found.notes.append(f"{label(variant.overrides, mode)} was stopped after {whole} cycles.")
                    done += not stop
                    keep(found, folder, began, done, parts)
                    if stop:
                        raise stop
                if tested := variant.tested:
                    bar.set_description(label(variant.overrides, "parity"))
                    free_memory(device)
                    how = {"overrides": variant.overrides, "progress": bar.update}
                    found.parity.extend(parity.parity(variant.cfg, precision, corpus, tested, **how))
                    done += 1
                    keep(found, folder, began, done, parts)
        except torch.OutOfMemoryError:
            found.notes.append("Out of memory.")
            keep(found, folder, began, done, parts)
            raise
    cycles.remove()  # the report has them
    return found


def facts(device: torch.device) -> dict[str, Any]:
    return environment(device) | {"sources": fingerprints()}


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


def measure(
    variant: Variant,
    mode: str,
    precision: Precision,
    corpus: Corpus,
    cycles: Kept,
    notes: list[str],
    done: Callable[[], object],
) -> tuple[Cell, BaseException | None]:
    """The cell of a variant, eager or compiled, and what stopped it early: None, or the exception to raise.

    `notes` gets a sentence if some of its cycles are of an earlier process.
    """
    cfg, device = variant.cfg, precision.device
    torch.compiler.reset()
    arms = arms_of(variant, mode, precision, corpus)
    check_same([arm for arm in arms.values() if arm.other is None])
    batches = Batches(corpus.train.tokens, context=cfg.model.context, batch_size=cfg.train.batch_size, seed=cfg.seed)
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
    if NANOGPT in times and not cfg.model.dropout:
        nanogpt.check_first_loss({name: of.first_loss for name, of in times.items()}, precision.dtype)
    arms = {name: arms[name] for name in times}
    left_out = {**variant.refused, **failed}
    masked = [arm for name, arm in arms.items() if name != AGAIN and not stop]
    if mode == COMPILED and NormImpl.compiled in cfg.ablate.arms:
        left_out[NormImpl.compiled] = "In a model that is compiled whole it is torch."
    cell = Cell(
        overrides=variant.overrides,
        mode=mode,
        tokens_per_step=cfg.train.batch_size * cfg.model.context,
        arms=times,
        subject=variant.subject,
        pairs=compare_all({name: of.blocks_ms for name, of in times.items()}),
        verdict="",
        left_out=left_out,
        masks=[masks for arm in masked if (masks := check_masks(arm, compiled=mode == COMPILED))],
    )
    cell = replace(cell, verdict=conclusion(cell.subject, {base: cell.against(base) for base in cell.opponents}, cell.control))
    if stop or not on_gpu(device):
        return cell, stop
    kernels = {}
    for name, arm in arms.items():
        kernels[name] = profiled(arm, batches, mode)
        done()
    gpu: dict[str, list[dict[str, str]]] = {name: [] for name in arms if name != AGAIN}
    for name in [*gpu, *reversed(gpu)]:  # heat that gathers meanwhile is nobody's
        gpu[name].append(gpu_state_during(step_of(arms[name], batches), device))
    counted = {name: replace(of, launches=launches(kernels[name])) for name, of in times.items()}
    vocabulary = vocabulary_of(cfg, corpus)
    return replace(cell, arms=counted, gpu=gpu, attribution=attribution_of(cell, kernels, cfg, precision, vocabulary)), None


def attribution_of(
    cell: Cell, kernels: dict[str, list[KernelTime]], cfg: Config, precision: Precision, vocabulary: int
) -> Attribution:
    of_norms = cfg.ablate.switch is Switch.norm
    steps = {base: statistics.median(cycle_times(cell.arms[base].blocks_ms)) for base in cell.opponents}
    found = attribute(
        {name: shares(of) for name, of in kernels.items()},
        steps,
        cell.subject,
        norm_bytes(cfg, precision) if of_norms else loss_bytes(cfg, precision, vocabulary),
        copy_gb_per_s(precision.device),
        "norm" if of_norms else "loss",
    )
    return replace(found, kernels={name: by_name(of) for name, of in kernels.items() if name != AGAIN})


def profiled(arm: Arm, batches: Batches, mode: str) -> list[KernelTime]:
    """The kernels of a training step. Norm sites of eager models are marked; compiled kernels name what they fuse."""
    return profile_step(step_of(arm, batches), arm.precision.device, arm.state.model if mode == EAGER else None)


def step_of(arm: Arm, batches: Batches) -> Callable[[], None]:
    """A training step of the arm, always of the same batch."""
    number = arm.cfg.ablate.warmup_steps
    batch = batches[number]

    def one() -> None:
        arm.step(batch, number)

    return one


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


@cache
def copy_gb_per_s(device: torch.device) -> float:
    """The card's own copy bandwidth, measured once in this process."""
    with side_stream(device):
        return copy_bandwidth(device)


def described(cfg: Config, corpus: Corpus, precision: Precision) -> str:
    """The sizes of a step. A smaller vocabulary and a smaller batch give the norms a larger share of the time."""
    with torch.device("meta"), command_line.as_config_errors():
        model = GPT(cfg.model, cfg.norm, corpus.tokenizer.vocab_size, cfg.loss)
    return (
        f"A model of {model.parameter_count():,} parameters, {cfg.model.size}, a vocabulary of "
        f"{model.vocab_size:,}; {cfg.train.batch_size} × {cfg.model.context} tokens a step, in {precision}."
        + (f" It begins with the weights of {cfg.init_from}." if cfg.init_from else "")
        + f" Compared: {cfg.ablate.switch.key}. All arms{' but nanogpt' if NANOGPT in cfg.ablate.arms else ''} have "
        + (f"loss.impl={cfg.loss.impl}." if cfg.ablate.switch is Switch.norm else f"norm.impl={cfg.norm.impl}.")
        + ("" if cfg.norm.placement is Placement.pre else " The Amdahl limit counts the bytes of norm.placement=pre.")
    )


def vocabulary_of(cfg: Config, corpus: Corpus) -> int:
    with torch.device("meta"), command_line.as_config_errors():
        return GPT(cfg.model, cfg.norm, corpus.tokenizer.vocab_size).vocab_size


def keep(found: Ablation, folder: Path, began: float, done: int, parts: int) -> None:
    """Writes the report so far. With fewer parts done than there are, the report says that it is not finished."""
    found.environment["minutes"] = round((time.monotonic() - began) / 60, 1)
    if done < parts:
        found = replace(found, unfinished=f"{done} of {parts} parts")
    records.save(found, folder)
    report.write(found, folder)


def corpus_of(cfg: Config) -> Corpus:
    with command_line.as_config_errors():
        return load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)


def arms_of(variant: Variant, mode: str, precision: Precision, corpus: Corpus) -> dict[str, Arm]:
    vocabulary, compiled = corpus.tokenizer.vocab_size, mode == COMPILED
    arms: dict[str, Arm] = {}
    for name in variant.arms(mode):
        if name == NANOGPT:
            module = nanogpt.load(Path(variant.cfg.ablate.nanogpt or ""))
            arms[name] = nanogpt.nanogpt_arm(module, arms[TORCH], compiled=compiled)
            continue
        arms[name] = build_arm(name, variant.cfg, precision, vocabulary, compiled=compiled, like=arms.get(TORCH))
        if name == TORCH:
            load_initial_weights(arms[TORCH], corpus.tokenizer)
    return arms


def calls_of(variant: Variant, device: torch.device) -> int:
    """How often the bar moves for a variant."""
    profiles = on_gpu(device)
    counts = [len(variant.arms(mode)) for mode in variant.modes]
    timed = sum(timing.calls_of(arms, variant.cfg.ablate.cycles) + profiles * arms for arms in counts)
    return timed + (parity.steps_of(variant.cfg, len(variant.tested)) if variant.tested else 0)


def variants_of(arguments: Sequence[str]) -> list[Variant]:
    """The configurations of a command line. key=A,B gives two.

    Raises:
        ConfigError: a name, a value or a combination that can't be used, or a key whose values are what is compared.
    """
    if {"-m", "--multirun"} & set(arguments):
        raise ConfigError("-m: an ablation sweeps without it, by several values of a key: norm.kind=layernorm,rmsnorm.")
    found = []
    swept = {o.get_key_element(): o.input_line for o in configs.parse(arguments) if o.is_sweep_override()}
    if "folder" in swept:
        raise ConfigError(f"{swept['folder']}: an ablation has one folder. Name one.")
    for job in configs.jobs(arguments):
        rules.check_ablation(job)
        cfg = configs.compose_only(job)
        on = machine.inspect(cfg.device)
        # As the arms will have it, whatever the config says.
        cfg = switched(cfg, TORCH)
        cfg.train.compile = on.device == "cuda"
        if cfg.ablate.compile is not None:
            cfg.train.compile = cfg.ablate.compile
        rules.check(cfg, on)
        rules.check_arms(cfg)
        settle(cfg.logging)
        pairs = (override.partition("=")[::2] for override in job)
        found.append(Variant(cfg, {key: value for key, value in pairs if key in swept}, refused_arms(cfg, on)))
        if found[-1].overrides in [variant.overrides for variant in found[:-1]]:
            raise ConfigError(f"{label(found[-1].overrides)} comes twice in {' '.join(arguments)}. Leave one.")
    for variant in found:
        for arm, why in variant.refused.items():
            if variant.subject == TORCH or all(arm in other.refused for other in found):
                raise ConfigError(f"ablate.arms: {arm} can't take part in {label(variant.overrides)}. {why}")
    return found


def refused_arms(cfg: Config, on: machine.Machine) -> dict[str, str]:
    """The arms that this configuration can't have, and why."""
    found = {}
    for arm in cfg.ablate.arms:
        if arm != NANOGPT and (why := " ".join(rules.refused_by_library(switched(cfg, arm), on))):
            found[arm] = why
    return found


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


def exit_code(stop: KeyboardInterrupt | Stopped) -> int:
    return 130 if isinstance(stop, KeyboardInterrupt) else int(stop.code)  # type: ignore[arg-type]  # of a signal: a number


def help_text() -> str:
    described = command_line.describe_keys(Config()).splitlines()
    own = "".join(f"{line}\n" for line in described if line.strip().startswith("ablate."))
    refused = "".join(f"  {key:<33}  {why}\n" for key, why in keys.not_in_ablate().items())
    return (
        f"{__doc__}\nKeys of its own, with their defaults:\n\n{own}\n"
        "All others are those of `python train.py --help`, but for these, which are refused:\n\n"
        f"{refused}  {'the impl of ablate.switch':<33}  is what ablate.py compares. Use ablate.arms.\n\n"
        "The report goes into a new folder: runs/TIME_ablation/, or folder=PATH."
    )


if __name__ == "__main__":
    sys.exit(main())
