"""Hydra's sweepers of this project: train.py checks all jobs before the first starts, ablate.py and compare.py are one job."""

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

import configs
from configs import ConfigError, compose, machine


class Checked(BasicSweeper):
    """Hydra's basic sweeper: all combinations of the values, by any launcher."""

    def sweep(self, arguments: list[str]) -> Any:
        assert self.config is not None
        given = [*self._parse_config(), *arguments]
        # the folder of a job is named by the keys that are swept
        fixed = sorted(set(configs.given(given)) - set(configs.swept(given)))
        self.config.hydra.overrides.hydra.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]")
        HydraConfig.instance().set_config(self.config)
        compose.check_jobs(configs.jobs(given))
        return super().sweep(arguments)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """`sweep` has, and Hydra has made no folder yet."""


class Together(Sweeper):
    """Calls the program once with the overrides of its command, those that sweep with all their values."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self._task = config, task_function

    def sweep(self, arguments: list[str]) -> None:
        assert self.config is not None
        name = f"{self.config.hydra.job.name}.py"
        if unswept := {"folder", "resume"} & {*configs.swept(arguments)}:
            raise ConfigError(f"{min(unswept)}: {name} has one. Give it one value.")
        if machine.by_torchrun():
            raise ConfigError(f"torchrun: {name} is one process on one device. Start it without: python {name} ...")
        HydraConfig.instance().set_config(self.config)
        task: Any = self._task
        if code := task(arguments):
            raise SystemExit(code)
