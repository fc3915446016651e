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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file, save

from configs import Config, ConfigError, from_dict, to_dict
from configs.compose import as_typed
from model import GPT
from training import storage
from training.distributed import ALONE, World
from training.sharding import gather_to_host, is_sharded, sharded_like
from training.storage import relative

FORMAT = 2
MODEL, TRAINING, STATE, TOKENIZER = "model.safetensors", "training.safetensors", "state.json", "tokenizer.json"
PLAIN = ("step", "tokens", "losses", "corpus", "best_step", "owes_validation")  # of TrainState, in state.json
LAST, BEST = "last", "best"  # RUN/last and RUN/best name checkpoints, and are no files


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

    def parts(self, config: dict[str, Any], *, copied: bool) -> dict[str, Callable[[], bytes]]:
        """The files of a checkpoint: by name, the function that makes the content.

        All ranks of a sharded model call it together; only the first one gets the tensors.

        Args:
            config: of the run, as `configs.to_dict` gives it.
            copied: copy tensors to host memory now, so that training can go on while they are written. Sharded tensors are
                always copied.
        """
        model = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        training = {"loss_sum": self.loss_sum.detach()}
        of_each = self.optimizer.state_dict()["state"]  # by the parameter's place among all groups
        for index, (name, _) in enumerate(self._optimized()):
            training |= {f"optimizer.{name}.{key}": value for key, value in of_each.get(index, {}).items()}
        if is_sharded(self.model):
            model, training = gather_to_host(model, keep=self.leads), gather_to_host(training, keep=self.leads)
        elif copied:
            model, training = _to_host(model), _to_host(training)
        state = {name: getattr(self, name) for name in PLAIN} | {
            "format": FORMAT,
            "scaler": self.scaler.state_dict(),
            "validation": self.validation and asdict(self.validation),
            "best": self.best and asdict(self.best),
            "config": config,
        }
        text = json.dumps(state, indent=1, allow_nan=False) + "\n"  # now, as training goes on while a thread writes it
        return {
            MODEL: partial(serialize, model),
            TRAINING: partial(serialize, training),
            STATE: text.encode,
            TOKENIZER: self.tokenizer.encode,
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
        training, state = load_file(stored.path / TRAINING), {}
        for index, (name, parameter) in enumerate(self._optimized()):
            prefix = f"optimizer.{name}."
            found = {key.removeprefix(prefix): value for key, value in training.items() if key.startswith(prefix)}
            # a count of steps has no dimension, and is not sharded
            state[index] = {key: sharded_like(value, parameter) if value.ndim else value for key, value in found.items()}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        if stored.state["scaler"]:  # empty unless the run was in fp16
            self.scaler.load_state_dict(stored.state["scaler"])
        self.step, self.losses = stored.step, stored.state["losses"]
        older = stored.step * stored.cfg.train.batch_size * stored.cfg.model.context
        self.tokens = stored.state.get("tokens", older)  # an older version stored none
        self.loss_sum = training["loss_sum"].to(self.loss_sum.device, copy=True)
        if kept := stored.state["validation"]:
            self.validation = Validation(**kept)
        if same_folder:
            self.best = Validation(**kept) if (kept := stored.state["best"]) else None
            self.best_step, self.owes_validation = stored.state["best_step"], stored.state["owes_validation"]

    def _optimized(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The optimizer's parameters with their names, in its order."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [(names[id(p)], p) for group in self.optimizer.param_groups for p in group["params"]]


def serialize(tensors: dict[str, torch.Tensor]) -> bytes:
    """Tensors of any device in the safetensors format; "pt" is what Hugging Face's libraries look for in the metadata."""
    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})


