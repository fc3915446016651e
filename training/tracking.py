"""W&B: its settings, chosen before a run starts, and a run there that is always closed."""

import contextlib
import logging as python_logging
import netrc
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import wandb
import yaml
from wandb.sdk import wandb_setup

from configs import ConfigError
from configs.keys import shown
from configs.schema import LoggingConfig, WandbMode
from training.console import show

START_TIMEOUT_S = 30.0  # for W&B's servers to answer, unless WANDB_INIT_TIMEOUT is set; training does not wait longer

# Keys of LoggingConfig that may be null: the variable that then decides, and their name in W&B's settings.
VARIABLES = {
    "wandb": ("WANDB_MODE", "mode"),
    "project": ("WANDB_PROJECT", "project"),
    "entity": ("WANDB_ENTITY", "entity"),
    "group": ("WANDB_RUN_GROUP", "run_group"),
    "name": ("WANDB_NAME", "run_name"),
    "tags": ("WANDB_TAGS", "run_tags"),
}
MODES = {mode.value: mode for mode in WandbMode} | {"run": WandbMode.online, "dryrun": WandbMode.offline}  # and W&B's old names


def settle(logging: LoggingConfig) -> tuple[LoggingConfig, list[str]]:
    """Fills keys that are null from W&B's environment variables or with defaults. Uses no network.

    Returns:
        The config, and facts for the user: which variables were used or overruled, and why the mode is another one.

    Raises:
        ConfigError: W&B refuses a variable or a key. Nothing is refused where W&B is disabled.
    """
    if agent_job():
        logging = replace(logging, project=None, entity=None)  # W&B's agent has set the variables of its sweep
    asked = os.environ.get("WANDB_MODE", WandbMode.offline.value)
    if logging.wandb is None and asked not in MODES:
        raise ConfigError(f"WANDB_MODE={asked}: not a mode that can be used here. Use online, offline or disabled.")
    mode = logging.wandb or MODES[asked]
    off = mode is WandbMode.disabled
    theirs = wandb.Settings() if off else _checked(logging)
    facts: list[str] = []
    found: dict[str, Any] = {"project": "prenorm", "tags": []}
    for key, (variable, field) in VARIABLES.items():
        own, value = getattr(logging, key), os.environ.get(variable)
        if value and (key == "wandb" or not off):
            given = getattr(theirs, field)
            found[key] = list(given) if isinstance(given, tuple) else given
            wins = own is not None and own != found[key]
            facts.append(f"logging.{key}={shown(own)}, not {variable}={value}" if wins else f"{variable}={value}")
    if off:
        return replace(logging, wandb=mode), facts
    for variable in ("WANDB_RUN_ID", "WANDB_RESUME"):
        if os.environ.get(variable) and not agent_job():
            facts.append(f"{variable} is not used: a run keeps an id of its own")
    if place := os.environ.get("WANDB_DIR"):
        facts.append(f"WANDB_DIR={place}")
    found = {key: value for key, value in found.items() if getattr(logging, key) is None}
    logging = replace(logging, **found | {"wandb": mode})
    if mode is WandbMode.online and not has_key():
        logging.wandb = WandbMode(logging.without_key)
        facts.append("no API key found; `wandb login` stores one")
    return logging, facts


def described(mode: WandbMode, facts: list[str]) -> str:
    """The mode of a run and the reasons for it, for the user."""
    return f"{mode} ({'; '.join(facts)})" if facts else mode.value


def _checked(logging: LoggingConfig) -> Any:
    """W&B's settings from the environment, after W&B has checked them and those of the config."""
    theirs = wandb.Settings()
    for variable, value in os.environ.items():
        if variable.startswith("WANDB_"):
            with _refused(variable if variable == "WANDB_API_KEY" else f"{variable}={value}"):
                theirs.update_from_env_vars({variable: value})
    for variable in ("WANDB_DIR", "WANDB_CACHE_DIR"):
        if place := os.environ.get(variable):
            with _refused(f"{variable}={place}"):
                Path(place).expanduser().mkdir(parents=True, exist_ok=True)
                if not os.access(Path(place).expanduser(), os.R_OK | os.W_OK | os.X_OK):
                    raise PermissionError
    own = wandb.Settings()
    for key, (_, field) in VARIABLES.items():
        if (value := getattr(logging, key)) is not None:
            with _refused(f"logging.{key}={shown(value)}"):
                setattr(own, field, value)
    return theirs


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError):  # RuntimeError: ~name of an unknown user
        raise ConfigError(f"{what}: this folder can't be written. Choose another.") from None
    except (ValueError, wandb.errors.UsageError) as error:
        # a ValueError of pydantic has errors()
        why = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
        raise ConfigError(f"{what}: W&B refuses this value: {why}.") from None


def has_key() -> bool:
    """Whether W&B would find credentials: in the environment, in netrc, or in its settings."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    places = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for place in places:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(Path(place).expanduser())).authenticators(host):
                return True
    return bool(getattr(wandb_setup.singleton().settings, "api_key", None))


def agent_job() -> tuple[str, str] | None:
    """The group and name of a run that a `wandb agent` started: the sweep, and the run's values in it. None: no agent did."""
    sweep, parameters = (os.environ.get(name) for name in ("WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"))
    if not sweep:
        return None
    stored = yaml.safe_load(Path(parameters).read_text(encoding="utf-8")) if parameters else {}
    # {"wandb_version": 1, "norm.impl": {"value": "fused"}, ...}
    swept = [f"{key!s}-{entry['value']}" for key, entry in stored.items() if isinstance(entry, dict)]
    return f"sweep_{sweep}", "_".join(swept) or os.environ.get("WANDB_RUN_ID", "run")


