"""W&B: its settings, chosen before a run starts, a run there that is always closed, and the runs of one measurement."""

import contextlib
import logging as python_logging
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import wandb
from requests.utils import get_netrc_auth
from wandb.sdk import wandb_setup

from configs import ConfigError
from configs.schema import LoggingConfig, WandbMode
from training.interrupt import show

START_TIMEOUT_S = 30.0  # for W&B's servers to answer, unless WANDB_INIT_TIMEOUT is set; training does not wait longer

Table = tuple[Sequence[str], Sequence[Sequence[Any]]]  # columns and rows

# Keys of LoggingConfig that may be null, by their names in W&B's settings, where W&B's variables then decide.
KEYS = {"mode": "wandb", "project": "project", "entity": "entity", "run_group": "group", "run_name": "name", "run_tags": "tags"}


def with_defaults(logging: LoggingConfig) -> tuple[LoggingConfig, list[str]]:
    """Fills keys that are null from W&B's environment variables or with defaults. Uses no network.

    Returns:
        The config, and facts for the user: the project, and why the mode is another one.

    Raises:
        ConfigError: W&B refuses a variable or a key. Nothing is refused where W&B is disabled.
    """
    if (logging.wandb or os.environ.get("WANDB_MODE")) == WandbMode.disabled:
        return replace(logging, wandb=WandbMode.disabled), []
    if agent_job():
        logging = replace(logging, project=None, entity=None)  # W&B's agent has set the variables of its sweep
    theirs: Any = wandb.Settings(mode="offline", project="prenorm")
    try:
        theirs.update_from_env_vars(dict(os.environ))
        for name, key in KEYS.items():
            if (value := getattr(logging, key)) is not None:
                setattr(theirs, name, value)
        mode = WandbMode(theirs.mode)
    except (ValueError, wandb.errors.UsageError) as error:
        # pydantic's own text shows the value too, which may be a password
        why = "{loc[0]}: {msg}".format(**error.errors()[0]) if hasattr(error, "errors") else error
        raise ConfigError(f"W&B refuses a key of logging, or a variable WANDB_…: {why}.") from None
    facts = [f"project {theirs.project}"]
    found = theirs.api_key or theirs.identity_token_file or wandb_setup.singleton().settings.api_key
    hosts = [theirs.base_url] if "WANDB_BASE_URL" in os.environ else [theirs.base_url, "https://api.wandb.ai"]  # its old name
    if mode is WandbMode.online and not (found or any(map(get_netrc_auth, hosts))):
        mode = WandbMode(logging.without_key)
        facts.append("no API key found; `wandb login` stores one")
    filled = {key: getattr(theirs, name) for name, key in KEYS.items()}
    return replace(logging, **filled | {"wandb": mode, "tags": list(theirs.run_tags or ())}), facts


def described(mode: WandbMode, facts: list[str]) -> str:
    """The mode of a run and the reasons for it, for the user."""
    return f"{mode} ({'; '.join(facts)})" if facts else mode.value


def agent_job() -> bool:
    """Whether a `wandb agent` started this process, as one run of its sweep."""
    return "WANDB_SWEEP_ID" in os.environ


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
            logging: from `with_defaults`.
            folder: for W&B's files, if WANDB_DIR names no folder.
            run_id: W&B's id of the run; None: a new one.
            resumed: W&B has the run already. It ignores steps that it has, which are the same.
        """
        assert logging.wandb is not None
        self.mode: WandbMode = logging.wandb
        self._run: Any = None
        arguments: dict[str, Any] = {"group": group, "name": name, "tags": tags, "config": config}
        # not "must": it may have stopped before W&B knew of it; and the config has changed: device, checkpoint
        arguments |= {"resume": "allow", "allow_val_change": True} if resumed else {"resume": None}
        if "WANDB_DIR" not in os.environ:
            arguments["dir"] = str(folder)
        if not agent_job():  # whose run W&B finds by the id and the project in the environment
            # with WANDB_RUN_ID all jobs of a multirun would be one run to W&B
            arguments |= {"id": run_id or secrets.token_hex(4), "project": logging.project, "entity": logging.entity}
        timeout: dict[str, Any] = {} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": START_TIMEOUT_S}
        arguments["settings"] = wandb.Settings(silent=True, console="off", **timeout)

        python_logging.raiseExceptions = False  # on a full disk each line of W&B's log would print a traceback
        less = {WandbMode.online: WandbMode(logging.without_key), WandbMode.offline: WandbMode.disabled}
        failures = []
        while self.mode is not WandbMode.disabled:
            try:
                self._run = wandb.init(**arguments | {"mode": self.mode.value})
                break
            except Exception as error:  # the network, the key, the disk: training goes on without W&B
                _end_process()
                failures.append(f"{self.mode} start failed: {str(error).partition(chr(10))[0]}")
                self.mode = less[self.mode]
            except BaseException:  # a signal
                _end_process()
                raise
        self.note = "; ".join(failures)
        self._tell(lambda run: [run.define_metric(metrics, step_metric="tokens") for metrics in ("train/*", "val/*")])

    def log(self, values: dict[str, Any], step: int) -> None:
        self._tell(lambda run: run.log(values, step=step))

    def log_image(self, name: str, path: Path, step: int) -> None:
        if path.is_file():
            self._tell(lambda run: run.log({name: wandb.Image(str(path))}, step=step))

    def log_table(self, name: str, table: Table) -> None:
        columns, rows = table
        self._tell(lambda run: run.log({name: wandb.Table(columns=list(columns), data=list(map(list, rows)))}, step=0))

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


def _end_process() -> None:
    """Ends W&B's own process after a start that failed. Its teardown alone would wait until the start has timed out."""
    with contextlib.suppress(AttributeError):  # W&B has no public name for it
        wandb_setup.singleton()._connection._proc._process.kill()  # type: ignore[union-attr]
    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown()


class Logged(NamedTuple):
    """A run of a measurement, as W&B gets it."""

    name: str
    config: dict[str, Any]
    lines: Iterable[tuple[int, dict[str, Any]]]  # steps and their values
    summary: dict[str, Any]
    tags: Sequence[str] = ()
    tables: Mapping[str, Table] = {}
    pictures: Sequence[Path] = ()


def log_group(logging: LoggingConfig, folder: Path, tag: str, runs: Iterable[Logged]) -> str:
    """Logs the runs of one measurement as a group, and nothing where W&B is disabled. After a start that fails, the next ones
    are kept offline. Returns the mode of W&B, and why."""
    logging, facts = with_defaults(logging)
    group = logging.group or folder.name
    for one in runs:
        tags = list(dict.fromkeys([*(logging.tags or []), tag, *one.tags]))
        named = f"{logging.name or group}/{one.name}"
        run = Tracker(logging, folder, group=group, name=named, tags=tags, config=one.config)
        logging, facts = replace(logging, wandb=run.mode), [*facts, *filter(None, [run.note])]
        for step, values in one.lines:
            run.log(values, step)
        run.summarise(one.summary)
        for name, table in one.tables.items():
            run.log_table(f"tables/{name}", table)
        for picture in one.pictures:
            run.log_image(f"plots/{picture.stem}", picture, 0)
        run.finish(0)
    assert logging.wandb is not None
    return described(logging.wandb, facts)
