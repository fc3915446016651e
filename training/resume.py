"""Where a run begins: in a new folder or in the folder of a stopped run, with new weights or from a checkpoint.

resume=never   a new run
resume=auto    resumes in the folder that the command names, from its newest whole checkpoint; a new run if there is none.
               torchrun --max-restarts, or a scheduler that preempts, can repeat the same command
resume=PATH    resumes the run at PATH with its config, in its own folder. A single checkpoint, or another config, is resumed in
               a new folder
"""

from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import configs
from configs import Config, ConfigError, command_line, rules
from configs.schema import Precision
from data import identity
from training import checkpoint, storage
from training.checkpoint import Stored
from training.storage import relative


@dataclass(frozen=True)
class Start:
    """Where a run begins, as `settle` found it."""

    cfg: Config
    folder: Path  # of the run
    stored: Stored | None = None  # the checkpoint that the run resumes from
    in_place: bool = False  # the run resumes in its own folder, with its metrics and its W&B run
    checkpoints: tuple[Path, ...] = ()  # all checkpoints that were in the folder
    notes: list[str] = field(default_factory=list)  # what to tell the user

    @property
    def step(self) -> int:
        return self.stored.step if self.stored else 0

    @property
    def finished(self) -> bool:
        """Whether the run has all its steps and results."""
        results = ["summary.json"] + ["sample.txt"] * (self.cfg.sample.tokens > 0)
        return self.in_place and self.step >= self.cfg.train.steps and all((self.folder / name).is_file() for name in results)


def settle(cfg: Config, folder: Path, overrides: list[str], *, chosen: bool) -> Start:
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
    run = folder if auto else storage.run_of(Path(cfg.resume))
    kept = tuple(storage.checkpoints(run))
    try:
        found, problems = storage.newest(run)
        if found is None and problems:
            raise ConfigError("\n".join([*problems, f"No checkpoint in {relative(run)} is whole. Start in another folder."]))
        if found is None and auto:
            return _first_start(cfg, folder)
        if found is None:
            found = checkpoint.locate(run)
            storage.verify(found)
    except (PermissionError, ValueError) as error:
        raise ConfigError(f"{this}: {error}") from error
    stored = checkpoint.read(found, verified=True)
    before = stored.cfg
    if not auto:  # an earlier command's resume_with_changes does not count for this one
        cfg = configs.from_dict(stored.state["config"] | {"resume_with_changes": False}, overrides)
    if cfg.train.precision is Precision.auto:  # another device would choose another dtype
        cfg.train.precision = before.train.precision
    finished = auto and Start(cfg, run, stored, in_place=True).finished
    with command_line.as_config_errors():  # a finished run needs its text no more
        same_corpus = None if finished else stored.state["corpus"] == identity(cfg.data, cfg.tokenizer)
    changed = rules.check_resumed(before, cfg, same_corpus)
    in_place = auto or (bool(kept) and (folder.resolve() == run.resolve() if chosen else not changed))
    if in_place and not auto:
        cfg.resume = before.resume  # config.yaml says how the run began
    notes = [f"{problem}; the one before it is used." for problem in problems]
    notes.append(f"{this}: goes on from {relative(found)}.")
    for key in ("norm.impl", "norm.dropout_masks"):  # config.yaml has only the last value
        then, now = attrgetter(key)(before), attrgetter(key)(cfg)
        if then != now:
            notes.append(f"{key}={now} from here on; the steps before had {key}={then}.")
    start = Start(cfg, run if in_place else folder, stored, in_place, kept, notes)
    steps = cfg.train.steps
    lacks_results = in_place and not start.finished and before.train.steps == steps
    if stored.step >= steps and not finished and not lacks_results:
        raise ConfigError(
            f"{this}: {relative(found)} is at step {stored.step}: raise train.steps={steps} to go on, such as with\n"
            f"  {storage.resume_command(run)} train.steps={2 * stored.step} resume_with_changes=true\n"
            "The last word accepts other learning rates than the steps before had, where optim.schedule makes some."
        )
    return start


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
