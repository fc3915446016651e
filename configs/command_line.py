"""The command line of train.py, checked whole before Hydra starts: every job of a sweep, so that none fails after the first."""

import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from hydra._internal.utils import get_args_parser  # the parser of @hydra.main; there is no public name for it
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from configs import compose, keys, machine, rules
from configs.keys import ConfigError
from configs.schema import Config, DataConfig, Source

EXIT_CODE = 2  # of an error in the configuration, as of argparse
HYDRAS_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")  # keys of Hydra's that name a folder, as `folder` does
MOST_JOBS_CHECKED = 64  # composing takes 0.1 s a job; what a larger sweep gets wrong, it almost surely gets wrong here


def check(arguments: Sequence[str]) -> None:
    """Returns if every job that `arguments` ask for can start; otherwise says why and ends the process with EXIT_CODE."""
    args, unknown = get_args_parser().parse_known_args(arguments)
    if args.help or args.hydra_help or args.info or args.shell_completion or args.config_dir or args.config_name:
        return  # no run, or somebody else's configuration: what it becomes is checked again when its job starts
    sweep = args.multirun or "hydra.mode=MULTIRUN" in args.overrides
    checked: list[str] | None = None
    resumed: set[Path] = set()  # folders of runs
    try:
        if compose.parse(unknown):  # keys that argparse left over, as it takes them in one piece
            raise ConfigError(f"{unknown[0]}: options such as -m stand before all of key=value, or behind, not between them.")
        for overrides in itertools.islice(jobs(args.overrides, sweep), MOST_JOBS_CHECKED):
            checked = overrides if sweep else None
            cfg = compose.compose_only(overrides)
            theirs = [override for override in compose.parse(args.overrides) if override.key_or_group in HYDRAS_FOLDERS]
            if cfg.folder and theirs:
                raise ConfigError(f"{theirs[0].input_line} and folder={cfg.folder} both name the run's folder. Leave one.")
            folders = [str(override.value()) for override in theirs] or [cfg.folder or "runs"]
            for folder in folders:
                if "$" not in folder:  # else Hydra has to fill it in
                    check_writable(Path(folder))
            named = cfg.resume not in ("never", "auto", "")  # the rules refuse the last
            if sweep and named and (path := Path(cfg.resume) / "checkpoints").is_dir():
                if path.resolve() in resumed:
                    raise ConfigError(
                        f"resume={cfg.resume}: several jobs of this sweep would go on in that folder, one after the other. "
                        f"Resume one of its checkpoints, and each job goes on from there in a folder of its own: "
                        f"{compose.as_typed('resume', Path(cfg.resume) / 'last')}."
                    )
                resumed.add(path.resolve())
            if not named:  # else the config is the resumed run's, checked once it is read
                rules.check(cfg, machine.inspect(cfg.device))
    except ConfigError as error:
        raise SystemExit(refuse(error, checked)) from None


def jobs(overrides: Sequence[str], sweep: bool) -> Iterator[list[str]]:
    """The overrides of each run that a command asks for."""
    parsed = compose.parse(overrides)
    for override in parsed:
        if override.is_sweep_override() and not sweep:
            raise ConfigError(f"{override.input_line}: several values make several runs; add -m. A list is written [a,b].")
    for job in itertools.product(*map(_values, parsed)):
        yield list(job)


def refuse(error: ConfigError, overrides: Sequence[str] | None = None) -> int:
    """Prints an error as its message alone, with the job of a sweep that has these overrides; HYDRA_FULL_ERROR=1 raises it."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    text = f"error: {error}" + (f"\n(in the job {' '.join(overrides)})" if overrides else "")
    print(text, file=sys.stderr)
    machine.tell_torchrun(text)
    return EXIT_CODE


class as_config_errors:
    """What the data or the model find wrong with the config, as a ConfigError."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ValueError | FileNotFoundError) and not isinstance(error, ConfigError):
            raise ConfigError(str(error)) from error


