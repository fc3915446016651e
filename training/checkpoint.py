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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from safetensors.torch import load_file, save

from configs import Config, ConfigError, as_config_errors, from_dict, to_dict
from configs.compose import as_typed
from data.order import VERSION
from measure.files import relative
from model import GPT
from training import storage
from training.distributed import ALONE, World
from training.sharding import gather_to_host, is_sharded, sharded_like

FORMAT = 2
MODEL, TRAINING, STATE, TOKENIZER = "model.safetensors", "training.safetensors", "state.json", "tokenizer.json"
PLAIN = ("step", "tokens", "losses", "corpus", "order", "best_step", "owes_validation")  # of TrainState, in state.json
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
    order: int = VERSION  # of the windows of an epoch
    step: int = 0  # optimizer steps done
    tokens: int = 0  # of these steps, of all ranks together
    loss_sum: torch.Tensor = field(default_factory=lambda: torch.zeros(()))  # since the last line of metrics; on the device
    losses: int = 0  # the number of losses in that sum
    validation: Validation | None = None  # the last one
    best: Validation | None = None
    best_step: int | None = None
    owes_validation: bool = False  # a signal cut the evaluation of this step short
    leads: bool = True  # whether this is the rank that writes

    def parts(self, config: dict[str, Any]) -> dict[str, Callable[[], bytes]]:
        """The files of a checkpoint: by name, the function that makes the content; `config` is `configs.to_dict` of the run's.

        All ranks of a sharded model call it together; only the first one gets the tensors.
        """
        model = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        training = {"loss_sum": self.loss_sum.detach()}
        of_each = self.optimizer.state_dict()["state"]  # by the parameter's place among all groups
        for index, (name, _) in enumerate(self._optimized()):
            training |= {f"optimizer.{name}.{key}": value for key, value in of_each.get(index, {}).items()}
        if is_sharded(self.model):
            model, training = gather_to_host(model, keep=self.leads), gather_to_host(training, keep=self.leads)
        state = {name: getattr(self, name) for name in PLAIN} | {
            "format": FORMAT,
            "scaler": self.scaler.state_dict(),
            "validation": self.validation and asdict(self.validation),
            "best": self.best and asdict(self.best),
            "config": config,
        }
        return {
            MODEL: lambda: serialize(model),
            TRAINING: lambda: serialize(training),
            STATE: (json.dumps(state, indent=1, allow_nan=False) + "\n").encode,
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
        self.step, self.losses, self.order = stored.step, stored.state["losses"], stored.order
        older = stored.step * stored.cfg.train.batch_size * stored.cfg.model.context
        self.tokens = stored.state.get("tokens", older)  # an older version stored none
        self.loss_sum = training["loss_sum"].to(self.loss_sum.device, copy=True)
        if kept := stored.state["validation"]:
            self.validation = Validation(**kept)
        if same_folder:
            self.best = Validation(**kept) if (kept := stored.state["best"]) else None
            self.best_step = stored.state["best_step"]
            self.owes_validation = stored.state.get("owes_validation", False)

    def _optimized(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The optimizer's parameters with their names, in its order."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [(names[id(p)], p) for group in self.optimizer.param_groups for p in group["params"]]


def serialize(tensors: dict[str, torch.Tensor]) -> bytes:
    """Tensors of any device in the safetensors format; "pt" is what Hugging Face's libraries look for in the metadata."""
    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})


class Saver:
    """Saves checkpoints in a run's folder, and keeps the newest checkpoint.keep and the best one."""

    def __init__(self, run: Path, cfg: Config, world: World = ALONE) -> None:
        self._run, self._world, self._options, self._config = run, world, cfg.checkpoint, to_dict(cfg)
        self._saved_at = monotonic()

    @property
    def overdue(self) -> bool:
        """Whether checkpoint.minutes have passed since the last checkpoint, or since the start, by this rank's clock."""
        return 0 < 60 * self._options.minutes <= monotonic() - self._saved_at

    def save(self, state: TrainState) -> None:
        """Saves `state`. All ranks call it together.

        Raises:
            StorageError: on every rank: the checkpoint can't be written.
        """
        parts = state.parts(self._config) if state.leads or is_sharded(state.model) else {}
        self._world.on_first(lambda: storage.commit(self._run, state.step, parts, self._options.keep, state.best_step))
        self._saved_at = monotonic()


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
    def order(self) -> int:
        """The version of data.order that the run goes on with."""
        return self.state.get("order", 1)  # an older version stored none

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
    with as_config_errors(f"{path}: not a readable checkpoint"):
        path = locate(path)
        if not verified:
            storage.verify(path, (MODEL, STATE, TOKENIZER))
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if state.get("format") != FORMAT:
            raise ValueError(f"its format is {state.get('format')}, and this version reads {FORMAT}")
        return Stored(path, state, (path / TOKENIZER).read_text(encoding="utf-8"), from_dict(state["config"]))


def locate(path: Path) -> Path:
    """The checkpoint at `path`: one checkpoint; or the newest one of a run or of its checkpoints/. RUN/last is the newest one
    too, and RUN/best the one with the least validation loss.

    Raises:
        ConfigError: it is none of these.
    """
    if path.name in (LAST, BEST) and (kept := storage.checkpoints(path.parent)):
        if path.name == LAST:
            return kept[0]
        losses = {line["step"]: line["val/loss"] for line in storage.read_metrics(path.parent) if "val/loss" in line}
        if evaluated := [found for found in reversed(kept) if storage.step_of(found) in losses]:
            return min(evaluated, key=lambda found: losses[storage.step_of(found)])
        raise ConfigError(f"{path}: no checkpoint of this run was evaluated. Give the run, for its newest one: {path.parent}.")
    if (path / storage.SUMS).is_file():
        return path
    if kept := storage.checkpoints(path.parent if path.name == storage.FOLDER else path):
        return kept[0]
    raise ConfigError(f"{path}: no checkpoint there. Give a run's folder, or a checkpoint in its checkpoints/.")


def load_weights(model: torch.nn.Module, stored: Stored) -> None:
    """Loads the weights of a checkpoint into a model. Raises ConfigError: names or shapes differ."""
    try:
        own = model.state_dict()
        model.load_state_dict({name: sharded_like(value, like=own.get(name, value)) for name, value in stored.model().items()})
    except RuntimeError as error:
        raise ConfigError(f"the weights of {relative(stored.path)} do not fit this model: {error}") from error
