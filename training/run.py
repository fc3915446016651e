"""A run: what it writes to its folder and to W&B, and what it shows."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

import configs
from configs import Config, ConfigError
from data import Tokenizer
from measure.environment import environment
from training import storage
from training.console import show, show_beside_bar
from training.distributed import ALONE, World
from training.interrupt import Interrupt, Stopped
from training.metrics import read_metrics
from training.plot import loss_curve
from training.resume import Start
from training.storage import claim, identity, locked, relative
from training.tracking import Tracker, agent_job, described, settle

CONSOLE_LINES = 20  # of progress, about, where no terminal shows a bar


@dataclass
class Run:
    """One run. `open_run` makes and closes it."""

    origin: Start  # its config, and the checkpoint that it resumes from, if any
    folder: Path
    device: torch.device
    wandb_id: str  # stays the same when the run resumes in its folder
    group: str | None  # a sweep's folder name
    tracker: Tracker | None = None
    step: int = 0  # of the last line of metrics
    _drawn: bool = False  # loss.png has all steps
    _bar: Any = None
    _shown: dict[str, float] = field(default_factory=dict)
    _total: int = 0

    @property
    def cfg(self) -> Config:
        return self.origin.cfg

    def start(self, facts: dict[str, Any], sizes: dict[str, float], tokenizer: Tokenizer) -> None:
        """Prints the table of facts and starts W&B. A resumed run takes its folder back to its checkpoint.

        Args:
            facts: by name.
            sizes: `metrics.quantities`, for W&B's config.
            tokenizer: which the folder keeps.

        Raises:
            ConfigError: the job of a W&B agent has several runs.
        """
        if self.origin.in_place:
            self._rewind()
            self._keep_environment()
        logging, reasons = settle(self.cfg.logging)
        self.cfg.logging = replace(logging, wandb=self.cfg.logging.wandb)  # a resumed run chooses its mode again
        self._keep_config()  # train.precision=auto has become a dtype
        storage.replace_text(self.folder / "tokenizer.json", tokenizer.to_json())
        agent = agent_job()
        if agent and self.group:
            raise ConfigError("-m: the job of a W&B agent is one run. Leave -m out, and list its values in the sweep's YAML.")
        group, name = agent or (self.group, self.folder.name)
        self.tracker = Tracker(
            logging,
            self.folder,
            group=logging.group or group,
            name=logging.name or (f"{group}/{name}" if group else name),
            tags=list(dict.fromkeys([*(logging.tags or []), self.cfg.norm.impl.value, self.cfg.norm.kind.value])),
            config=configs.to_dict(self.cfg) | sizes | {"facts": facts},
            run_id=self.wandb_id,
            resumed=self.origin.in_place,
        )
        reasons += [self.tracker.note] if self.tracker.note else []
        facts = facts | {"W&B": described(self.tracker.mode, reasons), "run folder": relative(self.folder)}
        width = max(map(len, facts))
        show("\n".join(f"  {name:<{width}}  {value}" for name, value in facts.items()) + "\n")

    def progress(self, steps: range) -> Iterator[int]:
        """The steps, with a progress bar on a terminal. Elsewhere `log` prints some lines."""
        self._total = steps.stop
        self._bar = tqdm(
            total=steps.stop, initial=steps.start, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty(), leave=True
        )
        try:
            for step in steps:
                yield step
                self._bar.update()
        finally:
            self._bar.close()

    def log(self, step: int, values: dict[str, float | None]) -> None:
        """Writes a line of metrics.jsonl, sends it to W&B, and shows the figures.

        Values that are None, NaN or infinite are left out: a gradient scaler lets gradients overflow now and then.
        """
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        path = self.folder / "metrics.jsonl"
        with storage.as_storage_errors(path, storage.advice(self.folder)), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | known, allow_nan=False) + "\n")
        if self.tracker:
            self.tracker.log(known, step)
        self.step = step
        self._shown.update(known)
        self._show(step, is_validation="val/loss" in known)

    def sync(self) -> None:
        """Returns once the lines of metrics are on the disk, so that a checkpoint is never newer than they are."""
        if (path := self.folder / "metrics.jsonl").is_file():
            with storage.as_storage_errors(path, storage.advice(self.folder)):
                storage.sync(path)

    def say(self, text: str) -> None:
        """Prints a line without tearing the bar; an empty one not at all."""
        if text:
            show_beside_bar(text)

    def stop(self, step: int, interrupt: Interrupt) -> NoReturn:
        """Ends a run that a signal stopped after `step`; its checkpoint is on the disk. Raises Stopped."""
        self.say(f"stopped after step {step}; to go on: {storage.resume_command(self.folder)}")
        raise Stopped(interrupt.exit_code)

    def finish(self, results: dict[str, Any]) -> None:
        """Writes the results: loss.png, then summary.json and W&B's summary. `keep_sample` comes after it.

        A run is finished when its folder has summary.json and the sample, if it has one.
        """
        self.draw()
        self._drawn = True
        storage.replace_text(self.folder / "summary.json", json.dumps(results, indent=2, allow_nan=False) + "\n")
        if self.tracker:
            self.tracker.summarise(results)

    def keep_sample(self, text: str) -> None:
        """Writes the text of the trained model to sample.txt and to W&B's summary."""
        storage.replace_text(self.folder / "sample.txt", text)
        if self.tracker:
            self.tracker.summarise({"sample": text})

    def draw(self) -> None:
        """Draws loss.png and sends it to W&B. An error in it ends no run: it is only printed."""
        try:
            if self.tracker and (picture := self.plot()):
                self.tracker.log_image("loss", picture, self.step)
        except Exception as error:
            self.say(f"no plot: {type(error).__name__}: {error}")

    def plot(self) -> Path | None:
        """Draws loss.png from metrics.jsonl. None: there are too few lines."""
        cfg, metrics, picture = self.cfg, self.folder / "metrics.jsonl", self.folder / "loss.png"
        title = f"{cfg.data.name}, {cfg.model.size}, {cfg.norm.impl} {cfg.norm.kind}, seed {cfg.seed}"
        drawn = metrics.is_file() and loss_curve(metrics, picture, title)
        return picture if drawn else None

    def _keep_config(self) -> None:
        storage.replace_text(self.folder / "config.yaml", configs.to_yaml(self.cfg))

    def _keep_environment(self) -> None:
        """Writes the facts of the machine and the code; a resumed run writes them to another file."""
        name = (
            f"environment_from_{self.origin.step:08d}.json" if self.origin.in_place and self.origin.step else "environment.json"
        )
        storage.replace_text(self.folder / name, json.dumps(environment(self.device), indent=2) + "\n")

    def _rewind(self) -> None:
        """Takes the folder back to its checkpoint: deletes later lines of metrics, and results."""
        step, metrics = self.origin.step, self.folder / "metrics.jsonl"
        storage.set_aside(self.folder, after=step)
        if metrics.is_file():
            lines = read_metrics(metrics)
            if (unread := metrics.read_bytes().count(b"\n") - len(lines)) > 0:
                show(f"{relative(metrics)}: {unread} damaged lines are left out.")
            stored = self.origin.stored
            owed = step if stored and stored.state["owes_validation"] else None  # this step is evaluated again
            kept = [line for line in lines if line["step"] <= step and not (line["step"] == owed and "val/loss" in line)]
            storage.replace_text(metrics, "".join(json.dumps(line) + "\n" for line in kept))
        elif step:
            show(f"{relative(metrics)} is gone: the metrics of the steps before {step} are lost, and loss.png begins there.")
        for name in ("summary.json", "sample.txt"):
            (self.folder / name).unlink(missing_ok=True)

    def _show(self, step: int, is_validation: bool) -> None:
        figures = self._figures()
        if self._bar is not None and not self._bar.disable:
            self._bar.set_postfix_str(figures)
            if is_validation:
                self.say(f"step {step}: validation {self._shown['val/bits_per_byte']:.4f} bits per byte")
            return
        lines_apart = self.cfg.logging.every * max(1, self._total // (CONSOLE_LINES * self.cfg.logging.every))
        if is_validation:
            loss, bits = self._shown["val/loss"], self._shown["val/bits_per_byte"]
            show(f"step {step}/{self._total}  validation loss {loss:.4f}  {bits:.4f} bits per byte")
        elif step % lines_apart == 0 or step == self._total:
            show(f"step {step}/{self._total}  {figures}")

    def _figures(self) -> str:
        texts: dict[str, Callable[[float], str]] = {
            "train/loss": lambda loss: f"loss {loss:.3f}",
            "train/bits_per_byte": lambda bits: f"{bits:.3f} bits/byte",
            "train/lr": lambda lr: f"lr {lr:.1e}",
            "perf/tokens_per_s": lambda rate: f"{rate / 1000:.1f}k tokens/s",
            "perf/step_ms": lambda ms: f"{ms:.0f} ms/step",
            "perf/mfu": lambda mfu: f"MFU {100 * mfu:.1f} %",
        }
        return ", ".join(text(self._shown[name]) for name, text in texts.items() if name in self._shown)


class Follower(Run):
    """The run on every rank but the first: it writes nothing and prints nothing."""

    def progress(self, steps: range) -> Iterator[int]:
        yield from steps

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    start = log = sync = say = finish = keep_sample = _nothing


@contextmanager
def open_run(origin: Start, device: torch.device, group: str | None = None, world: World = ALONE) -> Iterator[Run]:
    """Opens a run in a folder of its own. However the block ends, the plot is drawn and W&B gets the exit code.

    All ranks share the folder that the first one claims.

    Args:
        origin: where the run begins. If another run has its folder, the new one gets a number appended.
        group: a sweep's name, shared by its runs.

    Raises:
        ConfigError: the folder can't be written, or another process trains there, or did after `origin` was read.
    """
    with ExitStack() as held:

        def take() -> tuple[Path, tuple[str, str | None]]:
            folder = origin.folder if origin.in_place else claim(origin.folder, exact=origin.exact)
            held.enter_context(locked(folder))
            if origin.in_place and tuple(storage.checkpoints(folder)) != origin.checkpoints:
                raise ConfigError(f"{relative(folder)}: another process has just trained there. Give the command again.")
            return folder, identity(folder, group)

        folder, wandb = world.on_first(take)
        if not world.leads:
            yield Follower(origin, folder, device, *wandb)
            return
        run = Run(origin, folder, device, *wandb)
        if not origin.in_place:
            run._keep_environment()
            run._keep_config()
        for note in origin.notes:
            show(note)
        if folder != origin.folder:
            show(f"{relative(origin.folder)} has another run already, so this one is kept in {relative(folder)}.")
        exit_code = 1
        try:
            yield run
            exit_code = 0
        except SystemExit as error:
            exit_code = error.code if isinstance(error.code, int) else 1
            raise
        except KeyboardInterrupt:
            exit_code = 130
            raise
        finally:
            if run.tracker:
                try:
                    if not run._drawn:
                        run.draw()
                finally:
                    run.tracker.finish(exit_code)
