"""The task that train.py gives Hydra, Hydra's hooks, and how programs begin and end."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from configs import Config, ConfigError, command_line, compose, keys, machine, rules
from configs.machine import Machine
from measure.environment import environment
from training.distributed import World, join
from training.interrupt import Stopped, exit_on_signals, mute, show, take_any_encoding
from training.run import Run, Summary
from training.storage import StorageError

Train = Callable[[Config, Run, Machine, World], Summary]


@cache
def world() -> World:
    """The place of this process among those of torchrun."""
    return join()


# ---- a process ---------------------------------------------------------------------------------------------------------------


class Failed(Exception):
    """A job of a sweep has failed with an exit code, and said why. The others still run."""


class Ended(SystemExit):
    """A run that is alone has failed with an exit code, and said why, on all ranks."""


_codes: list[int] = []  # exit codes of jobs of this process
end = _codes.append


def start(task: Callable[[], object], arguments: Sequence[str] | None = None, stopped: Callable[[], str] | None = None) -> int:
    """Runs a function of `hydra.main` as the whole program.

    Args:
        arguments: of the command; None: those of this process.
        stopped: of a program that is one process: what to say after a signal.

    Returns:
        The exit code. 0: done. 1: NaN, or a full disk. 2: an error in the config. 128 plus the signal's number: a signal. For
        a sweep, the highest of its runs.
    """
    take_any_encoding()
    before = os.environ.get("HYDRA_FULL_ERROR", "")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors, which have one line here
    code = 0
    if not world().leads:
        mute(sys.stdout)
    exit_on_signals()
    use_one_thread()
    # overrides come first: argparse would take those behind an option for another list of arguments
    given = sys.argv[1:] if arguments is None else arguments
    sys.argv[1:] = sorted(given, key=lambda text: text.startswith("-") or "=" not in text)
    try:
        if "--version" in sys.argv[1:]:
            show(version())
        else:
            if stopped:
                machine.refuse_ranks(Path(sys.argv[0]).name)
            with compose.explained():
                task()
    except ConfigError as error:
        if before == "1":
            raise
        code = command_line.refuse(error) if world().leads else command_line.EXIT_CODE
    except StorageError as error:
        print(f"stopped: {error}", file=sys.stderr)
        code = 1
    except (Failed, Ended) as error:
        code = error.args[0]
    except BrokenPipeError:  # of `--help | head`; a run itself goes on without its reader
        mute(sys.stdout)
    except (KeyboardInterrupt, Stopped) as stop:
        # Ctrl-C before the first step, from which on Interrupt handles it, or the second one
        code = 130 if isinstance(stop, KeyboardInterrupt) else int(stop.code)  # type: ignore[arg-type]  # a number
        if stopped:
            print(stopped(), file=sys.stderr)
    except SystemExit as stop:
        if stop.code == 1 or isinstance(stop.code, str):
            raise  # an exception on this rank alone: it waits for nobody, and torchrun ends the other ranks
        code = stop.code or 0
    finally:
        os.environ["HYDRA_FULL_ERROR"] = before
    code = max(code, *_codes, 0)
    _codes.clear()
    world().leave(code)
    world.cache_clear()
    return code


def version() -> str:
    facts = environment(torch.device("cpu"))
    return f"prenorm {facts['versions']['prenorm']}, git {facts['git']}, torch {facts['versions']['torch']}"


def use_one_thread() -> None:
    """Runs backward in the thread of forward. This process trains on one device: a thread for that device would only find cold
    caches, which takes up to a third of a CPU-bound step."""
    torch.autograd.set_multithreading_enabled(False)


# ---- Hydra's hooks -----------------------------------------------------------------------------------------------------------


class Check(Callback):
    """Checks a run, or all runs of a sweep of Hydra's own sweeper, before anything is made or started."""

    jobs = 0  # of the sweep; 0: not known

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        _or_exit(lambda: check([list(config.hydra.overrides.task)], [config]))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        def act() -> None:
            arguments = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
            arguments += list(config.hydra.overrides.task)
            fixed = set(compose.given(arguments)) - set(compose.swept(arguments))
            config.hydra.overrides.hydra.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(sorted(fixed))}]")
            if config.hydra.sweeper._target_.endswith(".BasicSweeper"):
                jobs = compose.jobs(arguments)
                Check.jobs = len(jobs)
                check(jobs, [compose.composed(job, config.hydra.job.config_name) for job in jobs])

        _or_exit(act)


def check(jobs: list[list[str]], composed: list[DictConfig]) -> None:
    """
    Raises:
        ConfigError: a job can't start, or a key that they have does nothing in any of them.
    """
    begun = []
    for job, found in zip(jobs, composed, strict=True):
        try:
            compose.parse(job)
            cfg = compose.typed(found)
            if cfg.resume in ("never", "auto"):  # else the config is that of the resumed run
                rules.check(cfg, machine.inspect(cfg.device))
                begun.append(cfg)
        except ConfigError as error:
            raise ConfigError(f"{error}\n(in the job {' '.join(job)})") if len(jobs) > 1 else error from None
    if begun:
        rules.check_given([name for job in jobs for name in compose.given(job)], begun, "train.py")


def _or_exit(act: Callable[[], None]) -> None:
    """Hydra makes a warning of an error in a callback, but not of SystemExit."""
    try:
        with world().shared_errors():
            act()
    except ConfigError as error:
        raise SystemExit(command_line.refuse(error) if world().leads else command_line.EXIT_CODE) from None


def _folder(name: str, *, _root_: DictConfig) -> str:
    """`folder`, or runs/NAME."""
    return str(machine.expanded(_root_.folder)) if _root_.folder else f"runs/{name}"


def _name(*, _root_: DictConfig) -> str:
    return run_name(compose.typed(_root_), str(_root_.hydra.runtime.choices.model))


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


def _keys(section: str = "", *, _root_: DictConfig) -> str:
    """For the template of Hydra's help, in which $ has a meaning."""
    return keys.describe(compose.typed(_root_), section).strip("\n").replace("$", "$$")


@cache
def started(world: World) -> str:
    return world.on_first(command_line.now)


OmegaConf.register_new_resolver("prenorm.started", lambda: started(world()), use_cache=True)  # jobs of a sweep share it
OmegaConf.register_new_resolver("prenorm.folder", _folder)
OmegaConf.register_new_resolver("prenorm.name", _name)
OmegaConf.register_new_resolver("prenorm.safe", safe)
OmegaConf.register_new_resolver("prenorm.keys", _keys)
