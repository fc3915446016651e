"""What do fused norms buy, and what do they cost? The same training step with several norms, side by side.

python ablate.py                                             the default run's model and data
python ablate.py model=gpt2 norm.kind=layernorm,rmsnorm model.dropout=0.0,0.1
python ablate.py ablate.arms=[torch,compiled,liger,fused]    another library's norms too, where it is installed
python ablate.py ablate.arms=[torch,compiled,fused,nanogpt] ablate.nanogpt=../nanoGPT
python ablate.py init_from=runs/FOLDER                       in the weights of a run, of its model and its tokenizer
python ablate.py … folder=runs/FOLDER resume=auto            goes on behind the last cycle of an ablation that was stopped
python ablate.py ablate.processes=5 …                        in five processes, whose variation enters the intervals
python ablate.py --help                                      what it measures, and the keys it has of its own

Ends with exit code 1 if parity fails or the disk is full, 2 if the configuration is wrong, 3 if the device has too little
memory, 130, 143, 129 and 138 by Ctrl-C, SIGTERM, SIGHUP and SIGUSR1, which keep all finished cycles.
"""

import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback where Ctrl-C comes during the imports, which take seconds

import hydra
import torch

import configs
import ops
from ablation import nanogpt, processes, records, report, timing, tracking
from ablation.arms import Arm, build_arm, check_same
from ablation.config import NANOGPT, REFUSED, Config, Switch
from ablation.gpu_time import attribute, loss_bytes, marked_sites, norm_bytes, turns
from ablation.masks import check_masks
from ablation.parity import judge, run_seed
from ablation.records import Ablation, Cell, Kept, Parity
from ablation.variants import EAGER, GRAPH, IS_COMPILED, IS_GRAPH, PARITY, Variant, facts_of, variants_of
from configs import as_config_errors, keys, machine, rules
from configs.schema import NormImpl, Placement
from data import Batches, Corpus, load_corpus
from measure.attribution import NORM_SITE, QUERY_KEY_SITE, launches, profile_step, shares
from measure.comparison import TORCH, compare_all, cycle_times, is_twin
from measure.environment import environment, libraries
from measure.files import relative, replace_text
from measure.progress import progress
from measure.schedule import Cycle
from measure.sources import code
from measure.tables import label
from measure.timing import copy_bandwidth, free_memory, side_stream
from model import GPT
from training import export
from training.command import start
from training.interrupt import show
from training.place import place
from training.precision import MixedPrecision
from training.tracking import log_group

SHORT_MS = 20.0  # a longer step keeps the GPU busy without a CUDA graph
LESS_MEMORY = "Lower train.batch_size, raise train.accumulation, or leave parity out: ablate.parity_seeds=0."


@hydra.main(config_path="configs", config_name="ablate", version_base=None)
def task(arguments: list[str]) -> int:
    """The exit code of an ablation with these overrides."""
    variants = variants_of(arguments)
    cfg = variants[0].cfg
    if cfg.ablate.processes > 1:
        with place(cfg, LESS_MEMORY) as folder:
            return processes.ablate(sys.argv[1:], cfg.ablate.processes, folder)
    works = [prepare(variant) for variant in variants]
    with place(cfg, LESS_MEMORY) as folder:
        device = torch.device(machine.inspect(cfg.device).device)
        with as_config_errors():
            cycles = Kept(folder / "cycles.jsonl", facts_of(variants, environment(device)))
        if cycles.exit_code is not None and (folder / "report.json").is_file():
            show(f"{relative(folder)} has finished: {relative(folder)}/report.md")
            return cycles.exit_code
        found = ablate(works, shlex.join(["python", "ablate.py", *sys.argv[1:]]), folder, cycles)
        code = 0 if all(one.holds for one in found.parity) else 1
        cycles.add({"exit_code": code})
        show(report.table(found))
        show(f"report: {relative(folder)}/report.md")
        show(f"W&B: {log_group(variants[0].cfg.logging, folder, 'ablation', tracking.runs_of(found, variants, folder))}")
        return code


def main(arguments: Sequence[str] | None = None) -> int:
    return start(task, Config, help_text, arguments)


# ---- before anything is measured: the data, the model and the folder ---------------------------------------------------------


class Work(NamedTuple):
    """A variant with what it is measured by."""

    variant: Variant
    precision: MixedPrecision
    corpus: Corpus
    size: str  # of a step, in words


