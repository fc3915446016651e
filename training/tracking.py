"""W&B: which mode a run gets, settled before it starts, and a run that is always closed."""

import contextlib
import netrc
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import wandb
from omegaconf import OmegaConf

from configs.schema import LoggingConfig, WandbMode

START_TIMEOUT_S = 30.0  # for W&B's servers to answer; training waits for no longer


def settle_mode(logging: LoggingConfig) -> tuple[WandbMode, str]:
    """The mode, and why it is not the one asked for ("" if it is). Uses no network."""
    if logging.wandb is WandbMode.online and not has_key():
        return logging.without_key, "no API key found; `wandb login` stores one"
    return logging.wandb, ""


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
    return bool(getattr(wandb.setup().settings, "api_key", None))


def agent_job() -> tuple[str, str] | None:
    """Group and name of the run that a `wandb agent` started this process for, as in a Hydra multirun: the sweep, and what sets
    the run apart in it. None where no agent did."""
    sweep, parameters = (os.environ.get(name) for name in ("WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"))
    if not sweep:
        return None
    stored = OmegaConf.to_container(OmegaConf.load(parameters)) if parameters else {}
    assert isinstance(stored, dict)
    # {"wandb_version": 1, "norm.impl": {"value": "fused"}, ...}
    swept = [f"{key!s}-{entry['value']}" for key, entry in stored.items() if isinstance(entry, dict)]
    return f"sweep_{sweep}", "_".join(swept) or os.environ.get("WANDB_RUN_ID", "run")


class Tracker:
    """A W&B run, or nothing where the mode is disabled."""

    def __init__(
        self,
        mode: WandbMode,
        fallback: WandbMode,
        folder: Path,
        *,
        project: str,
        group: str | None,
        name: str,
        tags: list[str],
        config: dict,
        run_id: str | None = None,
        resumed: bool = False,
    ) -> None:
        """
        Args:
            run_id: W&B's id of the run; None: a new one. Never W&B's own default: WANDB_RUN_ID would fold a sweep into one run.
            resumed: the run was there before. W&B passes over steps that it has already; they were the same.
        """
        self.mode, self.note, self._run = mode, "", None
        if mode is WandbMode.disabled:
            return

        by_agent = agent_job() is not None

        def start(mode: WandbMode) -> Any:
            return wandb.init(
                mode=mode.value,
                dir=str(folder),
                # An id of its own for each job: WANDB_RUN_ID or a resumed default would fold a multirun into one run. An agent
                # gives its one job an id and a project in the environment, and reports to the sweep by them.
                id=None if by_agent else run_id or secrets.token_hex(4),
                resume="allow" if resumed else None,  # not "must": the run may have been stopped before W&B had heard of it
                allow_val_change=True if resumed else None,  # of the config: where it runs, what it resumed from
                project=None if by_agent else project,
                group=group,
                name=name,
                tags=tags,
                config=config,
                settings=wandb.Settings(silent=True, console="off", init_timeout=START_TIMEOUT_S),
            )

        try:
            self._run = start(mode)
        except wandb.Error as error:
            if mode is not WandbMode.online:
                raise
            self.mode, self.note = fallback, f"online start failed: {str(error).splitlines()[0]}"
            self._run = start(fallback) if fallback is not WandbMode.disabled else None

    def log(self, values: dict[str, Any], step: int) -> None:
        if self._run is not None:
            self._run.log(values, step=step)

    def log_image(self, name: str, path: Path, step: int) -> None:
        if self._run is not None and path.is_file():
            self._run.log({name: wandb.Image(str(path))}, step=step)

    def log_table(self, name: str, columns: list[str | int], rows: list[list[Any]]) -> None:
        if self._run is not None:
            self._run.log({name: wandb.Table(columns=columns, data=rows)}, step=0)

    def summarise(self, values: dict[str, Any]) -> None:
        if self._run is not None:
            self._run.summary.update(values)

    def finish(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=exit_code)
