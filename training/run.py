"""A run: its folder, what is written there, and what is shown while it goes on."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import configs
from configs import Config, ConfigError
from training import storage
from training.console import show, show_beside_bar
from training.distributed import ALONE, World
from training.environment import environment
from training.evaluation import bits_per_byte
from training.folder import claim, identity, locked
from training.plot import loss_curve, read_metrics
from training.resume import Start
from training.storage import relative
from training.tracking import Tracker, agent_job, described, settle

CONSOLE_LINES = 20  # of progress, about, where there is no terminal for a bar


@dataclass
class Run:
    """Made by `open_run`, which also closes it."""

    origin: Start  # what it goes on from, if anything
    folder: Path
    device: torch.device
    wandb_id: str  # the same for as long as the run goes on in its folder
    group: str | None  # a sweep's folder name
    tracker: Tracker | None = None
    step: int = 0  # of the last line of metrics
    train_bytes_per_token: float = 1.0  # turns a training loss into bits per byte, for the bar
    val_bytes_per_token: float = 1.0  # the same for the plot
    _drawn: bool = False  # with all of its steps
    _bar: Any = None
    _shown: dict[str, float] = field(default_factory=dict)
    _total: int = 0

    @property
    def cfg(self) -> Config:
        return self.origin.cfg

    def start(self, facts: dict[str, Any], *, tokenizer: str, train_bytes_per_token: float, val_bytes_per_token: float) -> None:
        """Prints the table of facts and starts W&B. From here on, a folder that the run was stopped in is its own again.

        Args:
            facts: by name.
            tokenizer: text of its tokenizer.json.

        Raises:
            ConfigError: one of several runs, in the job of a W&B agent, which is one run.
        """
        if self.origin.in_place:
            self._take_up()
            self._keep_environment()
        logging, reasons = settle(self.cfg.logging)
        self.cfg.logging = replace(logging, wandb=self.cfg.logging.wandb)  # the mode is settled each time that the run goes on
        self._keep_config()  # by now without train.precision=auto
        storage.replace_text(self.folder / "tokenizer.json", tokenizer)
        self.train_bytes_per_token, self.val_bytes_per_token = train_bytes_per_token, val_bytes_per_token
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
            config=configs.to_dict(self.cfg) | {"facts": facts},
            run_id=self.wandb_id,
            resumed=self.origin.in_place,
        )
        reasons += [self.tracker.note] if self.tracker.note else []
        facts = facts | {"W&B": described(self.tracker.mode, reasons), "run folder": relative(self.folder)}
        width = max(map(len, facts))
        show("\n".join(f"  {name:<{width}}  {value}" for name, value in facts.items()) + "\n")

    def progress(self, steps: range) -> Iterator[int]:
        """The steps, with a bar on a terminal and a line now and then elsewhere."""
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
        """A line of metrics.jsonl, the same to W&B, and the figures of the bar.

        None is left out, and so is what JSON has no number for: the norm of a gradient that overflowed under a gradient scaler.
        """
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        path = self.folder / "metrics.jsonl"
        with storage.explained(path, storage.way_on(self.folder)), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | known, allow_nan=False) + "\n")
        if self.tracker:
            self.tracker.log(known, step)
        self.step = step
        self._shown.update(known)
        self._show(step, is_validation="val/loss" in known)

    def sync(self) -> None:
        """Returns once the lines of metrics are on the disk: a checkpoint after it finds those of its steps there."""
        if (path := self.folder / "metrics.jsonl").is_file():
            with storage.explained(path, storage.way_on(self.folder)):
                storage.sync(path)

    def say(self, text: str) -> None:
        """Prints a line without tearing the bar."""
        show_beside_bar(text)

    def finish(self, results: dict[str, Any]) -> None:
        """Keeps what the run reached: its picture, then summary.json and W&B's summary; a sample comes last, if it has one.

        A run that has all of them is finished, whatever moment it was killed at.
        """
        self.draw()
        self._drawn = True
        storage.replace_text(self.folder / "summary.json", json.dumps(results, indent=2, allow_nan=False) + "\n")
        if self.tracker:
            self.tracker.summarise(results)

    def keep_sample(self, text: str) -> None:
        """Keeps the text that the trained model wrote: sample.txt, and W&B's summary."""
        storage.replace_text(self.folder / "sample.txt", text)
        if self.tracker:
            self.tracker.summarise({"sample": text})

    def draw(self) -> None:
        """Draws loss.png and shows it to W&B. A picture is not worth a run, nor may it hide why the run ends."""
        try:
            if self.tracker and (picture := self.plot()):
                self.tracker.log_image("loss", picture, self.step)
        except Exception as error:
            self.say(f"no plot: {type(error).__name__}: {error}")

    def plot(self) -> Path | None:
        """Draws loss.png from metrics.jsonl; None where there is too little to draw."""
        metrics, picture = self.folder / "metrics.jsonl", self.folder / "loss.png"
        cfg = self.cfg
        title = f"{cfg.data.name}, {cfg.model.size}, {cfg.norm.impl} {cfg.norm.kind}, seed {cfg.seed}"
        drawn = metrics.is_file() and loss_curve(metrics, picture, title, self.val_bytes_per_token)
        return picture if drawn else None

    def _keep_config(self) -> None:
        storage.replace_text(self.folder / "config.yaml", configs.to_yaml(self.cfg))

    def _keep_environment(self) -> None:
        """Keeps what the run depends on; each time that it goes on in a file of its own."""
        name = (
            f"environment_from_{self.origin.step:08d}.json" if self.origin.in_place and self.origin.step else "environment.json"
        )
        storage.replace_text(self.folder / name, json.dumps(environment(self.device), indent=2) + "\n")

    def _take_up(self) -> None:
        """Brings the folder to where its checkpoint was made: lines of metrics after that, and results, belong to no step."""
        step, metrics = self.origin.step, self.folder / "metrics.jsonl"
        storage.set_aside(self.folder, after=step)
        if metrics.is_file():
            lines = read_metrics(metrics)
            if (unread := metrics.read_bytes().count(b"\n") - len(lines)) > 0:
                show(f"{relative(metrics)}: {unread} damaged lines are left out.")
            stored = self.origin.stored
            due = step if stored and stored.state["owes_validation"] else None  # this step's evaluation is made up for
            kept = [line for line in lines if line["step"] <= step and not (line["step"] == due and "val/loss" in line)]
            storage.replace_text(metrics, "".join(json.dumps(line) + "\n" for line in kept))
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
        parts = []
        if (loss := self._shown.get("train/loss")) is not None:
            parts += [f"loss {loss:.3f}", f"{bits_per_byte(loss, self.train_bytes_per_token):.3f} bits/byte"]
        if (lr := self._shown.get("train/lr")) is not None:
            parts.append(f"lr {lr:.1e}")
        if (rate := self._shown.get("perf/tokens_per_s")) is not None:
            parts.append(f"{rate / 1000:.1f}k tokens/s")
        if (ms := self._shown.get("perf/step_ms")) is not None:
            parts.append(f"{ms:.0f} ms/step")
        if (mfu := self._shown.get("perf/mfu")) is not None:
            parts.append(f"MFU {100 * mfu:.1f} %")
        return ", ".join(parts)


