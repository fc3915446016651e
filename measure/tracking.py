"""A measurement in W&B: one group of runs, and one more run that sums them up."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.schema import LoggingConfig
from training.tracking import Tracker, described, with_defaults

Table = tuple[Sequence[str], Sequence[Sequence[Any]]]  # columns and rows


class Group:
    """The runs of one measurement; nothing where W&B is disabled. After a start that fails, the next ones are kept offline."""

    def __init__(self, logging: LoggingConfig, folder: Path, tag: str) -> None:
        self._logging, self._facts = with_defaults(logging)
        self._folder, self._tag, self._group = folder, tag, self._logging.group or folder.name

    def start(self, name: str, config: dict[str, Any], tags: Sequence[str] = ()) -> Tracker:
        tags = list(dict.fromkeys([*(self._logging.tags or []), self._tag, *tags]))
        named = f"{self._logging.name or self._group}/{name}"
        run = Tracker(self._logging, self._folder, group=self._group, name=named, tags=tags, config=config)
        self._logging = replace(self._logging, wandb=run.mode)
        self._facts += [run.note] if run.note else []
        return run

    def sum_up(self, config: dict[str, Any], values: dict[str, Any], tables: Mapping[str, Table]) -> str:
        """Makes the last run, with the pictures of the folder. Returns the mode of W&B, and why."""
        run = self.start("summary", config)
        run.summarise(values)
        for name, (columns, rows) in tables.items():
            run.log_table(f"tables/{name}", list(columns), [list(row) for row in rows])
        for picture in sorted(self._folder.glob("*.png")):
            run.log_image(f"plots/{picture.stem}", picture, 0)
        run.finish(0)
        return described(run.mode, self._facts)
