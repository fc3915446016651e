"""The run of a command: the task that train.py gives Hydra, where the run begins, and the facts that it prints first.

resume=never   a new run
resume=auto    resumes in the folder that the command names, from its newest whole checkpoint; a new run if there is none.
               torchrun --max-restarts, or a scheduler that preempts, can repeat the same command
resume=PATH    resumes the run at PATH with its config, in its own folder. A single checkpoint, or another config, is resumed in
               a new folder
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from torch.distributed.elastic.multiprocessing.errors import record

import configs
import ops
from configs import Config, ConfigError, command_line, compose, keys, machine, rules
from configs.machine import Machine
from configs.schema import NormImpl, Parallel, Precision, Schedule
from data import Corpus, identity
from training import checkpoint, storage, tracking
from training.command import Check, Ended, Failed, end, use_one_thread, world
from training.distributed import ALONE, World
from training.interrupt import show
from training.metrics import NonFiniteError
from training.run import Run, Start, Summary, open_run
from training.step import MixedPrecision, set_deterministic
from training.storage import StorageError, relative

Train = Callable[[Config, Run, Machine, World], Summary]


@record  # torchrun's report of a rank that failed then has the traceback
def job(train: Train, composed: DictConfig) -> float | None:
    """Makes the run of a config that Hydra composed, in the folder that Hydra names, with `train`.

    Returns:
        Its last validation loss, which a sweeper may minimise.

    Raises:
        Failed, Ended: in a sweep or not; why has been printed.
    """
    now = HydraConfig.get()
    sweep, overrides, folder = now.mode is RunMode.MULTIRUN, list(now.overrides.task), Path(now.runtime.output_dir)
    use_one_thread()  # a launcher may have started this process
    if sweep and world().leads:
        show(f"[sweep] {now.job.num + 1}/{Check.jobs or '?'}: {' '.join(overrides)}")
    try:
        return _run(train, compose.typed(composed), Path(relative(folder)), overrides, sweep)
    except (NonFiniteError, StorageError) as error:
        if world().leads:
            show(f"stopped: {error}", sys.stderr)
            command_line.record_for_torchrun(error)
        if sweep and world().size > 1 and isinstance(error, StorageError):
            # the first rank may be the only one with the error: its next job would wait for ranks that still wait in this one
            raise SystemExit(1) from None
        code = 1
    except torch.OutOfMemoryError as error:
        if world().size > 1:
            raise
        hint = "Lower train.batch_size or model.*, or raise train.accumulation (the same batch in smaller pieces)."
        show(f"out of memory: {str(error).splitlines()[0]}\n{hint}", sys.stderr)
        code = 1
    except ConfigError as error:
        told = ConfigError(f"{error}\n(in the job {' '.join(overrides)})") if sweep else error
        code = command_line.refuse(told) if world().leads else command_line.EXIT_CODE
    finally:
        with suppress(OSError):  # Hydra made it; a run has files in it
            folder.rmdir()
    end(code)
    raise Failed(code) if sweep else Ended(code)


def _run(train: Train, cfg: Config, folder: Path, overrides: list[str], sweep: bool) -> float | None:
    named = any(text.startswith(("hydra.run.dir=", "hydra.sweep.dir=")) for text in HydraConfig.get().overrides.hydra)
    chosen = bool(cfg.folder) or named or (sweep and cfg.resume != "auto")  # a job of a sweep resumes in its own folder
    origin = world().on_first(lambda: find_start(cfg, folder, overrides, chosen=chosen))
    if origin.finished and origin.stored:
        if world().leads:
            show(f"{relative(origin.folder)} has finished: step {origin.step} of {origin.cfg.train.steps}.")
        return origin.stored.state["validation"]["loss"]
    with world().shared_errors():
        inspected = machine.inspect(origin.cfg.device)
        rules.check(origin.cfg, inspected)
        tracking.with_defaults(origin.cfg.logging)
    set_deterministic(origin.cfg.deterministic)
    with open_run(origin, torch.device(inspected.device), folder.parent.name if sweep else None, world()) as run:
        summary = train(origin.cfg, run, inspected, world())
    if world().leads:
        show(str(summary))
    return summary.final.loss


@command_line.as_config_errors()
def find_start(cfg: Config, folder: Path, overrides: list[str], *, chosen: bool) -> Start:
    """Finds where the run of a command begins. Writes nothing.

    Args:
        cfg: the config that the command composed.
        folder: where a new run would go.
        overrides: of the command; resume=PATH applies them to the stored config.
        chosen: the command names `folder`, so that it may have a run already.

    Raises:
        ConfigError: no checkpoint where one is needed, a damaged one, or a config that differs in what matters.
    """
    if cfg.resume == "never":
        return Start(cfg, folder)
    auto, this = cfg.resume == "auto", f"resume={cfg.resume}"
    if auto and not chosen:
        raise ConfigError(
            "resume=auto goes on in the folder that the command names, and this one names none, so that each start would have "
            "a new one. Add folder=runs/NAME (in a sweep it is the sweep's folder)."
        )
    run = folder if auto else Path(cfg.resume)
    if run.name == storage.FOLDER:
        run = run.parent
    try:
        kept, problems = storage.newest(run)
        if kept is None and auto:
            return _first_start(cfg, folder)
        found = kept or checkpoint.locate(run)
        if kept is None:
            storage.verify(found)
    except ValueError as error:
        raise ConfigError(f"{this}: {error}") from error
    stored = checkpoint.read(found, verified=True)
    before = stored.cfg
    if not auto:  # an earlier command's resume_with_changes does not count for this one
        cfg = configs.from_dict(stored.state["config"] | {"resume_with_changes": False}, overrides)
        rules.check_given(compose.given(overrides), [cfg], "train.py")
    if cfg.train.precision is Precision.auto:  # another device would choose another dtype
        cfg.train.precision = before.train.precision
    finished = auto and Start(cfg, run, stored, in_place=True).finished
    with command_line.as_config_errors():  # a finished run needs its text no more
        same_corpus = None if finished else stored.state["corpus"] == identity(cfg.data, cfg.tokenizer)
    changed = check_resumed(before, cfg, same_corpus)
    in_place = auto or (kept is not None and (folder.resolve() == run.resolve() if chosen else not changed))
    if in_place and not auto:
        cfg.resume = before.resume  # config.yaml says how the run began
    notes = [f"{problem}; the one before it is used." for problem in problems] + [f"{this}: goes on from {relative(found)}."]
    start = Start(cfg, run if in_place else folder, stored, in_place, notes)
    steps = cfg.train.steps
    lacks_results = in_place and not start.finished and before.train.steps == steps
    if stored.step >= steps and not (finished or lacks_results):
        raise ConfigError(
            f"{this}: {relative(found)} is at step {stored.step} of train.steps={steps}: nothing is left to train. Raise "
            f"train.steps to train longer:\n  {storage.resume_command(run)} train.steps={2 * stored.step} "
            "resume_with_changes=true\nIts last key is for a schedule whose rates depend on the number of steps."
        )
    return start


def check_resumed(before: Config, cfg: Config, same_corpus: bool | None = None) -> list[str]:
    """Checks that a run with `cfg` goes on as if the run with `before` had not stopped.

    Args:
        same_corpus: whether both have the same tokens, wherever their text lies. None: the keys of data and tokenizer tell.

    Returns:
        The keys that change the numbers of the run, which resume_with_changes=true allows.

    Raises:
        ConfigError: there are such keys, one per line, and resume_with_changes=false.
    """
    if cfg.init_from not in (None, before.init_from):
        raise ConfigError(f"init_from={cfg.init_from}: a run that goes on has its weights already. Leave init_from out.")
    if cfg.optim.kind is not before.optim.kind:
        raise ConfigError(
            f"optim.kind={cfg.optim.kind}: the checkpoint has the state of {before.optim.kind}, which can't go on as "
            f"{cfg.optim.kind}. Leave the key out, or begin a new run from these weights with init_from=CHECKPOINT."
        )
    free = ["data.", "tokenizer."] if same_corpus else []
    free += ["train.steps"] if before.optim.schedule is Schedule.constant else []  # its rates don't depend on them
    changed = {}
    for name in keys.affecting("weights", "results"):
        then, now = attrgetter(name)(before), attrgetter(name)(cfg)
        if then != now and not name.startswith(tuple(free)):
            changed[name] = f"{name}={keys.shown(now)}: the checkpoint was made with {name}={keys.shown(then)}."
    if same_corpus is False and not any(name.startswith(("data.", "tokenizer.")) for name in changed):
        changed["data"] = "data: the files have changed since the checkpoint was made, and the batches with them."
    if changed and not cfg.resume_with_changes:
        raise ConfigError(
            "\n".join(changed.values()) + "\nThe run would then give other numbers than the run that was stopped. "
            "Leave these keys out, or accept the changes with resume_with_changes=true."
        )
    return list(changed)


def _first_start(cfg: Config, folder: Path) -> Start:
    """Of resume=auto in a folder without checkpoints."""
    if (folder / "summary.json").is_file():
        raise ConfigError(
            f"{relative(folder)} has a finished run whose checkpoints are gone, and a new one there would "
            "overwrite the rest of it. Choose another folder."
        )
    started = (folder / "config.yaml").is_file()
    note = "no checkpoint there yet; the run starts at its first step" if started else "no run there yet; a new one starts"
    return Start(cfg, folder, in_place=started, notes=[f"resume=auto: {relative(folder)}: {note}."])


def facts(
    origin: Start, precision: MixedPrecision, corpus: Corpus, sizes: dict[str, float], world: World = ALONE
) -> dict[str, str]:
    """The facts about a run that it prints before its first step and keeps in W&B's config; `sizes` are its `quantities`."""
    cfg, device = origin.cfg, precision.device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    norm, ran = cfg.norm, ops.backend_for(device) if cfg.norm.impl is NormImpl.fused else cfg.norm.impl.meaning
    lost, size = (sum(of) for of in zip(*((s.lost, s.bytes + s.lost) for s in (corpus.train, corpus.val)), strict=True))
    epochs = cfg.train.steps * sizes["tokens_per_step"] / sizes["train_tokens"]
    return {
        "device": f"{device.type}, {hardware}"
        + (f", {world.size} ranks" if world.store else "")
        + (", fsdp" if cfg.parallel is Parallel.fsdp else ""),
        "precision": str(precision) + (f", compiled ({cfg.train.compile_mode})" if cfg.train.compile else ""),
        "norms": f"{norm.impl} {norm.kind}, {norm.placement}, weight {norm.weight}: {ran}",
        "model": f"{sizes['parameters']:,} parameters, {cfg.model.size}"
        + (f", with the weights of {cfg.init_from}" if cfg.init_from and not origin.stored else ""),
        "vocabulary": f"{sizes['vocabulary']:,} ({cfg.tokenizer.kind}), {sizes['train_bytes_per_token']:.2f} bytes a token",
        "data": f"{corpus.name}: {sizes['train_tokens']:,} tokens to train on, {sizes['val_tokens']:,} held out"
        + (f"; the tokenizer has no token for {lost / size:.2%} of the text, which bits per byte leaves out" if lost else ""),
        "batch": f"{sizes['tokens_per_step']:,} tokens ({cfg.train.batch_size} × {cfg.model.context})",
        "steps": f"{cfg.train.steps:,} ({epochs:.2f} epochs)" + (f", resumed from {origin.step:,}" if origin.stored else ""),
    }
