"""Where a run begins: in a new folder or in the folder of a stopped run, with new weights or from a checkpoint.

resume=never   a new run
resume=auto    resumes in the folder that the command names, from its newest whole checkpoint; a new run if there is none.
               torchrun --max-restarts, or a scheduler that preempts, can repeat the same command
resume=PATH    resumes the run at PATH with its config, in its own folder. A single checkpoint, or another config, is resumed in
               a new folder
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import configs
from configs import Config, ConfigError, command_line, rules
from configs.schema import Precision, Schedule
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
    exact: bool = False  # use this folder or fail: never append a number to its name
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
    if cfg.resume == "auto":
        return _auto(cfg, folder, chosen)
    return _from_path(cfg, folder, overrides, chosen)


def _auto(cfg: Config, folder: Path, chosen: bool) -> Start:
    if not chosen:
        raise ConfigError(
            "resume=auto goes on in the folder that the command names, and this one names none, so that each start would have "
            "a new one. Add folder=runs/NAME (in a sweep it is the sweep's folder)."
        )
    found, kept, notes = _newest(folder)
    if found is None and not (folder / "config.yaml").is_file():
        return Start(cfg, folder, exact=True, notes=[f"resume=auto: no run in {relative(folder)} yet; a new one starts there."])
    if found is None:
        if (folder / "summary.json").is_file() or (folder / "last").is_symlink():
            raise ConfigError(
                f"resume=auto: {relative(folder)} has a run whose checkpoints are gone, and a new one there would overwrite "
                "the rest of it. Choose another folder."
            )
        notes.append(f"resume=auto: no checkpoint in {relative(folder)} yet; the run starts at its first step.")
        return Start(cfg, folder, in_place=True, exact=True, notes=notes)
    stored = checkpoint.read(found, verified=True)
    before = stored.cfg
    _keep_precision(before, cfg)
    start = Start(cfg, folder, stored, in_place=True, exact=True, checkpoints=kept)
    rules.check_resumed(before, cfg, None if start.finished else _same_corpus(stored, cfg))
    notes += [f"resume=auto: goes on from {relative(found)}.", *_other_operator(before, cfg)]
    start = replace(start, notes=notes)
    if not start.finished:
        _check_left(start, folder)
    return start


def _from_path(cfg: Config, folder: Path, overrides: list[str], chosen: bool) -> Start:
    path = storage.run_of(Path(cfg.resume))
    found, kept, notes = _newest(path)
    if found is None:
        try:
            found = checkpoint.locate(path)
        except ConfigError as error:
            raise ConfigError(f"resume={error}") from None
        try:
            storage.verify(found)
        except (storage.DamagedError, PermissionError) as error:
            raise ConfigError(f"resume={path}: {error}. Resume from another checkpoint of that run.") from None
    stored = checkpoint.read(found, verified=True)
    # an earlier command's resume_with_changes does not count for this one
    before = stored.cfg
    cfg = configs.from_dict(stored.config | {"resume_with_changes": False}, overrides)
    _keep_precision(before, cfg)
    changed = rules.check_resumed(before, cfg, _same_corpus(stored, cfg))
    notes += [f"resume={path}: goes on from {relative(found)}.", *_other_operator(before, cfg)]
    own_folder = folder.resolve() == path.resolve() if chosen else not changed
    if own_folder and kept:
        cfg.resume = before.resume  # config.yaml says how the run began
        start = Start(cfg, path, stored, in_place=True, exact=True, checkpoints=kept, notes=notes)
    else:
        start = Start(cfg, folder, stored, notes=notes)
    _check_left(start, path)
    return start


def _same_corpus(stored: Stored, cfg: Config) -> bool:
    with command_line.as_config_errors():
        return stored.state["corpus"] == identity(cfg.data, cfg.tokenizer)


def _keep_precision(before: Config, cfg: Config) -> None:
    """Keeps the dtype that train.precision=auto became when the run began: another device would choose another dtype."""
    if cfg.train.precision is Precision.auto:
        cfg.train.precision = before.train.precision


def _other_operator(before: Config, cfg: Config) -> list[str]:
    """A line on each key of the norm operator that changes: config.yaml has only the last value."""
    changes = {
        "norm.impl": (before.norm.impl, cfg.norm.impl),
        "norm.dropout_masks": (before.norm.dropout_masks, cfg.norm.dropout_masks),
    }
    return [
        f"{key}={now} from here on; the steps before had {key}={then}." for key, (then, now) in changes.items() if now != then
    ]


def _check_left(start: Start, path: Path) -> None:
    """Raises ConfigError: the run has no steps left, and no results are missing."""
    stored, steps = start.stored, start.cfg.train.steps
    unfinished = start.in_place and not start.finished and stored is not None and stored.cfg.train.steps == steps
    if stored is not None and stored.step >= steps and not unfinished:
        command, why = f"{storage.resume_command(path)} train.steps={2 * stored.step}", ""
        if start.cfg.optim.schedule is not Schedule.constant:
            command += " resume_with_changes=true"
            why = "\nThat changes the learning rates of the steps before it, which the last word accepts."
        raise ConfigError(
            f"resume: {relative(stored.path)} is at step {stored.step}: raise train.steps={steps} to go on, such as with\n"
            f"  {command}{why}"
        )


def _newest(run: Path) -> tuple[Path | None, tuple[Path, ...], list[str]]:
    """The newest whole checkpoint of a run or None, all its checkpoints, and a line on each damaged one that is newer."""
    kept: list[Path] | None = None
    while kept != (kept := storage.checkpoints(run)):  # another process may add and delete checkpoints meanwhile
        try:
            found, problems = storage.newest(run)
        except PermissionError as error:
            raise ConfigError(f"resume: {relative(run)}: a checkpoint can't be read: {error}.") from error
    if found is None and problems:
        raise ConfigError(
            "\n".join(problems) + f"\nresume: no checkpoint in {relative(run)} is whole. "
            "Start anew in another folder, or from a checkpoint of another run."
        )
    return found, tuple(kept), [f"{problem}; the one before it is used." for problem in problems]
