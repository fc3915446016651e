"""A run: what it writes to its folder and to W&B, and what it shows."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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
from training.console import show
from training.distributed import ALONE, World
from training.interrupt import Interrupt, Stopped
from training.metrics import read_metrics
from training.plot import loss_curve
from training.resume import Start
from training.storage import claim, identity, locked, relative
from training.tracking import Tracker, agent_job, described, settle

CONSOLE_LINES = 20  # of progress, about, where no terminal shows a bar
FIGURES = {  # that the bar or a line shows
    "train/loss": "loss {:.3f}",
    "train/bits_per_byte": "{:.3f} bits/byte",
    "train/lr": "lr {:.1e}",
    "perf/tokens_per_s": "{:,.0f} tokens/s",
    "perf/step_ms": "{:.0f} ms/step",
    "perf/mfu": "MFU {:.1%}",
}


@dataclass
class Run:
    """One run. `open_run` makes and closes it. All ranks have it, and the first one alone writes and shows."""

    origin: Start  # its config, and the checkpoint that it resumes from, if any
    folder: Path
    device: torch.device
    wandb_id: str  # stays the same when the run resumes in its folder
    group: str | None  # a sweep's folder name
    leads: bool = True  # whether this is the first rank
    tracker: Tracker | None = None
    step: int = 0  # of the last line of metrics
    _bar: Any = None
    _shown: dict[str, float] = field(default_factory=dict)

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
        if not self.leads:
            return
        if self.origin.in_place:
            self._rewind()
            self._keep_environment()
        logging, reasons = settle(self.cfg.logging)
        self.cfg.logging = replace(logging, wandb=self.cfg.logging.wandb)  # a resumed run chooses its mode again
        self._keep("config.yaml", configs.to_yaml(self.cfg))  # train.precision=auto has become a dtype
        self._keep("tokenizer.json", tokenizer.to_json())
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
        hidden = not (self.leads and sys.stderr.isatty())
        with tqdm(total=steps.stop, initial=steps.start, unit="step", dynamic_ncols=True, disable=hidden) as self._bar:
            for step in steps:
                yield step
                self._bar.update()

    def log(self, step: int, values: dict[str, float | None]) -> None:
        """Writes a line of metrics.jsonl, sends it to W&B, and shows the figures.

        Values that are None, NaN or infinite are left out: a gradient scaler lets gradients overflow now and then.
        """
        if not self.leads:
            return
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        path = self.folder / "metrics.jsonl"
        with storage.as_storage_errors(path, storage.advice(self.folder)), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | known, allow_nan=False) + "\n")
        if self.tracker:
            self.tracker.log(known, step)
        self.step = step
        self._show(step, known)

    def sync(self) -> None:
        """Returns once the lines of metrics are on the disk, so that a checkpoint is never newer than they are."""
        path = self.folder / "metrics.jsonl"
        if self.leads and path.is_file():
            with storage.as_storage_errors(path, storage.advice(self.folder)):
                storage.sync(path)

    def say(self, text: str) -> None:
        """Prints a line; an empty one not at all."""
        if text and self.leads:
            show(text)

    def stop(self, step: int, interrupt: Interrupt) -> NoReturn:
        """Ends a run that a signal stopped after `step`; its checkpoint is on the disk. Raises Stopped."""
        self.say(f"stopped after step {step}; to go on: {storage.resume_command(self.folder)}")
        raise Stopped(interrupt.exit_code)

    def finish(self, results: dict[str, Any]) -> None:
        """Writes the results: loss.png, then summary.json and W&B's summary. `keep_sample` comes after it.

        A run is finished when its folder has summary.json and the sample, if it has one.
        """
        self.draw()
        self._keep("summary.json", json.dumps(results, indent=2, allow_nan=False) + "\n")
        if self.tracker:
            self.tracker.summarise(results)

    def keep_sample(self, text: str) -> None:
        """Writes the text of the trained model to sample.txt and to W&B's summary."""
        self._keep("sample.txt", text)
        if self.tracker:
            self.tracker.summarise({"sample": text})

    def draw(self) -> None:
        """Draws loss.png from metrics.jsonl and sends it to W&B. An error in it ends no run: it is only printed."""
        cfg, metrics, picture = self.cfg, self.folder / "metrics.jsonl", self.folder / "loss.png"
        title = f"{cfg.data.name}, {cfg.model.size}, {cfg.norm.impl} {cfg.norm.kind}, seed {cfg.seed}"
        try:
            if self.tracker and metrics.is_file() and loss_curve(metrics, picture, title):
                self.tracker.log_image("loss", picture, self.step)
        except Exception as error:
            self.say(f"no plot: {type(error).__name__}: {error}")

    def close(self, exit_code: int) -> None:
        """Ends W&B's run. A new run that ends before it starts leaves no folder; files that others put there stay."""
        if self.tracker:
            try:
                if exit_code:  # else `finish` has drawn all steps
                    self.draw()
            finally:
                self.tracker.finish(exit_code)
        elif self.leads and not self.origin.in_place:
            for name in ("config.yaml", "environment.json", "run.json", ".lock", "tokenizer.json"):
                (self.folder / name).unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()

    def _keep(self, name: str, text: str) -> None:
        if self.leads:
            storage.replace_text(self.folder / name, text)

    def _keep_environment(self) -> None:
        """Writes the facts of the machine and the code; a resumed run writes them to another file."""
        suffix = f"_from_{self.origin.step:08d}" if self.origin.in_place and self.origin.step else ""
        self._keep(f"environment{suffix}.json", json.dumps(environment(self.device), indent=2) + "\n")

    def _rewind(self) -> None:
        """Takes the folder back to its checkpoint: deletes later lines of metrics, and results."""
        step, metrics, stored = self.origin.step, self.folder / "metrics.jsonl", self.origin.stored
        storage.set_aside(self.folder, after=step)
        if metrics.is_file():
            owed = step if stored and stored.state["owes_validation"] else None  # this step is evaluated again
            lines = [line for line in read_metrics(metrics) if line["step"] <= step]
            kept = [json.dumps(line) + "\n" for line in lines if not (line["step"] == owed and "val/loss" in line)]
            self._keep("metrics.jsonl", "".join(kept))
        for name in ("summary.json", "sample.txt"):
            (self.folder / name).unlink(missing_ok=True)
        for link in ("last", "best"):  # of an older version: they would stay where they point to now
            if (self.folder / link).is_symlink():
                (self.folder / link).unlink()

    def _show(self, step: int, known: dict[str, float]) -> None:
        self._shown |= known
        total = self.cfg.train.steps
        apart = self.cfg.logging.every * max(1, total // (CONSOLE_LINES * self.cfg.logging.every))  # steps between lines
        figures = ", ".join(text.format(self._shown[name]) for name, text in FIGURES.items() if name in self._shown)
        if "val/loss" in known:
            loss, bits = known["val/loss"], known["val/bits_per_byte"]
            show(f"step {step}/{total}  validation loss {loss:.4f}  {bits:.4f} bits per byte")
        elif self._bar is None or self._bar.disable:
            if step % apart == 0 or step == total:
                show(f"step {step}/{total}  {figures}")
        else:
            self._bar.set_postfix_str(figures)


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
            folder = origin.folder if origin.in_place else claim(origin.folder, exact=origin.cfg.resume == "auto")
            held.enter_context(locked(folder))
            if origin.in_place and tuple(storage.checkpoints(folder)) != origin.checkpoints:
                raise ConfigError(f"{relative(folder)}: another process has just trained there. Give the command again.")
            return folder, identity(folder, group)

        folder, wandb = world.on_first(take)
        run = Run(origin, folder, device, *wandb, leads=world.leads)
        if not origin.in_place:
            run._keep_environment()
            run._keep("config.yaml", configs.to_yaml(run.cfg))
        for note in origin.notes:
            run.say(note)
        if folder != origin.folder:
            run.say(f"{relative(origin.folder)} has another run already, so this one is kept in {relative(folder)}.")
        try:
            yield run
        except SystemExit as end:
            run.close(end.code if isinstance(end.code, int) else 1)
            raise
        except BaseException as error:
            run.close(130 if isinstance(error, KeyboardInterrupt) else 1)
            raise
        run.close(0)
