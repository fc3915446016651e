"""The command line of train.py: the runs that it asks for, what it prints, and the names of run folders."""

import json
import os
import re
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from pathlib import Path

from configs import compose, keys, machine, rules
from configs.keys import ConfigError
from configs.schema import Config

EXIT_CODE = 2  # of an error in the configuration, as in argparse


@dataclass(frozen=True)
class Job:
    """One run that a command asks for."""

    overrides: list[str]
    cfg: Config
    folder: Path  # of a new run
    swept: bool  # it is one of several

    @property
    def begins(self) -> bool:
        """Whether `cfg` is that of the run. With resume=PATH the run has another one."""
        return self.cfg.resume in ("never", "auto")


def read(arguments: Sequence[str]) -> list[Job] | str:
    """The runs that a command asks for, all of them composed and checked before the first starts; or the text that it prints.

    Raises:
        ConfigError: a run can't start.
        SystemExit: there is no such option.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    given = parser.parse_intermixed_args(arguments)
    if given.help:
        return help_text(compose.compose_only(given.overrides))
    if given.cfg:
        return compose.to_yaml(compose.compose_only(given.overrides))
    if given.multirun:
        sweep = f"runs/{now()}_sweep"
        swept = {one.get_key_element() for one in compose.parse(given.overrides) if one.is_sweep_override()}
        jobs = [_job(job, sweep, job_name(i, job, swept)) for i, job in enumerate(compose.jobs(given.overrides))]
    else:
        jobs = [_job(given.overrides, f"runs/{now()}_{{run}}")]
    if begun := [job.cfg for job in jobs if job.begins]:
        rules.check_given(compose.given(given.overrides), begun, "train.py")
    return jobs


def _job(overrides: list[str], folder: str, name: str | None = None) -> Job:
    """The run of these overrides, in a folder with this name within the folder of a sweep."""
    try:
        cfg, model = compose.composed(overrides)
        if cfg.resume in ("never", "auto"):  # else the config is that of the resumed run
            rules.check(cfg, machine.inspect(cfg.device))
    except ConfigError as error:
        raise ConfigError(f"{error}\n(in the job {' '.join(overrides)})") if name else error from None
    path = Path(cfg.folder or folder.format(run=run_name(cfg, model)))
    return Job(overrides, cfg, path / (name or ""), swept=name is not None)


def refuse(error: ConfigError) -> int:
    """Prints the message of an error. With HYDRA_FULL_ERROR=1 it raises the error."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    print(f"error: {error}", file=sys.stderr)
    record_for_torchrun(error)
    return EXIT_CODE


def record_for_torchrun(error: Exception) -> None:
    """Makes torchrun's report of a failed rank end with the message. The traceback would hide it."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": f"{error}", "extraInfo": {"py_callstack": f"{error}", "timestamp": f"{int(time.time())}"}}
        Path(file).write_text(json.dumps({"message": said}), encoding="utf-8")


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Raises what the data or the model refuse as a ConfigError."""
    with files_as_config_errors():
        try:
            yield
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error


@contextmanager
def files_as_config_errors() -> Iterator[None]:
    """Raises an error of a file that a command names, such as one whose name is too long, as a ConfigError."""
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:  # of a stream
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}." if error.filename else str(error)) from error


def now() -> str:
    """The time, as in the names of run folders."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def help_text(cfg: Config) -> str:
    """What --help prints, with the values of this config."""
    options = {group: sorted(path.stem for path in (keys.FOLDER / group).glob("*.yaml")) for group in keys.GROUPS}
    groups = "".join(f"{group}: {', '.join(names)}\n" for group, names in options.items())
    return (keys.FOLDER / "help.txt").read_text(encoding="utf-8").format(groups=groups, keys=describe_keys(cfg))


def describe_keys(config: Config) -> str:
    """Every key with its value and its meaning; under a key with choices, each choice and its meaning."""
    lines, section = [], ""
    for name, key in keys.schema().items():
        if section != (section := name.rpartition(".")[0]):
            lines.append("")
        needs = f"with {only}: " if (only := keys.only(name)) else ""
        lines.append(f"  {f'{name}={keys.shown(attrgetter(name)(config))}':<33}  {needs}{key.metadata['meaning']}")
        choices = keys.choices(key)
        wide = max(map(len, choices), default=0)
        lines += [f"  {'':<34}   {choice:<{wide}}  {meaning}" for choice, meaning in choices.items()]
    return "\n".join(lines) + "\n"


def run_name(cfg: Config, model: str) -> str:
    """The name of a run's folder after the time: logging.name, the run that it resumes, or what it trains."""
    if cfg.logging.name:
        return _safe(cfg.logging.name)
    if cfg.resume in ("never", "auto"):
        return _safe(f"{cfg.data.called}_{model}_{cfg.norm.impl}")
    run = Path(re.sub(r"/(last|best|checkpoints/\w+)/*$", "", cfg.resume)).name
    return _safe("resumed_" + re.sub(r"^[\d-]+_[\d-]+_", "", run).removeprefix("resumed_"))


def job_name(number: int, overrides: Sequence[str], swept: set[str]) -> str:
    """The folder of a run in a sweep, such as 0_norm.impl-fused_seed-1: its number and what sets it apart."""
    last = {text.partition("=")[0]: text for text in overrides}
    return _safe("_".join([str(number), *(text for key, text in last.items() if key in swept)]))


def _safe(name: str) -> str:
    """A name that a file may have and that resume= takes without quotes."""
    return re.sub(r"[^\w.+-]+", "-", name)[:120]
