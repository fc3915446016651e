"""The command line of train.py. `check` checks the runs of a command before Hydra starts the first."""

import argparse
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, ValueType
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from configs import compose, keys, machine, rules
from configs.keys import ConfigError

EXIT_CODE = 2  # of an error in the configuration, as in argparse
# Options of Hydra with which there is no run, or a configuration from elsewhere.
NO_RUN = {"-h", "--help", "--hydra-help", "--version", "-i", "--info", "-sc", "--shell-completion"}
NO_RUN |= {"-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir", "--experimental-rerun"}
MOST_RUNS_CHECKED = 64  # of a sweep: composing one takes 0.1 s


def check(arguments: Sequence[str]) -> None:
    """Returns if every run that `arguments` ask for can start. Else it prints why and ends the process with EXIT_CODE."""
    if NO_RUN & {argument.partition("=")[0] for argument in arguments}:
        return
    checked: list[str] | None = None
    try:
        overrides, sweep = _split(arguments)
        for one in itertools.islice(jobs(overrides, sweep), MOST_RUNS_CHECKED):
            checked = one if sweep else None
            cfg = compose.compose_only(one)
            folder = Path(cfg.folder or "runs").absolute()
            there = next(path for path in (folder, *folder.parents) if path.exists())
            if not (there.is_dir() and os.access(there, os.W_OK)):
                raise ConfigError(f"{folder}: no run can be kept there, as {there} can't be written. Use another folder=PATH.")
            if cfg.resume in ("never", "auto"):
                rules.check(cfg, machine.inspect(cfg.device))
    except ConfigError as error:
        raise SystemExit(refuse(error, checked)) from None


def jobs(overrides: Sequence[str], sweep: bool) -> Iterator[list[str]]:
    """The overrides of each run that a command asks for: all combinations of the values of a sweep."""
    values = []
    for override in compose.parse(overrides):
        if not override.is_sweep_override():
            values.append([str(override.input_line)])
        elif not sweep:
            raise ConfigError(f"{override.input_line}: several values make several runs; add -m. A list is written [a,b].")
        elif override.value_type in (ValueType.INTERVAL_SWEEP, ValueType.GLOB_CHOICE_SWEEP):
            key = override.get_key_element()
            raise ConfigError(f"{override.input_line}: a sweep needs its values: {key}=A,B, or for numbers {key}=range(1,4).")
        else:
            values.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
    for job in itertools.product(*values):
        yield list(job)


def refuse(error: ConfigError, overrides: Sequence[str] | None = None) -> int:
    """Prints the message of an error, and the overrides of the run in a sweep. With HYDRA_FULL_ERROR=1 it raises the error."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    print(f"error: {error}" + (f"\n(in the job {' '.join(overrides)})" if overrides else ""), file=sys.stderr)
    ErrorHandler().record_exception(error)  # for the report of torchrun
    return EXIT_CODE


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Raises what the data or the model refuse as a ConfigError."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error


def register_resolvers(arguments: Sequence[str] = (), started: str | None = None) -> None:
    """Registers what config.yaml interpolates: names of folders, and the keys in --help.

    Args:
        arguments: of the command; a run of a sweep is named by the keys that they sweep.
        started: the time of the command, the same on all ranks. None: now.
    """
    when, swept = started or now(), _swept(arguments)

    def folder(kind: str, *, _root_: Any) -> str:
        if kind == "job":
            return job_name(_root_.hydra.job.num, _root_.hydra.overrides.task, swept)
        if _root_.folder:
            return str(Path(_root_.folder).expanduser())
        return f"runs/{when}_{'sweep' if kind == 'sweep' else run_name(_root_)}"

    OmegaConf.register_new_resolver("folder", folder, replace=True)
    OmegaConf.register_new_resolver("describe_keys", describe_keys, replace=True)


def now() -> str:
    """The time, as in the names of run folders."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def describe_keys() -> str:
    """Every key with its value in a plain run and its meaning; under a key with choices, each choice and its meaning."""
    lines, section, plain, described = [], "", compose.composed(), set[type]()
    for key in keys.schema().values():
        if section != (section := key.name.rpartition(".")[0]):
            lines.append("")
        value = OmegaConf.select(plain, key.name)
        lines.append(f"  {key.name + '=' + (repr(value) if value == chr(10) else keys.shown(value)):<34} {key.meaning}")
        if key.type not in described:
            wide = max(map(len, key.choices), default=0)
            lines += [f"  {'':<34}   {choice:<{wide}}  {meaning}" for choice, meaning in key.choices.items()]
        described.add(key.type)
    return "\n".join(lines) + "\n"


def run_name(config: DictConfig) -> str:
    """The name of a run's folder after the time: logging.name, the run that it resumes, or what it trains."""
    if config.logging.name:
        return _safe(config.logging.name)
    if config.resume in ("never", "auto"):
        data: Any = OmegaConf.to_object(config.data)
        return _safe(f"{data.called}_{config.hydra.runtime.choices.model}_{config.norm.impl}")
    path = Path(config.resume)  # runs/NAME, runs/NAME/last or runs/NAME/checkpoints/step_00000200
    run = path.parent if path.name in ("last", "best") else path.parent.parent if path.name.startswith("step_") else path
    return _safe("resumed_" + re.sub(r"^[\d-]+_[\d-]+_", "", run.name).removeprefix("resumed_"))


def job_name(number: int, overrides: Sequence[str], swept: set[str]) -> str:
    """The folder of a run in a sweep, such as 0_norm.impl-fused_seed-1: its number and what sets it apart."""
    return _safe("_".join([str(number), *(text for text in overrides if text.partition("=")[0] in swept)]))


def _safe(name: str) -> str:
    """A name that a file may have and that resume= takes without quotes."""
    return re.sub(r"[^\w.+-]+", "-", name)[:120]


def _split(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The overrides, and whether they are a sweep."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-r", "--run", "--resolve", action="store_true")
    parser.add_argument("-c", "--cfg")
    parser.add_argument("-p", "--package")
    args, rest = parser.parse_known_args(arguments)
    if compose.parse(rest):  # argparse takes the overrides in one piece
        raise ConfigError(f"{rest[0]}: options such as -m stand before all of key=value, or behind, not between them.")
    return args.overrides, args.multirun or "hydra.mode=MULTIRUN" in args.overrides


def _swept(arguments: Sequence[str]) -> set[str]:
    """The keys that have several values."""
    try:
        overrides: list[Override] = compose.parse(_split(arguments)[0])
    except ConfigError:
        return set()  # of a command that runs nothing, such as --help
    return {override.get_key_element() for override in overrides if override.is_sweep_override()}
