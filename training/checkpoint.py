"""What a checkpoint holds, and when one is saved.

    model.safetensors      weights by parameter name
    training.safetensors   optimizer.NAME.exp_avg and so on by parameter name; the training loss since the last line of metrics
    state.json             step, gradient scaler, validation so far, the run's config
    tokenizer.json         what the model's token ids mean

Tensors are stored whole, by the name of their parameter, and reading them runs no code. A sharded run gathers its state, tensor
by tensor, into the host memory of the first rank, which writes the same files. So any number of ranks, sharded or not, can
resume from a checkpoint, and sample.py can read it. That takes 12 bytes of host memory a parameter, and 28 during the write.
torch.distributed.checkpoint needs less, but its index is a pickle, which runs code when it is read.
"""

import json
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from configs import Config, ConfigError, from_dict, to_dict
from configs.compose import as_typed
from data import Tokenizer
from model import GPT
from training import storage
from training.console import show
from training.distributed import ALONE, World
from training.sharding import gather_to_host, is_sharded, sharded_like
from training.storage import DamagedError, Sink, relative

FORMAT = 2
STATE_TYPES = {"step": int, "losses": int, "corpus": str, "scaler": dict, "owes_validation": bool, "config": dict}
MODEL, TRAINING, STATE, TOKENIZER = "model.safetensors", "training.safetensors", "state.json", "tokenizer.json"


@dataclass(frozen=True)
class Validation:
    loss: float  # nats per token
    bits_per_byte: float  # of the text that the tokens encode: comparable across tokenizers


@dataclass
class TrainState:
    """What changes while training. Batches, dropout seeds and learning rates are functions of `step` and need no state."""

    model: GPT  # not the compiled one, whose parameter names have a prefix
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    tokenizer: str  # text of the run's tokenizer.json
    corpus: str = ""  # Corpus.identity
    step: int = 0  # optimizer steps done
    tokens: int = 0  # of these steps, of all ranks together
    loss_sum: torch.Tensor = field(default_factory=lambda: torch.zeros(()))  # since the last line of metrics; on the device
    losses: int = 0  # the number of losses in that sum
    validation: Validation | None = None  # the last one
    best: Validation | None = None
    best_step: int | None = None
    owes_validation: bool = False  # a signal cut the evaluation of this step short
    leads: bool = True  # whether this is the rank that writes

    def parts(self, config: dict[str, Any], *, copied: bool) -> dict[str, Callable[[Sink], object]]:
        """The files of a checkpoint: by name, the function that writes the file.

        All ranks of a sharded model call it together; only the first one gets the tensors.

        Args:
            config: of the run, as `configs.to_dict` gives it.
            copied: copy tensors to host memory now, so that training can go on while they are written. Sharded tensors are
                always copied.
        """
        model = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        training = {"loss_sum": self.loss_sum.detach()} | _optimizer_tensors(self.model, self.optimizer)
        if is_sharded(self.model):
            model, training = gather_to_host(model, keep=self.leads), gather_to_host(training, keep=self.leads)
        elif copied:
            model, training = to_host(model), to_host(training)
        state = {
            "format": FORMAT,
            "step": self.step,
            "tokens": self.tokens,
            "losses": self.losses,
            "corpus": self.corpus,
            "scaler": self.scaler.state_dict(),
            "validation": self.validation and asdict(self.validation),
            "best": self.best and asdict(self.best),
            "best_step": self.best_step,
            "owes_validation": self.owes_validation,
            "config": config,
        }
        text = json.dumps(state, indent=1, allow_nan=False)  # now, as training goes on while a thread writes it
        return {
            MODEL: partial(write_tensors, tensors=model),
            TRAINING: partial(write_tensors, tensors=training),
            STATE: lambda file: file.write((text + "\n").encode()),
            TOKENIZER: lambda file: file.write(self.tokenizer.encode()),
        }

    def restore(self, stored: "Stored", *, same_folder: bool = True) -> None:
        """Loads a checkpoint. Weight decay, betas and eps stay those of this run's config, which may differ.

        Args:
            same_folder: the run goes on in the checkpoint's folder. In another one it has its own best checkpoint, and its
                first evaluation is its own.

        Raises:
            ConfigError: the stored weights belong to a model of another shape or to another tokenizer.
        """
        if stored.tokenizer != self.tokenizer:
            raise ConfigError(f"resume: {relative(stored.path)} was {stored.other_tokenizer} resume_with_changes=true")
        load_weights(self.model, stored)
        training = stored.training()
        state = {}
        for index, (name, parameter) in enumerate(_optimized(self.model, self.optimizer)):
            prefix = f"optimizer.{name}."
            state[index] = {
                key.removeprefix(prefix): sharded_like(value, like=parameter)
                if value.ndim
                else value  # a count of steps is not sharded
                for key, value in training.items()
                if key.startswith(prefix)
            }
            if not state[index] and parameter.requires_grad:
                raise ConfigError(f"resume: {relative(stored.path)} has no optimizer state for the parameter {name}.")
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        if stored.state["scaler"]:  # empty unless the run was in fp16
            self.scaler.load_state_dict(stored.state["scaler"])
        self.step, self.losses = stored.step, stored.state["losses"]
        older = stored.step * stored.cfg.train.batch_size * stored.cfg.model.context
        self.tokens = stored.state.get("tokens", older)  # an older version stored none
        self.loss_sum = training["loss_sum"].to(self.loss_sum.device, copy=True)
        self.validation, self.best = (
            Validation(**kept) if (kept := stored.state[which]) else None for which in ("validation", "best")
        )
        self.best_step, self.owes_validation = stored.state["best_step"], stored.state["owes_validation"]
        if not same_folder:
            self.best, self.best_step, self.owes_validation = None, None, False


