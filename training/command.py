"""How programs begin and end, and what turns a command of train.py into a run: where it begins, its facts, exit codes.

resume=never   a new run
resume=auto    resumes in the folder that the command names, from its newest whole checkpoint; a new run if there is none.
               torchrun --max-restarts, or a scheduler that preempts, can repeat the same command
resume=PATH    resumes the run at PATH with its config, in its own folder. A single checkpoint, or another config, is resumed in
               a new folder
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

import configs
import ops
from configs import Config, ConfigError, command_line, machine, rules
from configs.command_line import Job, as_config_errors
from configs.machine import Machine
from configs.schema import NormImpl, Parallel, Precision
from data import Corpus, identity
from measure.environment import environment
from measure.files import StorageError, relative
from training import checkpoint, storage, tracking
from training.distributed import ALONE, World, join
from training.interrupt import Stopped, exit_on_signals, mute, show, take_any_encoding
from training.metrics import NonFiniteError
from training.precision import MixedPrecision, set_deterministic
from training.run import Run, Start, Summary, open_run

Train = Callable[[Config, Run, Machine, World], Summary]

NO_FOLDER = "resume=auto goes on in the folder that the command names: add folder=runs/NAME (in a sweep that of the sweep)."


# ---- train.py ----------------------------------------------------------------------------------------------------------------


def main(train: Train) -> int:
    """Runs the command in sys.argv, with `train` for each run of it. Returns the exit code of the process.

    Returns:
        0: done. 1: NaN, or a full disk. 2: an error in the config. 128 plus the signal's number: a signal. For a sweep, the
        highest of its runs.
    """
    take_any_encoding()
    codes, world = [0], join()
    exit_on_signals()
    use_one_thread()
    if "--version" in sys.argv[1:]:
        show(version())
        return 0
    try:
        asked = world.on_first(lambda: command_line.read(sys.argv[1:]))
        if isinstance(asked, str):
            if world.leads:
                print(asked, flush=True)
            asked = []
        for number, one in enumerate(asked):
            if one.swept and world.leads:
                show(f"[sweep] {number + 1}/{len(asked)}: {' '.join(one.overrides)}")
            codes.append(job(train, one, world) or 0)
    except ConfigError as error:
        codes.append(command_line.refuse(error) if world.leads else command_line.EXIT_CODE)
    except BrokenPipeError:  # of `--help | head`; a run itself goes on without its reader
        mute(sys.stdout)
    except KeyboardInterrupt:  # before the first step, from which on Interrupt handles it, or the second Ctrl-C
        codes.append(130)
    except SystemExit as end:
        if end.code == 1 or isinstance(end.code, str):
            raise  # an exception on this rank alone: it waits for nobody, and torchrun ends the other ranks
        codes.append(end.code or 0)
    world.leave(max(codes))
    return max(codes)


def version() -> str:
    facts = environment(torch.device("cpu"))
    return f"prenorm {facts['versions']['prenorm']}, git {facts['git']}, torch {facts['versions']['torch']}"


@record  # torchrun's report of a rank that failed then has the traceback
def job(train: Train, asked: Job, world: World) -> int:
    """Makes one run of the command. Returns its exit code, so that the next run of a sweep still starts."""
    cfg, folder, sweep = asked.cfg, asked.folder, asked.swept
    try:
        chosen = bool(cfg.folder) or (sweep and cfg.resume != "auto")  # a job of a sweep resumes in its own folder
        origin = world.on_first(lambda: find_start(cfg, folder, asked.overrides, chosen=chosen))
        if origin.finished:
            if world.leads:
                show(f"{relative(origin.folder)} has finished: step {origin.step} of {origin.cfg.train.steps}.")
            return 0
        with world.shared_errors():
            inspected = machine.inspect(origin.cfg.device)
            rules.check(origin.cfg, inspected)
            tracking.with_defaults(origin.cfg.logging)
        group = folder.parent.name if sweep else None
        device = torch.device(inspected.device)
        set_deterministic(origin.cfg.deterministic)
        with open_run(origin, device, group, world) as run:
            summary = train(origin.cfg, run, inspected, world)
    except (NonFiniteError, StorageError) as error:
        if world.leads:
            show(f"stopped: {error}", sys.stderr)
            command_line.record_for_torchrun(error)
        if sweep and world.size > 1 and isinstance(error, StorageError):
            # the first rank may be the only one with the error: its next job would wait for ranks that still wait in this one
            raise SystemExit(1) from None
        return 1
    except torch.OutOfMemoryError as error:
        if world.size > 1:
            raise
        hint = "Lower train.batch_size or model.*, or raise train.accumulation (the same batch in smaller pieces)."
        show(f"out of memory: {str(error).splitlines()[0]}\n{hint}", sys.stderr)
        return 1
    except ConfigError as error:
        if not world.leads:
            return command_line.EXIT_CODE
        return command_line.refuse(ConfigError(f"{error}\n(in the job {' '.join(asked.overrides)})") if sweep else error)
    if world.leads:
        show(str(summary))
    return 0


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
        raise ConfigError(NO_FOLDER)
    run = folder if auto else Path(cfg.resume)
    if run.name == storage.FOLDER:
        run = run.parent
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
        rules.check_given(configs.given(overrides), [cfg])
    if cfg.train.precision is Precision.auto:  # another device would choose another dtype
        cfg.train.precision = before.train.precision
    finished = auto and Start(cfg, run, stored, in_place=True).finished
    with as_config_errors():  # a finished run needs its text no more
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
            "resume_with_changes=true\nIts last key is for a schedule whose rates depend on the number of steps."
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
        "precision": str(precision) + (f", compiled ({cfg.train.compile_mode})" if cfg.train.compile else ""),
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


# ---- ablate.py and compare.py ------------------------------------------------------------------------------------------------


@contextmanager
def place(cfg: Config, name: str, what: str) -> Iterator[Path]:
    """The folder of the program `name`, locked: a new one, or with resume=auto that of an earlier process. `what` ends its name
    where the command names none. Raises ConfigError: it can't be used."""
    if cfg.resume not in ("never", "auto"):
        goes_on = f"{name} goes on with folder={cfg.resume} resume=auto and the same arguments"
        raise ConfigError(f"resume={cfg.resume}: {goes_on}. For the weights of a run: init_from=PATH.")
    if (resumes := cfg.resume == "auto") and not cfg.folder:
        raise ConfigError(NO_FOLDER)
    wanted = Path(cfg.folder or f"runs/{command_line.now()}_{what}")
    with storage.claim(wanted, name, resumes=resumes) as folder:
        if folder != wanted:
            show(f"{relative(wanted)} has another run already, so this one is kept in {relative(folder)}.")
        yield folder