class Follower(Run):
    """The run on every rank but the first: in the same folder, where only the first one writes, and without a word."""

    def start(self, facts: dict[str, Any], *, tokenizer: str, train_bytes_per_token: float, val_bytes_per_token: float) -> None:
        pass

    def progress(self, steps: range) -> Iterator[int]:
        yield from steps

    def log(self, step: int, values: dict[str, float | None]) -> None:
        pass

    def sync(self) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def finish(self, results: dict[str, Any]) -> None:
        pass

    def keep_sample(self, text: str) -> None:
        pass


@contextmanager
def open_run(origin: Start, device: torch.device, group: str | None = None, world: World = ALONE) -> Iterator[Run]:
    """A run in a folder of its own, closed however the block ends: the plot drawn, W&B told the exit code.

    All ranks have one folder, which the first one claims.

    Args:
        origin: where the run should go; a folder that another run has gets a number appended.
        group: a sweep's name, shared by its runs.

    Raises:
        ConfigError: the folder can't be written, or another process has this run, or had it after `origin` was settled.
    """
    with ExitStack() as held:

        def take() -> tuple[Path, tuple[str, str | None]]:
            folder = origin.folder if origin.in_place else claim(origin.folder, exact=origin.exact)
            held.enter_context(locked(folder))
            if origin.in_place and tuple(storage.kept(folder)) != origin.checkpoints:
                raise ConfigError(f"{relative(folder)}: another process has just trained there. Give the command again.")
            return folder, identity(folder, group)

        folder, wandb = world.first(take)
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
        yield from _closing(run)


def _closing(run: Run) -> Iterator[Run]:
    """The run, and at the end of the block its plot and the exit code for W&B."""
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