@dataclass(frozen=True)
class Stored:
    """A checkpoint on the disk. Its state has been read; its tensors are read when they are used."""

    path: Path
    state: dict[str, Any]
    tokenizer: str  # text of its tokenizer.json
    cfg: Config

    @property
    def config(self) -> dict[str, Any]:
        return self.state["config"]

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def other_tokenizer(self) -> str:
        """The end of a message."""
        its = as_typed("tokenizer.pretrained", relative(self.path / TOKENIZER))
        return (
            "trained with another tokenizer, so its token ids mean other text. Use the tokenizer.* and data.* of that run, or "
            f"with other text its tokenizer:\n  tokenizer.kind=pretrained {its}"
        )

    def model(self) -> dict[str, torch.Tensor]:
        """The weights. Raises ConfigError: they can't be read, or are not finite."""
        tensors = self._tensors(MODEL)
        if bad := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
            raise ConfigError(f"{relative(self.path / MODEL)}: {bad[0]} is NaN or infinite. Use a checkpoint before that.")
        return tensors

    def training(self) -> dict[str, torch.Tensor]:
        return self._tensors(TRAINING)

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        try:
            return load_file(self.path / name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{relative(self.path / name)} can't be read: {error}. Use another checkpoint.") from error


def read(path: Path, *, verified: bool = False) -> Stored:
    """The checkpoint at `path`, or the newest one of the run at `path`.

    Args:
        verified: its checksums were compared before. Otherwise they are compared now, of all but the optimizer's state.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    path = locate(path)
    try:
        if not verified:
            storage.verify(path, (MODEL, STATE, TOKENIZER))
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        tokenizer = (path / TOKENIZER).read_text(encoding="utf-8")
        Tokenizer.load(path / TOKENIZER)
    except (DamagedError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable checkpoint: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ConfigError(f"{path}: not a checkpoint of this program, or of a version whose format is not {FORMAT}.")
    try:
        assert all(state[which] is None or Validation(**state[which]) for which in ("validation", "best"))
        if wrong := [name for name, kind in STATE_TYPES.items() if type(state[name]) is not kind]:
            raise TypeError(f"{wrong[0]} is {state[wrong[0]]!r}")
        return Stored(path, state, tokenizer, from_dict(state["config"]))
    except (KeyError, TypeError, ConfigError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ConfigError(f"{relative(path / STATE)} is not as it was written: {why}. Use another checkpoint.") from error


def locate(path: Path) -> Path:
    """`path` if it is a checkpoint, or the newest checkpoint of the run at `path`, which may be given by its checkpoints/.

    Raises:
        ConfigError: it is neither.
    """
    path = storage.run_of(path)
    if (path / storage.SUMS).is_file() or (path / STATE).is_file():
        return path.resolve()  # where the links last and best point to
    if kept := storage.checkpoints(path):
        return kept[0].resolve()
    if inside := runs_in(path):
        raise ConfigError(f"{path}: a folder of runs. Name one of them, such as {path / inside[-1]}.")
    if path.is_dir():
        raise ConfigError(f"{path}: no checkpoints in this folder; the run has not reached its first one.")
    if path.is_file():
        raise ConfigError(f"{path} is a file. A checkpoint is a folder: give a run's, runs/NAME, or one in its checkpoints/.")
    if path.is_symlink():
        raise ConfigError(
            f"{path} points to {path.readlink()}, which is gone. Give the run, {path.parent}, for its newest checkpoint."
        )
    raise ConfigError(f"{path}: no such file or folder.{runs_beside(path)}")


def is_of_a_run(folder: Path) -> bool:
    """Whether train.py made the folder: a run, also before its first checkpoint, a checkpoint, also a damaged one, or runs."""
    return bool(runs_in(folder)) or any(
        (folder / name).exists() for name in ("config.yaml", storage.FOLDER, storage.SUMS, STATE)
    )


def runs_beside(path: Path) -> str:
    """A space and a sentence that names the latest runs in the folder of `path`; empty if there are none."""
    near = runs_in(path.parent)
    return f" Latest runs beside it: {', '.join(near[-3:])}." if near else ""


def runs_in(folder: Path) -> list[str]:
    """The names of the runs in a folder that have checkpoints."""
    return sorted({found.parent.parent.name for found in folder.glob(f"*/{storage.FOLDER}/step_*")})


def load_weights(model: torch.nn.Module, stored: Stored) -> None:
    """Loads the weights of a checkpoint into a model. Raises ConfigError: names or shapes differ."""
    try:
        own = model.state_dict()
        model.load_state_dict({name: sharded_like(value, like=own.get(name, value)) for name, value in stored.model().items()})
    except RuntimeError as error:
        raise ConfigError(f"the weights of {relative(stored.path)} do not fit this model: {error}") from error


def to_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in host memory. Copies from a GPU overlap, through pinned memory, and the host waits once for all."""
    copies = {
        name: torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)
        for name, tensor in tensors.items()
    }
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies


def _optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in _optimized(model, optimizer)
        for key, value in optimizer.state[parameter].items()
    }


def _optimized(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    """The optimizer's parameters with their names, in its order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]


def write_tensors(file: Sink, tensors: dict[str, torch.Tensor]) -> None:
    """Tensors of any device in the safetensors format; "pt" is what Hugging Face's libraries look for in the metadata."""
    file.write(save({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"}))


class Saver:
    """Saves checkpoints in a run's folder and keeps the newest few. At the end of the block the last one is on the disk.

    With checkpoint.background=true, `save` returns once the state is copied to host memory, and a thread writes the copy. The
    thread writes one checkpoint at a time: the next `save` waits for it. The next `save`, or the end of the block, raises an
    error of the thread.
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
        """Saves `state`, updates the links last and best, and deletes checkpoints beyond the newest checkpoint.keep.

        All ranks call it together, and the first one writes.

        Raises:
            StorageError: on every rank: this checkpoint, or the one that the thread was writing, can't be written.
        """
        self.wait()
        parts = {}
        if state.leads or is_sharded(state.model):
            parts = state.parts(self._config, copied=self._thread is not None)
        self._world.on_first(lambda: self._write(state.step, parts, state.best_step))
        self._saved_at = monotonic()

    def wait(self) -> None:
        """Returns once the thread has written its checkpoint. All ranks call it together. Raises StorageError as `save`."""
        self._world.on_first(self._finish)

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
        self.update_links(best)
        storage.prune(self._run, self._keep_newest, best)

    def update_links(self, best: int | None) -> None:
        """Points the run's links last and best to its newest checkpoint and to that of step `best`."""
        if not self._world.leads:
            return
        kept = storage.checkpoints(self._run)
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
            if error is None or isinstance(error, SystemExit):  # the exit code of a stopped run means that all is saved
                raise
            error.add_note(str(failed))  # so that it does not hide why the run ended
        finally:
            if self._thread is not None:
                self._thread.shutdown()