def prepare(variant: Variant) -> Work:
    """
    Raises:
        ConfigError: the data, the model or the weights refuse what the config asks for.
    """
    cfg = variant.cfg
    precision = MixedPrecision.of(cfg.train.precision, machine.inspect(cfg.device))
    with as_config_errors():
        corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
        with torch.device("meta"):
            model = GPT(cfg.model, cfg.norm, corpus.tokenizer.vocab_size, cfg.loss, cfg.mlp)
    if cfg.init_from:
        export.load(model.to_empty(device="cpu"), cfg.init_from, corpus.tokenizer)
    if cfg.ablate.nanogpt:
        off = nanogpt.check_same_model(nanogpt.load(cfg.ablate.nanogpt), cfg, model.vocab_size)
        show(f"nanoGPT's model and ours compute the same: loss and gradients in fp64 agree to {off:.0e}")
    others = [switch for switch in Switch if switch is not cfg.ablate.switch and keys.counts(switch.key, cfg)]
    held = ", ".join(f"{switch.key}={getattr(cfg, switch).impl}" for switch in others)
    # A smaller vocabulary and a smaller batch give the norms a larger share of the time.
    size = [
        f"A model of {model.parameter_count():,} parameters, {cfg.model.size}, a vocabulary of {model.vocab_size:,};",
        f"{cfg.train.batch_size} × {cfg.model.context} tokens a step, in {precision}. Compared: {cfg.ablate.switch.key}.",
        f"All arms{' but nanogpt' if NANOGPT in cfg.ablate.arms else ''} have {held}.",
        *([f"It begins with the weights of {cfg.init_from}."] if cfg.init_from else []),
        *(["The Amdahl limit counts the bytes of norm.placement=pre."] if cfg.norm.placement is not Placement.pre else []),
    ]
    return Work(variant, precision, corpus, " ".join(size))


# ---- the ablation: each variant eager and compiled, then its parity ----------------------------------------------------------


def ablate(works: Sequence[Work], command: str, folder: Path, cycles: Kept) -> Ablation:
    """Times every variant and compares its losses.

    `folder` gets the report, its data and its pictures, anew after each part, so that what was measured stays if a later part
    fails. `cycles` gets each cycle, and may have some.

    Raises:
        torch.OutOfMemoryError: a model did not fit.
    """
    device = works[0].precision.device
    sizes = list(dict.fromkeys(work.size for work in works))
    if len(sizes) > 1:
        sizes = [f"{label(work.variant.overrides)}: {work.size}" for work in works]
    found = Ablation(
        cells=[],
        parity=[],
        environment=environment(device),
        command=command,
        config=configs.to_yaml(works[0].variant.cfg),
        kernels=ops.backend_for(device) != "PyTorch reference",
        notes=sizes,
        code=code(),
    )
    replace_text(folder / "config.yaml", found.config)
    if str(cycles):
        found.notes.append(
            f"Cycles of an earlier process, which was stopped: {cycles}. The others follow a warm-up of their own."
        )
    began = time.monotonic()
    todo = [(work, part) for work in works for part in work.variant.parts]
    plans = [(work.variant.cfg.ablate, part) for work, part in todo]
    ticks = [plan.parity_seeds if part == PARITY else plan.cycles for plan, part in plans]
    with progress(sum(ticks), "ablate", "cycle") as bar:
        for done, (work, part) in enumerate(todo, start=1):
            bar.set_description(label(work.variant.overrides, part))
            free_memory(device)
            if part in IS_GRAPH and (step := long_step(work.variant, found.cells)):
                words = label(work.variant.overrides, part)
                found.notes.append(f"{words} is left out: the fastest step takes {step:.0f} ms. ablate.graph=true times it.")
            elif part == PARITY:
                found.parity.extend(parity_of(work, cycles, bar.update))
            else:
                found.cells.append(time_cell(work, part, cycles, bar.update))
            bar.update(sum(ticks[:done]) - bar.n)
            found.environment["minutes"] = round((time.monotonic() - began) / 60, 1)
            found.environment["versions"] |= libraries()  # of arms that were built since
            so_far = replace(found, code=code(), unfinished=f"{done} of {len(todo)} parts" if done < len(todo) else "")
            records.save(so_far, folder)
            report.write(so_far, folder)
    return found


def parity_of(work: Work, cycles: Kept, done: Callable[[int], object]) -> list[Parity]:
    """The verdict on each tested arm, by the protocol at the head of ablation/parity.py, in the run's precision."""
    variant, cfg = work.variant, work.variant.cfg
    runs = cycles.seeds_of(variant.overrides)
    for number in range(len(runs), cfg.ablate.parity_seeds):
        runs.append(run_seed(cfg, cfg.seed + number, work.precision, work.corpus, variant.tested))
        cycles.keep_seed(variant.overrides, runs[-1])
        done(1)
    return [judge(runs, arm, work.precision, variant.overrides) for arm in variant.tested]


def long_step(variant: Variant, cells: Sequence[Cell]) -> float:
    """The fastest step of the variant's cells so far in ms, if it is so long that the GPU is the bound and ablate.graph=null
    times no graph; or 0."""
    steps = [step for cell in cells if cell.overrides == variant.overrides for step in cell.steps_ms.values()]
    return min(steps) if variant.cfg.ablate.graph is None and steps and min(steps) > SHORT_MS else 0.0