def check_writable(folder: Path) -> None:
    """Before Hydra makes it. Raises ConfigError: a run's folder can't be made or written there."""
    try:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    except OSError as error:  # a name that is too long, for one
        raise ConfigError(f"a run can't be kept in {folder}: {error.strerror}. Use another folder=PATH.") from None
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is no folder" if not there.is_dir() else "is not writable"
        raise ConfigError(f"a run can't be kept in {folder}: {there} {why}. Choose another place with folder=PATH.")
    try:
        tempfile.TemporaryFile(dir=there).close()  # /proc seems to be writable
    except OSError as error:
        raise ConfigError(f"a run can't be kept in {folder}: {error.strerror}. Use another folder=PATH.") from None


def chooses_folder(cfg: Config, hydra_overrides: Sequence[str]) -> bool:
    """Whether a command says where its run is kept."""
    return cfg.folder is not None or any(
        override.lstrip("+").startswith(tuple(f"{key}=" for key in HYDRAS_FOLDERS)) for override in hydra_overrides
    )


def register_resolvers(arguments: Sequence[str] = (), started: str | None = None) -> None:
    """What config.yaml interpolates, in a command with these arguments.

    Args:
        started: when the command was given, as `now` has it, the same on all ranks; None: now.
    """
    swept, when = _swept(arguments), started or now()
    OmegaConf.register_new_resolver("started", lambda: when, replace=True)
    OmegaConf.register_new_resolver("or", lambda path, default: str(machine.expanded(path)) if path else default, replace=True)
    OmegaConf.register_new_resolver("corpus_name", _corpus_name, replace=True)
    OmegaConf.register_new_resolver("folder_name", _folder_name, replace=True)
    OmegaConf.register_new_resolver("job_folder", lambda number, overrides: _job_folder(number, overrides, swept), replace=True)
    OmegaConf.register_new_resolver("describe_keys", describe_keys, replace=True)


def now() -> str:
    """As folders of runs are named."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def describe_keys() -> str:
    """Every key with what a plain run gets and what stands beside it in schema.py; the values of an enum below the first."""
    lines, section, values, listed = [], "", compose.defaults(), set[type]()
    for key in keys.schema().values():
        if section != (section := key.name.rpartition(".")[0]):
            lines.append("")
        value = repr(values[key.name]) if values[key.name] == "\n" else keys.shown(values[key.name])
        lines.append(f"  {f'{key.name}={value}':<34} {key.meaning}".rstrip())
        if key.type not in listed:
            wide = max(map(len, key.choices), default=0)
            lines += [f"  {'':<34}   {choice:<{wide}}  {meaning}".rstrip() for choice, meaning in key.choices.items()]
        listed.add(key.type)
    return "\n".join(lines) + "\n"


def _values(override: Override) -> list[str]:
    """The single-valued overrides that one override stands for."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def _corpus_name(name: str | None, source: str, path: str | None) -> str:
    return DataConfig(name=name, source=Source(source), path=path).called


def _folder_name(name: str | None, resume: str, *what: object) -> str:
    """A run's folder after the time: logging.name, the run that it goes on from, or what it trains."""
    if name or resume in ("never", "auto"):
        return _safe(name or "_".join(map(str, what)))
    path = Path(resume)
    if path.name in ("last", "best"):
        former = path.parent.name
    else:  # runs/NAME/checkpoints/step_00000200, or runs/NAME
        former = path.parent.parent.name if path.name.startswith("step_") else path.name
    return _safe("resumed_" + re.sub(r"^[\d-]+_[\d-]+_", "", former).removeprefix("resumed_"))


def _swept(arguments: Sequence[str]) -> set[str]:
    """The keys that have several values."""
    try:
        overrides = compose.parse(get_args_parser().parse_known_args(arguments)[0].overrides)
    except ConfigError:
        return set()  # Hydra has its own message
    return {override.get_key_element() for override in overrides if override.is_sweep_override()}


def _job_folder(number: int, overrides: Sequence[str], swept: set[str]) -> str:
    """0_norm.impl-fused_seed-1: what sets the job apart, in what a file name and an unquoted resume= may hold."""
    what = "_".join(override for override in overrides if override.partition("=")[0] in swept)
    return _safe(f"{number}_{what}" if what else number)


def _safe(name: object) -> str:
    return re.sub(r"[^\w.+-]+", "-", str(name))[:120]
