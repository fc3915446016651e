"""Hydra's sweepers of this project: train.py checks all jobs before the first starts, ablate.py and compare.py are one job."""

from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

import configs
from configs import ConfigError, compose, machine


class Checked(BasicSweeper):
    """Hydra's basic sweeper: all combinations of the values, by any launcher. A job that fails ends no other, in no batch."""

    def sweep(self, arguments: list[str]) -> list[Any]:
        """Returns what the jobs return. Raises the error of the first that failed, once all have run."""
        assert self.config is not None and self.launcher is not None
        given = [*self._parse_config(), *arguments]
        # the folder of a job is named by the keys that are swept
        fixed = sorted(set(configs.given(given)) - set(configs.swept(given)))
        self.config.hydra.overrides.hydra.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]")
        HydraConfig.instance().set_config(self.config)
        jobs = configs.jobs(given)
        compose.check_jobs(jobs)
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        done: list[JobReturn] = []
        for batch in self.split_overrides_to_chunks(jobs, self.max_batch_size):
            done += self.launcher.launch(batch, initial_job_idx=len(done))
        return [one.return_value for one in done]


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
