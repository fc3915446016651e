"""What --help prints, the names of run folders, and how an error of a command is shown."""

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

import yaml

from configs import keys
from configs.keys import ConfigError
from configs.schema import Config

EXIT_CODE = 2  # of an error in the configuration, as in argparse
full_errors = False  # whether the user has set HYDRA_FULL_ERROR=1; programs set it themselves


def refuse(error: ConfigError) -> int:
    """Prints the message of an error, with its traceback under HYDRA_FULL_ERROR=1. Returns the exit code."""
    if full_errors:
        traceback.print_exception(error)
    print(f"error: {error}", file=sys.stderr)
    record_for_torchrun(error)
    return EXIT_CODE


def record_for_torchrun(error: Exception) -> None:
    """Makes torchrun's report of a failed rank end with the message. The traceback would hide it."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": f"{error}", "extraInfo": {"py_callstack": f"{error}", "timestamp": f"{int(time.time())}"}}
        Path(file).write_text(json.dumps({"message": said}), encoding="utf-8")


@contextmanager
def as_config_errors(argument: str = "") -> Iterator[None]:
    """Raises what the data or the model refuse, and an OSError of a path, as a ConfigError. Its message begins with `argument`,
    such as resume=PATH."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError, yaml.YAMLError) as error:
        where, why = argument, str(error)
        if isinstance(error, OSError) and error.strerror:
            where, why = argument or str(error.filename), f"{error.strerror}."
        raise ConfigError(f"{where}: {why}" if where else why) from error


def help_text(cfg: Config) -> str:
    """What `train.py --help` prints, with the values of this config. Hydra fills in the groups."""
    return (keys.FOLDER / "help.txt").read_text(encoding="utf-8").format(keys=describe_keys(cfg))


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
        return safe(cfg.logging.name)
    if cfg.resume in ("never", "auto"):
        return safe(f"{cfg.data.called}_{model}_{cfg.norm.impl}")
    run = Path(re.sub(r"/(last|best|checkpoints/\w+)/*$", "", cfg.resume)).name
    return safe("resumed_" + re.sub(r"^[\d-]+_[\d-]+_", "", run).removeprefix("resumed_"))


def safe(name: str) -> str:
    """A name that a file may have and that resume= takes without quotes."""
    return re.sub(r"[^\w.+-]+", "-", name)[:120].rstrip("_")
