"""A sweeper for programs that make one measurement of all jobs of a command, such as ablate.py and compare.py."""

from pathlib import Path
from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class Together(Sweeper):
    """Calls the program once, with the overrides of its command, those that sweep with all their values, and hydra.sweep.dir.

    Args:
        params: overrides of a config, such as a study, which the program reads.
    """

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context
        self._program, self._folder = task_function, Path(config.hydra.sweep.dir)

    def sweep(self, arguments: list[str]) -> Any:
        return self._program((arguments, self._folder))