def program(
    name: str, arguments: Sequence[str], help_text: Callable[[], str], work: Callable[[], int], stopped: Callable[[], str]
) -> int:
    """Does the work of a program that measures, or shows its help.

    Args:
        name: of the program, such as "ablate.py".
        stopped: what to say after a signal.

    Returns:
        The exit code: that of `work`; 1 for a full disk, 2 for a config that is refused, 128 plus its number for a signal.
    """
    take_any_encoding()
    if {"-h", "--help"} & set(arguments):
        show(help_text())
        return 0
    exit_on_signals()
    use_one_thread()
    try:
        machine.refuse_ranks(name)
        return work()
    except ConfigError as error:
        return command_line.refuse(error)
    except StorageError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Stopped) as stop:
        print(stopped(), file=sys.stderr)
        return 130 if isinstance(stop, KeyboardInterrupt) else int(stop.code)  # type: ignore[arg-type]  # a number


def use_one_thread() -> None:
    """Runs backward in the thread of forward. This process trains on one device: a thread for that device would only find cold
    caches, which takes up to a third of a CPU-bound step."""
    torch.autograd.set_multithreading_enabled(False)


def own_keys(section: str) -> str:
    """The keys of a section with their defaults, a line each, for help."""
    lines = command_line.describe_keys(Config()).splitlines()
    return "".join(f"{line}\n" for line in lines if line.strip().startswith(f"{section}."))