def _to_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in host memory. Copies from a GPU overlap, through pinned memory, and the host waits once for all."""
    copies = {
        name: torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)
        for name, tensor in tensors.items()
    }
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies


class Saver:
    """Saves checkpoints in a run's folder and keeps the newest few. At the end of the block the last one is on the disk.

    A thread writes one checkpoint at a time, and `save` waits for it. With checkpoint.background=true, `save` returns once the
    state is copied to host memory; the next `save`, or the end of the block, waits for the thread and raises its error.
    """

    def __init__(self, run: Path, cfg: Config, world: World = ALONE) -> None:
        self._run, self._world, self._options, self._config = run, world, cfg.checkpoint, to_dict(cfg)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._saved_at = monotonic()

    @property
    def overdue(self) -> bool:
        """Whether checkpoint.minutes have passed since the last checkpoint, or since the block began, by this rank's clock."""
        return 0 < 60 * self._options.minutes <= monotonic() - self._saved_at

    def save(self, state: TrainState) -> None:
        """Saves `state`, and deletes checkpoints beyond the newest checkpoint.keep. All ranks call it together.

        Raises:
            StorageError: on every rank: this checkpoint, or the one that the thread was writing, can't be written.
        """
        self.wait()
        background = self._options.background
        parts = state.parts(self._config, copied=background) if state.leads or is_sharded(state.model) else {}
        if self._world.leads:
            self._pending = self._thread.submit(self._write, state.step, parts, state.best_step)
        if not background:
            self.wait()
        self._saved_at = monotonic()

    def wait(self) -> None:
        """Returns once the thread has written its checkpoint. All ranks call it together. Raises StorageError as `save`."""
        self._world.on_first(self._finish)

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, parts: dict[str, Callable[[], bytes]], best: int | None) -> None:
        if not (self._run / storage.FOLDER / storage.name(step)).exists():
            storage.commit(self._run, step, parts)
        storage.prune(self._run, self._options.keep, best)

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
            self._thread.shutdown()


@dataclass(frozen=True)
class Stored:
    """A checkpoint on the disk. Its state has been read; its tensors are read when they are used."""

    path: Path
    state: dict[str, Any]
    tokenizer: str  # text of its tokenizer.json
    cfg: Config

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
        """The weights."""
        return load_file(self.path / MODEL)


def read(path: Path, *, verified: bool = False) -> Stored:
    """The checkpoint that `locate` finds.

    Args:
        verified: its sums were compared before. Otherwise they are compared now, of all but the optimizer's state.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    path = locate(path)
    try:
        if not verified:
            storage.verify(path, (MODEL, STATE, TOKENIZER))
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise ValueError(f"its format is {state['format']}, and this version reads {FORMAT}")
        return Stored(path, state, (path / TOKENIZER).read_text(encoding="utf-8"), from_dict(state["config"]))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: not a readable checkpoint: {error}") from error


def load_weights(model: torch.nn.Module, stored: Stored) -> None:
    """Loads the weights of a checkpoint into a model. Raises ConfigError: names or shapes differ."""
    try:
        own = model.state_dict()
        model.load_state_dict({name: sharded_like(value, like=own.get(name, value)) for name, value in stored.model().items()})
    except RuntimeError as error:
        raise ConfigError(f"the weights of {relative(stored.path)} do not fit this model: {error}") from error


def locate(path: Path) -> Path:
    """The checkpoint at `path`.

    Args:
        path: a checkpoint, or a run or its checkpoints/: the newest one. RUN/last is the newest one too, RUN/best the one with
            the least validation loss. A file in one of these folders counts as the folder.

    Raises:
        ConfigError: it is none of these.
    """
    named = path.parent.name in (LAST, BEST) and not path.exists()  # a file of a checkpoint that is looked up by its name
    folder = storage.run_of(path.parent if path.is_file() or named else path)
    if folder.name in (LAST, BEST) and (kept := storage.checkpoints(folder.parent)):
        return kept[0] if folder.name == LAST else _best(folder.parent, kept)
    if (folder / storage.SUMS).is_file() or (folder / STATE).is_file():
        return folder
    if kept := storage.checkpoints(folder):
        return kept[0]
    near = _runs_in(folder) or _runs_in(path.parent)
    raise ConfigError(f"{path}: no checkpoint there." + (f" Runs that have some: {', '.join(near[-3:])}." if near else ""))


def _best(run: Path, kept: list[Path]) -> Path:
    """The checkpoint of the least validation loss in the run's metrics, of those that are kept."""
    from training.metrics import read_metrics  # here, as it imports this module

    metrics = run / "metrics.jsonl"
    lines = read_metrics(metrics) if metrics.is_file() else []
    losses = {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}
    evaluated = [checkpoint for checkpoint in reversed(kept) if storage.step_of(checkpoint) in losses]
    if not evaluated:
        raise ConfigError(f"{run / BEST}: no checkpoint of this run was evaluated. Give the run, for its newest one: {run}.")
    return min(evaluated, key=lambda checkpoint: losses[storage.step_of(checkpoint)])


def _runs_in(folder: Path) -> list[str]:
    """The runs in a folder that have checkpoints."""
    return sorted({str(found.parent.parent) for found in folder.glob(f"*/{storage.FOLDER}/step_*")})
