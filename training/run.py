"""A run: what it writes to its folder and to W&B, and what it shows."""

import json
import math
import secrets
import shlex
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from socket import gethostname
from tempfile import mkstemp
from time import monotonic, sleep
from typing import Any

import torch
from tqdm import tqdm

import configs
from configs import Config, ConfigError, as_config_errors
from data import Tokenizer
from data.order import VERSION
from measure.environment import environment
from measure.files import as_storage_errors, relative, replace_text
from training import storage
from training.checkpoint import Stored, Validation
from training.distributed import ALONE, World
from training.interrupt import Stopped, show
from training.metrics import NonFiniteError
from training.tracking import Tracker, agent_job, described, with_defaults

SHOWN_EVERY_S = 10.0
FIGURES = {  # of a line that is shown
    "train/loss": "loss {:.3f}",
    "train/bits_per_byte": "{:.3f} bits/byte",
    "val/loss": "validation loss {:.4f}",
    "val/bits_per_byte": "{:.4f} bits per byte",
    "train/lr": "lr {:.1e}",
    "perf/tokens_per_s": "{:,.0f} tokens/s",
    "perf/step_ms": "{:.4g} ms/step",
    "perf/mfu": "MFU {:.1%}",
}


@dataclass(frozen=True)
class Start:
    """Where a run begins, as `find_start` found it."""

    cfg: Config
    folder: Path  # of the run
    stored: Stored | None = None  # the checkpoint that the run resumes from
    in_place: bool = False  # the run resumes in its own folder, with its metrics and its W&B run
    notes: list[str] = field(default_factory=list)  # what to tell the user

    @property
    def step(self) -> int:
        return self.stored.step if self.stored else 0

    @property
    def order(self) -> int:
        """The version of data.order that the run begins or goes on with."""
        return self.stored.order if self.stored else VERSION

    @property
    def finished(self) -> bool:
        """Whether the run has all its steps and results."""
        return self.in_place and self.step >= self.cfg.train.steps and (self.folder / "summary.json").is_file()


@dataclass
class Summary:
    """What a finished run reached."""

    folder: Path
    final: Validation
    best: Validation
    step_ms: float | None  # median after warm-up
    sample: str

    def __str__(self) -> str:
        final, best, picture = self.final, self.best, self.folder / "loss.png"
        lines = {
            "validation": f"{final.bits_per_byte:.4f} bits per byte, loss {final.loss:.4f} (best {best.bits_per_byte:.4f})",
            "step time": f"{self.step_ms:.4g} ms (median)" if self.step_ms else "only warm-up steps were run",
            **({"loss curve": relative(picture)} if picture.is_file() else {}),  # a run of few steps has none
            "more text": shlex.join(["python", "sample.py", relative(self.folder)]),
        }
        text = f"\n{self.sample.strip()}\n" if self.sample else ""
        return text + "\n" + "\n".join(f"  {name:<10}  {value}" for name, value in lines.items())


