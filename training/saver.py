"""Saves a run's checkpoints, where asked behind the training, and keeps the newest few."""

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from types import TracebackType

from configs import Config, to_dict
from training import storage
from training.checkpoint import TrainState
from training.console import show
from training.distributed import ALONE, World
from training.sharding import is_sharded


class Saver:
    """Within the block, `save` keeps checkpoints in a run's folder; at its end the last one is on the disk.

    With checkpoint.background=true, `save` returns once the state is copied to host memory and a thread writes it. At most one
    is on its way: the next `save` waits for it. What went wrong in the thread is raised there, or at the end of the block.
    """

    def __init__(self, run: Path, cfg: Config, world: World = ALONE) -> None:
        self._world, self._run, self._keep_newest, self._config = world, run, cfg.checkpoint.keep, to_dict(cfg)
        self._thread = ThreadPoolExecutor(1, "checkpoint") if cfg.checkpoint.background and world.leads else None
        self._pending: Future[None] | None = None
        self._has_links = True
        self._interval_s, self._saved_at = 60 * cfg.checkpoint.minutes, monotonic()

    @property
    def overdue(self) -> bool:
        """Whether checkpoint.minutes have passed since the last checkpoint, or since the block began, by this rank's clock."""
        return 0 < self._interval_s <= monotonic() - self._saved_at

    def save(self, state: TrainState) -> None:
        """Keeps `state`, points last and best to where they are now, and deletes what checkpoint.keep has no room for.

        All ranks call it together, and the first one writes.

        Raises:
            StorageError: on every rank: this checkpoint, or the one before it that was on its way, can't be written.
        """
        self.wait()
        parts = {}
        if state.leads or is_sharded(state.model):
            parts = state.parts(self._config, copied=self._thread is not None)
        self._world.first(lambda: self._write(state.step, parts, state.best_step))
        self._saved_at = monotonic()

    def wait(self) -> None:
        """Returns once nothing is on its way. All ranks call it together. Raises StorageError as `save`."""
        self._world.first(self._finish)

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, parts: dict, best: int | None) -> None:
        if self._thread is None:
            self._keep(step, parts, best)
        else:
            self._pending = self._thread.submit(self._keep, step, parts, best)

    def _keep(self, step: int, parts: dict, best: int | None) -> None:
        if not (self._run / storage.FOLDER / storage.name(step)).exists():
            storage.commit(self._run, step, parts)
        self.point(best)
        storage.prune(self._run, self._keep_newest, best)

    def point(self, best: int | None) -> None:
        """Points the run's links last and best to its newest checkpoint and to that of step `best`."""
        if not self._world.leads:
            return
        kept = storage.kept(self._run)
        for name, wanted in (("last", kept[:1]), ("best", [path for path in kept if storage.step_of(path) == best])):
            for checkpoint in wanted if self._has_links else ():
                try:
                    storage.link(self._run, name, checkpoint)
                except storage.NoLinksError as error:
                    self._has_links = False
                    show(f"{error}: no last and no best there, only {storage.FOLDER}/.", sys.stderr)
            if not wanted and storage.drop_dangling_link(self._run, name):
                what = f"{storage.relative(self._run / name)} pointed to a checkpoint that is gone, and is deleted"
                show(f"{what}: the next one gets that name.", sys.stderr)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self._finish()  # not `wait`: a rank may come here alone
        except Exception as failed:
            if error is None or isinstance(error, SystemExit):  # the exit code of a stopped run would say that all is kept
                raise
            error.add_note(str(failed))  # may not hide why the run ended
        finally:
            if self._thread is not None:
                self._thread.shutdown()
