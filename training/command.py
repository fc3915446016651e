"""How programs of `hydra.main` begin and end, and what Hydra asks them: names of folders, and the text of --help."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from configs import Config, ConfigError, command_line, compose, keys, machine
from measure.environment import environment
from measure.files import StorageError, relative
from training import storage
from training.distributed import World, join
from training.interrupt import Stopped, exit_on_signals, mute, show, take_any_encoding

NO_FOLDER = "resume=auto goes on in the folder that the command names: add folder=runs/NAME (in a sweep that of the sweep)."


class Failed(Exception):
    """A job of a sweep has failed with this exit code, and said why. The others still run."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@cache
def world() -> World:
    """The place of this process among those of torchrun."""
    return join()


@cache
def started() -> str:
    """When the command was given, as in the names of run folders: the same on all ranks."""
    return world().on_first(lambda: datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))


def start(
    task: Callable[[], object],
    help_text: Callable[[Config], str],
    arguments: Sequence[str] | None = None,
    stopped: Callable[[], str] | None = None,
) -> int:
    """Runs a function of `hydra.main` as the whole program.

    Args:
        help_text: what --help prints, with the values of a config; Hydra fills in $APP_CONFIG_GROUPS.
        arguments: of the command; None: those of this process.
        stopped: of a program that is one process: what to say after a signal.

    Returns:
        The exit code. 0: done. 1: NaN, or a full disk. 2: an error in the config. 128 plus the signal's number: a signal. For
        a sweep, the highest of its runs.
    """
    take_any_encoding()
    here, code = world(), 0
    full = os.environ.get("HYDRA_FULL_ERROR", "")
    command_line.full_errors = full == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors, which have one line here
    if not here.leads:
        mute(sys.stdout)
    exit_on_signals()
    use_one_thread()
    started()

    def template(*, _root_: DictConfig) -> str:  # in which Hydra takes a single $ for a name
        return help_text(compose.typed(_root_)).replace("$", "$$").replace("$$APP_CONFIG_GROUPS", "$APP_CONFIG_GROUPS")

    OmegaConf.register_new_resolver("prenorm.help", template, replace=True)
    # overrides come first: argparse would take those behind an option for another list of arguments
    before, given = sys.argv, sys.argv[1:] if arguments is None else arguments
    sys.argv = [*before[:1], *sorted(given, key=lambda text: text.startswith("-") or not ("=" in text or text[:1] == "~"))]
    try:
        if "--version" in given:
            facts = environment(torch.device("cpu"))
            show(f"prenorm {facts['versions']['prenorm']}, git {facts['git']}, torch {facts['versions']['torch']}")
        else:
            with compose.explained():
                task()
    except ConfigError as error:
        code = command_line.refuse(error) if here.leads else command_line.EXIT_CODE
    except StorageError as error:
        show(f"stopped: {error}", sys.stderr)
        code = 1
    except Failed as error:
        code = error.code
    except BrokenPipeError:  # of `--help | head`; a run itself goes on without its reader
        mute(sys.stdout)
    except (KeyboardInterrupt, Stopped) as stop:
        # Ctrl-C before the first step, from which on Interrupt handles it, or the second one
        code = 130 if isinstance(stop, KeyboardInterrupt) else int(stop.code)  # type: ignore[arg-type]  # a number
        if stopped:
            show(stopped(), sys.stderr)
    except SystemExit as end:
        if isinstance(end.code, str):
            raise  # an error on this rank alone: it waits for nobody, and torchrun ends the other ranks
        code = end.code or 0
    finally:
        sys.argv, os.environ["HYDRA_FULL_ERROR"] = before, full
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
    here.leave(code)
    for of in (world, started):
        of.cache_clear()
    return code


def use_one_thread() -> None:
    """Runs backward in the thread of forward. This process trains on one device: a thread for that device would only find cold
    caches, which takes up to a third of a CPU-bound step."""
    torch.autograd.set_multithreading_enabled(False)


# ---- what configs/config.yaml asks for ---------------------------------------------------------------------------------------


def _folder(kind: str, time: str, *, _root_: DictConfig) -> str:
    """`folder`, or runs/TIME_NAME."""
    cfg = compose.typed(_root_)
    name = command_line.run_name(cfg, str(_root_.hydra.runtime.choices.model)) if kind == "run" else kind
    return cfg.folder or f"runs/{time}_{name}"


OmegaConf.register_new_resolver("prenorm.started", started, use_cache=True, replace=True)  # jobs of a sweep share it
OmegaConf.register_new_resolver("prenorm.folder", _folder, replace=True)
OmegaConf.register_new_resolver("prenorm.safe", command_line.safe, replace=True)


def names_folder(cfg: Config | DictConfig) -> bool:
    """Whether the command names the folder of its run, so that it may have one already. Raises ConfigError: it names two."""
    by_hydra = [text for text in HydraConfig.get().overrides.hydra if "hydra.run.dir=" in text or "hydra.sweep.dir=" in text]
    if by_hydra and cfg.folder:
        raise ConfigError(f"folder={cfg.folder} and {by_hydra[0]} name two folders. Give one of them.")
    return bool(by_hydra or cfg.folder)


# ---- ablate.py and compare.py ------------------------------------------------------------------------------------------------


def program(
    name: str,
    work: Callable[[list[str]], int],
    help_text: Callable[[], str],
    stopped: Callable[[], str],
    arguments: Sequence[str] | None,
) -> int:
    """Does the work of a program that measures, with the overrides of its command, or what Hydra's options ask for.

    Args:
        name: of the program, and of its config in configs/, such as "ablate".
        stopped: what to say after a signal.

    Returns:
        The exit code: that of `work`; 1 for a full disk, 2 for a config that is refused, 128 plus its number for a signal.
    """

    def task(overrides: list[str]) -> int:
        if machine.by_torchrun():
            raise ConfigError(f"torchrun: {name}.py is one process on one device. Start it without: python {name}.py ...")
        return work(overrides)

    decorated: Any = hydra.main(config_path=str(keys.FOLDER), config_name=name, version_base=None)(task)
    return start(decorated, lambda _: help_text(), arguments, stopped)


@contextmanager
def place(cfg: Config, name: str) -> Iterator[Path]:
    """The folder of the program `name`, locked: hydra.sweep.dir, which is a new one, or with resume=auto that of an earlier
    process. Raises ConfigError: it can't be used."""
    if cfg.resume not in ("never", "auto"):
        goes_on = f"{name} goes on with folder={cfg.resume} resume=auto and the same arguments"
        raise ConfigError(f"resume={cfg.resume}: {goes_on}. For the weights of a run: init_from=PATH.")
    if (resumes := cfg.resume == "auto") and not names_folder(cfg):
        raise ConfigError(NO_FOLDER)
    wanted = Path(HydraConfig.get().sweep.dir)
    with storage.claim(wanted, name, resumes=resumes) as folder:
        if folder != wanted:
            show(f"{relative(wanted)} has another run already, so this one is kept in {relative(folder)}.")
        yield folder


def own_keys(section: str) -> str:
    """The keys of a section with their defaults, a line each, for help."""
    lines = command_line.describe_keys(Config()).splitlines()
    return "".join(f"{line}\n" for line in lines if line.strip().startswith(f"{section}."))
