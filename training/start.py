"""The run of a command: what train.py does with the config that Hydra composed, where the run begins, and its facts.

resume=never   a new run
resume=auto    resumes in the folder that the command names, from its newest whole checkpoint; a new run if there is none.
               torchrun --max-restarts, or a scheduler that preempts, can repeat the same command
resume=PATH    resumes the run at PATH with its config, in its own folder. A single checkpoint, or another config, is resumed in
               a new folder
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import time

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

import configs
import ops
from configs import Config, ConfigError, as_config_errors, compose, keys, machine, rules
from configs.machine import Machine
from configs.schema import NormImpl, Parallel, Precision
from data import Corpus, identity
from measure.files import StorageError, relative
from training import checkpoint, storage, tracking
from training.command import NO_FOLDER, RANK_ENDS, Failed, names_folder, report, use_one_thread, world
from training.distributed import ALONE, World
from training.interrupt import show
from training.precision import MixedPrecision, set_deterministic
from training.run import Run, Start, Summary, open_run

STARTED = time()  # an older folder is not Hydra's
Train = Callable[[Config, Run, Machine, World], Summary]


def job(train: Train, composed: DictConfig) -> float | None:
    """Makes the run of a config that Hydra composed, in the folder that Hydra names, with `train`.

    Returns:
        Its last validation loss, which a sweeper may minimise.

    Raises:
        Failed, SystemExit: in a sweep or not; why has been printed.
    """
    asked = HydraConfig.get()
    sweep, overrides = asked.mode is RunMode.MULTIRUN, list(asked.overrides.task)
    use_one_thread()  # a launcher may have started this process
    if sweep:
        show(f"[sweep] {asked.job.num + 1}: {' '.join(overrides)}")
    try:
        return _run(train, composed, Path(relative(Path(asked.runtime.output_dir))), overrides, sweep)
    except Exception as error:
        code = report(error)
        if sweep and isinstance(error, StorageError) and world().size > 1:  # which may be this rank's alone
            raise SystemExit(RANK_ENDS) from None  # its next job would wait for ranks that still wait in this one
        raise Failed(code) if sweep else SystemExit(code) from None


def _run(train: Train, composed: DictConfig, folder: Path, overrides: list[str], sweep: bool) -> float:
    """The last validation loss of the run."""
    here = world()
    with suppress(OSError):  # where Hydra has made it, a run that starts makes it again, and a run that goes on has its own
        if folder.stat().st_ctime >= STARTED:
            folder.rmdir()
    with here.shared_errors():
        asked = compose.typed(composed, Config)
        chosen = names_folder(asked) or (sweep and asked.resume != "auto")  # a job of a sweep resumes in its own folder
    origin = here.on_first(lambda: find_start(asked, folder, overrides, chosen=chosen))
    cfg = origin.cfg
    if origin.finished and origin.stored:
        show(f"{relative(origin.folder)} has finished: step {origin.step} of {cfg.train.steps}.")
        return origin.stored.state["validation"]["loss"]
    with here.shared_errors():
        inspected = machine.inspect(cfg.device)
        rules.check(cfg, inspected)
        if not (sweep and asked.resume in ("never", "auto")):  # else the sweeper has seen all jobs: a key may count in another
            rules.check_given(configs.given(overrides), [cfg])
        tracking.with_defaults(cfg.logging)
    set_deterministic(cfg.deterministic)
    with open_run(origin, torch.device(inspected.device), folder.parent.name if sweep else None, here) as run:
        summary = train(cfg, run, inspected, here)
    show(str(summary))
    return summary.final.loss


@as_config_errors()
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
        raise ConfigError(NO_FOLDER)
    run = folder if auto else machine.expanded(cfg.resume)
    if run.name == storage.FOLDER:
        run = run.parent
    if not auto and not run.exists() and (near := keys.did_you_mean(cfg.resume, ["auto", "never"])):
        raise ConfigError(f"{this}: no such run.{near}")
    with as_config_errors(f"folder={folder}" if auto else this):
        kept, problems = storage.newest(run)
        if kept is None and auto:
            return _first_start(cfg, folder)
        found = kept or checkpoint.locate(run)
        if kept is None:
            storage.verify(found)
        here = folder.exists() and folder.samefile(run)
    stored = checkpoint.read(found, verified=True)
    before = stored.cfg
    if not auto:  # an earlier command's resume_with_changes does not count for this one
        cfg = configs.from_dict(stored.state["config"] | {"resume_with_changes": False}, overrides)
    if cfg.train.precision is Precision.auto:  # another device would choose another dtype
        cfg.train.precision = before.train.precision
    finished = auto and Start(cfg, run, stored, in_place=True).finished  # such a run needs its text no more
    same_corpus = None if finished else stored.state["corpus"] == identity(cfg.data, cfg.tokenizer)
    changed = rules.check_resumed(before, cfg, same_corpus)
    in_place = auto or (kept is not None and (here if chosen else not changed))
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
            "resume_with_changes=true\nA constant schedule needs no resume_with_changes=true."
        )
    return start


def _first_start(cfg: Config, folder: Path) -> Start:
    """Of resume=auto in a folder without checkpoints."""
    if (folder / "summary.json").is_file():
        raise ConfigError(
            f"{relative(folder)} has a finished run whose checkpoints are gone, and a new one there would "
            "overwrite the rest of it. Choose another folder."
        )
    started = storage.owner(folder) == storage.TRAIN
    note = "no checkpoint there yet; the run starts at its first step" if started else "no run there yet; a new one starts"
    return Start(cfg, folder, in_place=started, notes=[f"resume=auto: {relative(folder)}: {note}."])


def facts(
    origin: Start, precision: MixedPrecision, corpus: Corpus, sizes: dict[str, float], no_graph: str, world: World = ALONE
) -> dict[str, str]:
    """The facts about a run that it prints before its first step and keeps in W&B's config; `sizes` are its `quantities`, and
    `no_graph` is what `rules.why_no_graph` says."""
    cfg, device = origin.cfg, precision.device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    norm, ran = cfg.norm, ops.backend_for(device) if cfg.norm.impl is NormImpl.fused else cfg.norm.impl.meaning
    lost, size = (sum(of) for of in zip(*((s.lost, s.bytes + s.lost) for s in (corpus.train, corpus.val)), strict=True))
    epochs = cfg.train.steps * sizes["tokens_per_step"] / sizes["train_tokens"]
    return {
        "device": f"{device.type}, {hardware}"
        + (f", {world.size} ranks" if world.store else "")
        + (", fsdp" if cfg.parallel is Parallel.fsdp else ""),
        "precision": str(precision) + (", compiled" if cfg.train.compile else ""),
        "step": f"no CUDA graph: {no_graph}" if no_graph else "one CUDA graph, after the first steps",
        "norms": f"{norm.impl} {norm.kind}, {norm.placement}, weight {norm.weight}: {ran}",
        "model": f"{sizes['parameters']:,} parameters, {cfg.model.size}"
        + (f", with the weights of {cfg.init_from}" if cfg.init_from and not origin.stored else ""),
        "vocabulary": f"{sizes['vocabulary']:,} ({cfg.tokenizer.kind}), {sizes['train_bytes_per_token']:.2f} bytes a token",
        "data": f"{corpus.name}: {sizes['train_tokens']:,} tokens to train on, {sizes['val_tokens']:,} held out"
        + (f"; the tokenizer has no token for {lost / size:.2%} of the text, which bits per byte leaves out" if lost else ""),
        "batch": f"{sizes['tokens_per_step']:,} tokens ({cfg.train.batch_size} × {cfg.model.context})",
        "steps": f"{cfg.train.steps:,} ({epochs:.2f} epochs)" + (f", resumed from {origin.step:,}" if origin.stored else ""),
    }