# ---- one cell ----------------------------------------------------------------------------------------------------------------


def time_cell(work: Work, mode: str, cycles: Kept, done: Callable[[int], object]) -> Cell:
    """The cell of a variant: eager or compiled, and as one CUDA graph or not."""
    variant, cfg = work.variant, work.variant.cfg
    torch.compiler.reset()
    arms = arms_of(work, mode)
    check_same([arm for arm in arms.values() if not arm.other])

    def keep(blocks_ms: Cycle) -> None:
        cycles.keep(variant.overrides, mode, blocks_ms)
        done(1)

    may_fail = {NANOGPT, *rules.LIBRARIES} - {variant.subject}
    times, failed = timing.time_arms(arms, may_fail, lambda names: cycles.of(variant.overrides, mode, names), keep)
    arms = {name: arms[name] for name in times}
    left_out = {**variant.refused, **failed}
    if mode in IS_GRAPH and NANOGPT in cfg.ablate.arms:
        left_out[NANOGPT] = "Its step is not captured."
    if mode in IS_COMPILED and NormImpl.compiled in cfg.ablate.arms:
        left_out[NormImpl.compiled] = "In a model that is compiled whole it is torch."
    masks = [check_masks(arm, compiled=mode in IS_COMPILED) for name, arm in arms.items() if not is_twin(name)]
    cell = Cell(
        overrides=variant.overrides,
        mode=mode,
        tokens_per_step=cfg.train.batch_size * cfg.model.context,
        arms=times,
        subject=variant.subject,
        pairs=compare_all({name: of.blocks_ms for name, of in times.items()}),
        left_out=left_out,
        masks=[one for one in masks if one],
    )
    # Activations are a part of the kinds of work, and no kind of their own.
    known = work.precision.device.type == "cuda" and cfg.ablate.switch is not Switch.mlp
    return profiled(cell, arms) if known else cell


def arms_of(work: Work, mode: str) -> dict[str, Arm]:
    cfg, arms = work.variant.cfg, dict[str, Arm]()
    tokens = work.corpus.train.tokens
    batches = Batches(tokens, context=cfg.model.context, batch_size=cfg.train.batch_size, seed=cfg.seed)
    for name in work.variant.arms(mode):
        if name == NANOGPT:
            arms[name] = nanogpt.nanogpt_arm(arms[TORCH], compiled=mode in IS_COMPILED)
        else:
            how: dict[str, Any] = {"compiled": mode in IS_COMPILED, "graph": mode in IS_GRAPH, "like": arms.get(TORCH)}
            arms[name] = build_arm(name, cfg, work.precision, work.corpus.tokenizer, batches, **how)
    return arms


def profiled(cell: Cell, arms: dict[str, Arm]) -> Cell:
    """The cell with its kernels by kind of work. Those of a CUDA graph are profiled without it, as a graph knows no places."""
    cfg, precision = arms[TORCH].cfg, arms[TORCH].precision

    def step(arm: Arm) -> None:
        if arm.other:
            arm.step(0)
        else:
            arm.inputs.load(0)  # always the same batch
            arm.update.update()

    eager = cell.mode in (EAGER, GRAPH)
    kernels = {  # norm sites of eager models are marked; compiled kernels name what they fuse
        name: profile_step(
            partial(step, arm),
            precision.device,
            marked_sites(arm.state.model) if eager else None,
            NORM_SITE if eager else QUERY_KEY_SITE if turns(cfg) else "",
        )
        for name, arm in arms.items()
    }
    of_norms = cfg.ablate.switch is Switch.norm
    with side_stream(precision.device):
        copied = copy_bandwidth(precision.device)
    attribution = attribute(
        {name: shares(of) for name, of in kernels.items()},
        {base: median(cycle_times(cell.arms[base].blocks_ms)) for base in cell.opponents},
        cell.subject,
        norm_bytes(cfg, precision) if of_norms else loss_bytes(cfg, precision, arms[TORCH].state.model.vocab_size),
        copied,
        "norm" if of_norms else "loss",
    )
    return replace(
        cell,
        arms={name: replace(of, launches=launches(kernels[name])) for name, of in cell.arms.items()},
        attribution=replace(attribution, kernels={name: of for name, of in kernels.items() if not is_twin(name)}),
    )


def help_text(cfg: Config) -> str:
    refused = "".join(f"  {key:<33}  {why}\n" for key, why in REFUSED.items())
    return (
        f"{__doc__}\nKeys of its own:\n{keys.describe(cfg, 'ablate')}\n"
        "All others are those of `python train.py --help`, but for these, which are refused:\n\n"
        f"{refused}  {'the impl of ablate.switch':<33}  is what ablate.py compares. Use ablate.arms.\n\n"
        "The report goes into a new folder: runs/TIME_ablation/, or folder=PATH."
    )


if __name__ == "__main__":
    sys.exit(main())
