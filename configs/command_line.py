"""The command line of train.py. `check` checks the runs of a command before Hydra starts the first."""

import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from configs import compose, keys, machine, rules
from configs.keys import ConfigError
from configs.schema import Config

EXIT_CODE = 2  # of an error in the configuration, as in argparse
MOST_CHECKED = 64  # runs of a sweep: composing one takes 0.1 s


def check(arguments: Sequence[str]) -> set[str]:
    """The keys of a sweep, if the runs that `arguments` ask for can start. Else it prints why and exits with EXIT_CODE."""
    given, others = _parsed(arguments)
    if others:  # options with which there is no run, and those that Hydra refuses
        return set()
    job = None
    try:
        if given.multirun and given.cfg:
            raise ConfigError("--cfg prints the config of one run. Leave out -m.")
        for job in islice(compose.jobs(given.overrides), MOST_CHECKED) if given.multirun else [given.overrides]:
            cfg = compose.compose_only(job)
            if given.help:
                return set()
            _check_folder(Path(cfg.folder or "runs").absolute())
            if cfg.resume in ("never", "auto"):  # else the config is that of the resumed run
                rules.check(cfg, machine.inspect(cfg.device))
        return {one.get_key_element() for one in compose.parse(given.overrides) if one.is_sweep_override()}
    except ConfigError as error:
        raise SystemExit(refuse(error, job if given.multirun else None)) from None


def options_first(arguments: Sequence[str]) -> list[str]:
    """The arguments with Hydra's options before the overrides: Hydra refuses overrides on both sides of an option."""
    overrides = _parsed(arguments)[0].overrides
    return [*(text for text in arguments if text not in overrides), *overrides]


def _parsed(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Overrides, the options of Hydra that a checked command may have, and all other options."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-c", "--cfg")
    for option in (("-m", "--multirun"), ("-h", "--help"), ("--resolve",)):
        parser.add_argument(*option, action="store_true")
    return parser.parse_known_intermixed_args(arguments)


def _check_folder(folder: Path) -> None:
    """Raises ConfigError if no run can be kept there."""
    if "${" in str(folder):
        raise ConfigError(f"folder={folder}: Hydra can't keep a run in a folder with ${{ in its path. Use another.")
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        TemporaryFile(dir=there).close()  # permissions alone don't tell: root, /proc
    except OSError as error:
        raise ConfigError(f"{folder}: no run can be kept there ({error.strerror}). Use another folder=PATH.") from None


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


def register_resolvers(swept: set[str], started: str) -> None:
    """Registers what config.yaml interpolates: the keys in --help, and folders, named by time and by the keys of a sweep."""

    def folder(kind: str, *, _root_: DictConfig) -> str:
        if kind == "job":
            return job_name(_root_.hydra.job.num, _root_.hydra.overrides.task, swept)
        if _root_.folder:
            return str(machine.expanded(_root_.folder))
        return f"runs/{started}_{'sweep' if kind == 'sweep' else run_name(_root_)}"

    def described(*, _root_: DictConfig) -> str:
        return describe_keys(_root_).replace("$", "$$")  # Hydra's template of --help reads $$ as $

    OmegaConf.register_new_resolver("folder", folder, replace=True)
    OmegaConf.register_new_resolver("describe_keys", described, replace=True)


def now() -> str:
    """The time, as in the names of run folders."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def describe_keys(config: Config | DictConfig) -> str:
    """Every key with its value and its meaning; under a key with choices, each choice and its meaning."""
    lines, section = [], ""
    for name, key in keys.schema().items():
        if section != (section := name.rpartition(".")[0]):
            lines.append("")
        lines.append(f"  {f'{name}={keys.shown(attrgetter(name)(config))}':<33}  {key.metadata['meaning']}")
        choices = keys.choices(key)
        wide = max(map(len, choices), default=0)
        lines += [f"  {'':<34}   {choice:<{wide}}  {meaning}" for choice, meaning in choices.items()]
    return "\n".join(lines) + "\n"


def run_name(config: DictConfig) -> str:
    """The name of a run's folder after the time: logging.name, the run that it resumes, or what it trains."""
    if config.logging.name:
        return _safe(config.logging.name)
    if config.resume in ("never", "auto"):
        data: Any = OmegaConf.to_object(config.data)
        return _safe(f"{data.called}_{config.hydra.runtime.choices.get('model')}_{config.norm.impl}")
    run = Path(re.sub(r"/(last|best|checkpoints/\w+)/*$", "", config.resume)).name
    return _safe("resumed_" + re.sub(r"^[\d-]+_[\d-]+_", "", run).removeprefix("resumed_"))


def job_name(number: int, overrides: Sequence[str], swept: set[str]) -> str:
    """The folder of a run in a sweep, such as 0_norm.impl-fused_seed-1: its number and what sets it apart."""
    return _safe("_".join([str(number), *(text for text in overrides if text.partition("=")[0] in swept)]))


def _safe(name: str) -> str:
    """A name that a file may have and that resume= takes without quotes."""
    return re.sub(r"[^\w.+-]+", "-", name)[:120]