@dataclass
class Run:
    """One run. `open_run` makes and closes it. All ranks have it, and the first one alone writes and shows."""

    origin: Start  # its config, and the checkpoint that it resumes from, if any
    folder: Path
    device: torch.device
    group: str | None  # a sweep's folder name
    leads: bool = True  # whether this is the first rank
    tracker: Tracker | None = None
    step: int = 0  # of the last line of metrics
    _shown_at: float = -math.inf

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
        if agent_job() and self.group:
            raise ConfigError("-m: the job of a W&B agent is one run. Leave -m out, and list its values in the sweep's YAML.")
        if self.origin.in_place:
            self._rewind()
        logging, reasons = with_defaults(self.cfg.logging)
        self.cfg.logging = replace(logging, wandb=self.cfg.logging.wandb)  # a resumed run chooses its mode again
        self._keep("config.yaml", configs.to_yaml(self.cfg))  # train.precision=auto has become a dtype
        self._keep("tokenizer.json", tokenizer.to_json())
        identity = self.folder / "run.json"
        if not identity.is_file():
            self._keep("run.json", json.dumps({"wandb_id": secrets.token_hex(4), "group": self.group}) + "\n")
        with as_config_errors(f"{relative(identity)} can't be read, and W&B's run is not known without it"):
            same = {"wandb_id": None, "group": None} | json.loads(identity.read_text(encoding="utf-8"))  # for every start
        self.tracker = Tracker(
            logging,
            self.folder,
            group=logging.group or same["group"],
            name=logging.name or "/".join(filter(None, (same["group"], self.folder.name))),
            tags=list(dict.fromkeys([*(logging.tags or []), self.cfg.norm.impl.value, self.cfg.norm.kind.value])),
            config=configs.to_dict(self.cfg) | sizes | {"facts": facts},
            run_id=same["wandb_id"],
            resumed=self.origin.in_place,
        )
        reasons += [self.tracker.note] if self.tracker.note else []
        facts = facts | {"W&B": described(self.tracker.mode, reasons), "run folder": relative(self.folder)}
        width = max(map(len, facts))
        show("\n".join(f"  {name:<{width}}  {value}" for name, value in facts.items()) + "\n")

    def progress(self, steps: Iterable[int]) -> Iterator[int]:
        """Yields the steps, and shows on a terminal how many are done. `log` prints lines above that bar."""
        hidden = None if self.leads else True  # None: shown on a terminal only
        done = self.origin.step
        yield from tqdm(
            steps, total=self.cfg.train.steps, initial=done, unit="step", dynamic_ncols=True, leave=False, disable=hidden
        )

    def log(self, step: int, values: dict[str, float | None]) -> None:
        """Writes a line of metrics.jsonl, sends it to W&B, and shows it, if no line of training was shown just before.

        Values that are None, NaN or infinite are left out: a gradient scaler lets gradients overflow now and then.
        """
        if not self.leads:
            return
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        path = self.folder / storage.METRICS
        with as_storage_errors(path, storage.advice(self.folder)), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | known, allow_nan=False) + "\n")
        if self.tracker:
            self.tracker.log(known, step)
        self.step, last = step, self.cfg.train.steps
        evaluated = "val/loss" in known
        if evaluated or step == last or monotonic() - self._shown_at >= SHOWN_EVERY_S:
            self._shown_at = self._shown_at if evaluated else monotonic()
            shown = (text.format(known[name]) for name, text in FIGURES.items() if name in known)
            show(f"step {step}/{last}  {', '.join(shown)}")

    def finish(self, summary: Summary, sizes: dict[str, float]) -> Summary:
        """Writes the results: loss.png, sample.txt, W&B's summary and, with which the run is finished, summary.json."""
        results = {"final": asdict(summary.final), "best": asdict(summary.best), "median_step_ms": summary.step_ms} | sizes
        self.draw()
        if summary.sample:
            self._keep("sample.txt", summary.sample)
        if self.tracker:
            self.tracker.summarise(results | ({"sample": summary.sample} if summary.sample else {}))
        self._keep("summary.json", json.dumps(results, indent=2, allow_nan=False) + "\n")
        return summary

    def draw(self) -> None:
        """Draws loss.png from metrics.jsonl and sends it to W&B. An error in it ends no run: it is only printed."""
        cfg, picture = self.cfg, self.folder / "loss.png"
        title = f"{cfg.data.name}, {cfg.model.size}, {cfg.norm.impl} {cfg.norm.kind}, seed {cfg.seed}"
        try:
            from training.plot import loss_curve  # matplotlib: a tenth of the time to the first step

            if self.tracker and loss_curve(storage.read_metrics(self.folder), picture, title):
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
            for name in storage.BEFORE_START:
                (self.folder / name).unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()

    def say(self, text: str) -> None:
        if self.leads:
            show(text)

    def _keep(self, name: str, text: str) -> None:
        if self.leads:
            replace_text(self.folder / name, text)

    def _rewind(self) -> None:
        """Takes the folder back to its checkpoint: deletes later lines of metrics, and results."""
        step, stored = self.origin.step, self.origin.stored
        storage.set_aside(self.folder, after=step)
        owed = step if stored and stored.state.get("owes_validation") else None  # this step is evaluated again
        lines = [line for line in storage.read_metrics(self.folder) if line["step"] <= step]
        kept = [json.dumps(line) + "\n" for line in lines if not (line["step"] == owed and "val/loss" in line)]
        self._keep(storage.METRICS, "".join(kept))
        for name in ("summary.json", "sample.txt"):
            (self.folder / name).unlink(missing_ok=True)


def check_shared(folder: Path, world: World, patience_s: float = 10.0) -> None:
    """Checks that all ranks see the first one's files in `folder`, as checkpoints and the data's settings are read there.

    Raises:
        ConfigError: on every rank: one does not, after the time that a network file system may need to show a new file.
    """
    if world.size == 1:
        return
    name = world.on_first(lambda: Path(mkstemp(prefix=".shared-", dir=folder)[1]).name)
    try:
        with world.shared_errors():
            until = monotonic() + patience_s
            while not (folder / name).exists():
                if monotonic() > until:
                    raise ConfigError(
                        f"folder={relative(folder)}: rank {world.rank} on {gethostname()} does not see the files that the "
                        "first rank writes there. All nodes need one shared folder: folder=PATH."
                    )
                sleep(0.1)
    finally:
        if world.leads:
            (folder / name).unlink()


@contextmanager
def open_run(origin: Start, device: torch.device, group: str | None = None, world: World = ALONE) -> Iterator[Run]:
    """Opens a run in a folder of its own. However the block ends, the plot is drawn and W&B gets the exit code.

    All ranks share the folder that the first one claims.

    Args:
        origin: where the run begins. If another run has its folder, the new one gets a number appended.
        group: a sweep's name, shared by its runs.

    Raises:
        ConfigError: the folder can't be written, or another process trains there.
    """
    with ExitStack() as held:
        resumes = origin.in_place or origin.cfg.resume == "auto"
        folder = world.on_first(lambda: held.enter_context(storage.claim(origin.folder, storage.TRAIN, resumes=resumes)))
        check_shared(folder, world)
        run = Run(origin, folder, device, group, leads=world.leads)
        of_start = f"_from_{origin.step:08d}" if origin.in_place and origin.step else ""
        run._keep(f"environment{of_start}.json", json.dumps(environment(device), indent=2) + "\n")
        if not origin.in_place:
            run._keep("config.yaml", configs.to_yaml(run.cfg))
        for note in origin.notes:
            run.say(note)
        if folder != origin.folder:
            run.say(f"{relative(origin.folder)} has another run already, so this one is kept in {relative(folder)}.")
        try:
            yield run
        except BaseException as error:
            done = (folder / "summary.json").is_file()  # a signal in the last sample
            if isinstance(error, Stopped | NonFiniteError) and not done and (kept := storage.checkpoints(folder)):
                at = "stopped after" if isinstance(error, Stopped) else "the newest checkpoint is of"
                run.say(f"{at} step {storage.step_of(kept[0])}; to go on: {storage.resume_command(folder)}")
            code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "code", 1)
            run.close(code if isinstance(code, int) else 1)
            raise
        run.close(0)
