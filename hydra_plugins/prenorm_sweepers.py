"""Hydra's sweepers of this project: train.py checks all jobs before the first starts, ablate.py and compare.py are one job."""

from collections.abc import Mapping
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from configs import Config, ConfigError, compose, machine


class Together(Sweeper):
    """Calls the program once with the overrides of its command, those that sweep with all their values."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._given: Any = {"hydra_context": hydra_context, "task_function": task_function, "config": config}

    def sweep(self, arguments: list[str]) -> Any:
        if machine.by_torchrun():
            name = f"{self._given['config'].hydra.job.name}.py"
            raise ConfigError(f"torchrun: {name} is one process on one device. Start it without: python {name} ...")
        HydraConfig.instance().set_config(self._given["config"])
        if code := self._given["task_function"](arguments):
            raise SystemExit(code)


class Checked(Together):
    """Runs all combinations of the values, by any launcher. Raises the exception of a job that failed after all have run.

    Args:
        params: values to sweep, by key, as in Hydra's basic sweeper.
    """

    def __init__(self, params: Mapping[str, str]) -> None:
        self._params = params

    def sweep(self, arguments: list[str]) -> Any:
        arguments, config = [*(f"{key}={value}" for key, value in self._params.items()), *arguments], self._given["config"]
        jobs, fixed = compose.jobs(arguments), set(compose.given(arguments)) - set(compose.swept(arguments))
        # the folder of a job is named by the keys that are swept
        exclude = f"hydra.job.config.override_dirname.exclude_keys=[{','.join(sorted(fixed))}]"
        config.hydra.overrides.hydra.append(exclude)
        load = self._given["hydra_context"].config_loader.load_sweep_config
        compose.check_jobs(jobs, lambda job: compose.typed(load(config, job), job, Config))
        results, failed = Plugins.instance().instantiate_launcher(**self._given).launch(jobs, initial_job_idx=0), []
        for result in results:
            try:
                _ = result.return_value  # raises the exception of a job that failed; Hydra then prints its overrides
            except Exception as error:
                failed.append(error)
        if failed:
            raise max(failed, key=lambda error: getattr(error, "code", 1))
        return results
