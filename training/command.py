"""How programs of `hydra.main` begin and end, and what Hydra asks them: names of folders, and the text of --help."""

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

import configs
from configs import Config, ConfigError, compose, machine
from measure.files import StorageError
from training.distributed import World, join
from training.interrupt import exit_on_signals, mute, show, take_any_encoding
from training.metrics import NonFiniteError

NO_FOLDER = "resume=auto goes on in the folder that the command names: add folder=runs/NAME (in a sweep that of the sweep)."
RANK_ENDS = "This rank ends, and torchrun ends the others."

full_errors = False  # whether the user has set HYDRA_FULL_ERROR=1; programs set it themselves


class Failed(Exception):
    """A job of a sweep has failed, and said why. The others still run. Its argument is the exit code."""


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
    of: type[Config],
    help_text: Callable[[Any], str],
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs a function of `hydra.main` as the whole program.

    Args:
        of: the class of its keys.
        help_text: what --help prints, with the values of a config; Hydra fills in $APP_CONFIG_GROUPS.
        arguments: of the command; None: those of this process.

    Returns:
        The exit code. 0: done. 1: NaN, or a full disk. 2: an error in the config. 128 plus the signal's number: a signal. For
        a sweep, that of its first run that failed.
    """
    global full_errors
    take_any_encoding()
    here, code, full = world(), 0, os.environ.get("HYDRA_FULL_ERROR", "")
    full_errors, os.environ["HYDRA_FULL_ERROR"] = full == "1", "1"  # Hydra then raises its errors, which have one line here
    if not here.leads:
        mute(sys.stdout)
    exit_on_signals()
    use_one_thread()
    started()

    def template(*, _root_: DictConfig) -> str:  # in which Hydra takes a single $ for a name
        text = help_text(configs.compose_only(_root_.hydra.overrides.task, of))
        return text.replace("$", "$$").replace("$$APP_CONFIG_GROUPS", "$APP_CONFIG_GROUPS")

    OmegaConf.register_new_resolver("prenorm.help", template, replace=True)
    before, given = sys.argv, sys.argv[1:] if arguments is None else arguments
    # overrides come first: argparse would take those behind an option for another list of arguments
    sys.argv = [*before[:1], *sorted(given, key=lambda text: not re.match(r"[^-].*=|~", text))]
    if of.together and all(text.startswith(("--config-", "-cd", "-cp")) for text in given if text.startswith("-")):
        sys.argv.append("-m")  # hydra.mode is not known where the config has an error: Hydra would then refuse several values
    try:
        with compose.explained(of):
            task()
    except BrokenPipeError:  # of `--help | head`; a run itself goes on without its reader
        mute(sys.stdout)
    except KeyboardInterrupt:  # before the first step, from which on Interrupt handles it, or the second one
        code = 130
    except SystemExit as end:
        if isinstance(end.code, str):
            raise  # an error on this rank alone: it waits for nobody, and torchrun ends the other ranks
        code = end.code or 0
    except Exception as error:
        code = report(error)
    finally:
        sys.argv, os.environ["HYDRA_FULL_ERROR"] = before, full
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
    here.leave(code)
    for cached in (world, started):
        cached.cache_clear()
    return code


def report(error: Exception) -> int:
    """Says why the work of a command ends, once for all ranks. Returns the exit code. Raises an error that nobody foresaw."""
    if isinstance(error, Failed):
        return error.args[0]
    get_error_handler().record_exception(error)  # torchrun reports why a rank has failed
    if isinstance(error, ConfigError):
        code, text = 2, f"error: {error}"
    elif isinstance(error, NonFiniteError | StorageError):
        code, text = 1, f"stopped: {error}"
    elif isinstance(error, torch.OutOfMemoryError) and world().size == 1:
        hint = "Lower train.batch_size or model.*, or raise train.accumulation (the same batch in smaller pieces)."
        code, text = 1, f"out of memory: {str(error).splitlines()[0]}\n{hint}"
    elif world().size == 1:
        raise error
    else:
        traceback.print_exception(error)
        raise SystemExit(RANK_ENDS)
    if world().leads:
        if full_errors:
            traceback.print_exception(error)
        show(text, sys.stderr)
    return code


def use_one_thread() -> None:
    """Runs backward in the thread of forward. This process trains on one device: a thread for that device would only find cold
    caches, which takes up to a third of a CPU-bound step."""
    torch.autograd.set_multithreading_enabled(False)


# ---- folders -----------------------------------------------------------------------------------------------------------------


def folder_of(kind: str, time: str, *, _root_: DictConfig) -> str:
    """For configs/*.yaml: `folder`, or runs/TIME_NAME. The name of a run is logging.name, the run that it resumes, or what it
    trains."""
    if _root_.folder:
        return str(machine.expanded(_root_.folder))
    name = kind
    if kind == "run":
        data: Any = OmegaConf.to_object(_root_.data)
        resumed = Path(re.sub(r"/(last|best|checkpoints/\w+)/*$", "", _root_.resume)).name
        resumed = "resumed_" + re.sub(r"^[\d-]+_[\d-]+_", "", resumed).removeprefix("resumed_")
        trains = f"{data.called}_{_root_.hydra.runtime.choices.model}_{_root_.norm.impl}"
        name = _root_.logging.name or (trains if _root_.resume in ("never", "auto") else resumed)
    return f"runs/{time}_{safe(name)}"


def safe(name: str) -> str:
    """A name that a file may have and that resume= takes without quotes."""
    return re.sub(r"[^\w.+-]+", "-", name)[:120].rstrip("_")


OmegaConf.register_new_resolver("prenorm.started", started, use_cache=True, replace=True)  # jobs of a sweep share it
OmegaConf.register_new_resolver("prenorm.folder", folder_of, replace=True)
OmegaConf.register_new_resolver("prenorm.safe", safe, replace=True)


def names_folder(cfg: Config) -> bool:
    """Whether the command names the folder of its run, so that it may have one already. Raises ConfigError: it names two."""
    by_hydra = [text for text in HydraConfig.get().overrides.hydra if "hydra.run.dir=" in text or "hydra.sweep.dir=" in text]
    if by_hydra and cfg.folder:
        raise ConfigError(f"folder={cfg.folder} and {by_hydra[0]} name two folders. Give one of them.")
    return bool(by_hydra or cfg.folder)