class Tracker:
    """A W&B run, or nothing if the mode is disabled. `note` says why the mode is not the one that was asked for."""

    def __init__(
        self,
        logging: LoggingConfig,
        folder: Path,
        *,
        group: str | None,
        name: str,
        tags: list[str],
        config: dict,
        run_id: str | None = None,
        resumed: bool = False,
    ) -> None:
        """
        Args:
            logging: from `settle`.
            folder: for W&B's files, if WANDB_DIR names no folder.
            run_id: W&B's id of the run; None: a new one.
            resumed: W&B has the run already. It ignores steps that it has, which are the same.
        """
        assert logging.wandb is not None
        self.mode: WandbMode = logging.wandb
        self._run: Any = None
        by_agent = agent_job() is not None
        # Each job has its own id: with WANDB_RUN_ID all jobs of a multirun would be one run to W&B. An agent has one job,
        # and finds its run by the id and the project that it sets in the environment.
        run_id = os.environ.get("WANDB_RUN_ID") if by_agent else run_id or secrets.token_hex(4)
        place = Path(os.environ.get("WANDB_DIR") or folder).expanduser()
        timeout: dict[str, Any] = {} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": START_TIMEOUT_S}

        def start(mode: WandbMode) -> Any:
            with _failed_start_cleaned(place, run_id):
                return wandb.init(
                    mode=mode.value,  # type: ignore[arg-type]
                    dir=str(place),
                    id=None if by_agent else run_id,
                    resume="allow" if resumed else None,  # not "must": the run may have stopped before W&B knew of it
                    allow_val_change=True if resumed else None,  # the config has changed: device, checkpoint
                    project=None if by_agent else logging.project,
                    entity=None if by_agent else logging.entity,
                    group=group,
                    name=name,
                    tags=tags,
                    config=config,
                    settings=wandb.Settings(silent=True, console="off", **timeout),
                )

        if self.mode is not WandbMode.disabled:
            _find_cache()
        python_logging.raiseExceptions = False  # on a full disk each line of W&B's log would print a traceback
        less = {WandbMode.online: WandbMode(logging.without_key), WandbMode.offline: WandbMode.disabled}
        failures = []
        while self.mode is not WandbMode.disabled:
            try:
                self._run = start(self.mode)
                break
            except Exception as error:  # the network, the key, the disk: training goes on without W&B
                failures.append(f"{self.mode} start failed: {str(error).partition(chr(10))[0]}")
                self.mode = less[self.mode]
        self.note = "; ".join(failures)
        self._tell(lambda run: [run.define_metric(metrics, step_metric="tokens") for metrics in ("train/*", "val/*")])

    def log(self, values: dict[str, Any], step: int) -> None:
        self._tell(lambda run: run.log(values, step=step))

    def log_image(self, name: str, path: Path, step: int) -> None:
        if self._run is not None and path.is_file():
            self._run.log({name: wandb.Image(str(path))}, step=step)

    def log_table(self, name: str, columns: list[str | int], rows: list[list[Any]]) -> None:
        if self._run is not None:
            self._run.log({name: wandb.Table(columns=columns, data=rows)}, step=0)

    def summarise(self, values: dict[str, Any]) -> None:
        self._tell(lambda run: run.summary.update(values))

    def finish(self, exit_code: int) -> None:
        self._tell(lambda run: run.finish(exit_code=exit_code))
        self._run = None

    def _tell(self, act: Callable[[Any], object]) -> None:
        """Calls act(W&B's run). An error ends W&B, but not the training."""
        if self._run is None:
            return
        try:
            act(self._run)
        except Exception as error:
            self._run = None
            show(f"W&B failed and is left out from here on: {type(error).__name__}: {error}", sys.stderr)
            with contextlib.suppress(Exception, SystemExit):
                wandb.teardown()


@contextlib.contextmanager
def _failed_start_cleaned(place: Path, run_id: str | None) -> Iterator[None]:
    """Deletes the files and ends the process of a W&B start that fails or that a signal stops."""
    files = f"*wandb/*run-*-{run_id}*"  # also of other starts of this run
    before = set(place.glob(files))
    try:
        yield
    except BaseException:
        # W&B's own teardown waits until the start has timed out
        process: Any = wandb_setup.singleton()
        for part in ("_connection", "_proc", "_process"):  # W&B has no public name for it
            process = getattr(process, part, None)
        if process is not None:
            process.kill()
        with contextlib.suppress(Exception, SystemExit):  # the process is gone, or has failed
            wandb.teardown()
        for path in set(place.glob(files)) - before:
            shutil.rmtree(path, ignore_errors=True)
        for folder in place.glob("*wandb"):
            for link in folder.iterdir():
                if link.is_symlink() and not link.exists():
                    link.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _find_cache() -> None:
    """Gives W&B's process a cache folder for its log; without one it prints the log."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        cache.mkdir(parents=True, exist_ok=True)
        usable = os.access(cache, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        usable = False
    if not usable:
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="prenorm-wandb-")  # not one that is another user's
    elif not os.environ.get("HOME"):
        os.environ["XDG_CACHE_HOME"] = str(cache)
