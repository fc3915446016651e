"""What a checkpoint holds: a state of training as tensors by name and plain JSON, read without running code.

    model.safetensors      weights by parameter name
    training.safetensors   optimizer.NAME.exp_avg and so on by parameter name; the training loss since the last line of metrics
    state.json             step, gradient scaler, validation so far, the run's config
    tokenizer.json         what the model's token ids mean

Everything is stored whole, by the name of its parameter and nothing by position or rank. A sharded run gathers its state tensor
by tensor into the host memory of the first rank, which writes the same files: any number of ranks, sharded or not, goes on from
them, and so does sample.py. PyTorch's own sharded format (torch.distributed.checkpoint) would spare that gathering and the host
memory: 12 bytes a parameter, and 28 while the optimizer's state is written, as safetensors then makes two copies of it. But its
index is a pickle, which runs code when it is read, and a folder half written by several ranks has no single rename that makes
it whole.

`storage.py` has the folder that these files make.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from configs import ConfigError
from model import GPT
from training import storage
from training.evaluation import Validation
from training.sharding import collect, is_sharded, placed
from training.storage import DamagedError, Sink, relative

FORMAT = 2
MODEL, TRAINING, STATE, TOKENIZER = "model.safetensors", "training.safetensors", "state.json", "tokenizer.json"


@dataclass
class TrainState:
    """What changes while training. Batches, dropout seeds and learning rates are functions of `step` and need no state."""

    model: GPT  # not the compiled one: its parameter names carry a prefix
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    tokenizer: str  # text of the run's tokenizer.json
    corpus: str = ""  # Corpus.identity
    step: int = 0  # optimizer steps done
    loss_sum: torch.Tensor = field(default_factory=lambda: torch.zeros(()))  # since the last line of metrics; on the device
    losses: int = 0  # in that sum
    validation: Validation | None = None  # the last one
    best: Validation | None = None
    best_step: int | None = None
    owes_validation: bool = False  # a signal cut the evaluation of this step short
    leads: bool = True  # whether this is the rank that writes

    def parts(self, config: dict[str, Any], *, copied: bool) -> dict[str, Callable[[Sink], object]]:
        """The files of a checkpoint, each as what writes it.

        Ranks with a sharded state call it together; but for the one that leads, they get files of no tensors.

        Args:
            config: of the run, as `configs.to_dict` gives it.
            copied: copy tensors to host memory now, so that training may go on while they are written. Sharded ones always are.
        """
        model = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        training = {"loss_sum": self.loss_sum.detach()} | _optimizer_tensors(self.model, self.optimizer)
        if is_sharded(self.model):
            model, training = collect(model, keep=self.leads), collect(training, keep=self.leads)
        elif copied:
            model, training = to_host(model), to_host(training)
        state = {
            "format": FORMAT,
            "step": self.step,
            "losses": self.losses,
            "corpus": self.corpus,
            "scaler": self.scaler.state_dict(),
            "validation": self.validation and asdict(self.validation),
            "best": self.best and asdict(self.best),
            "best_step": self.best_step,
            "owes_validation": self.owes_validation,
            "config": config,
        }
        return {
            MODEL: partial(write_tensors, tensors=model),
            TRAINING: partial(write_tensors, tensors=training),
            STATE: partial(_write_text, text=json.dumps(state, indent=1, allow_nan=False) + "\n"),
            TOKENIZER: partial(_write_text, text=self.tokenizer),
        }

    def restore(self, stored: "Stored", *, with_changes: bool = False) -> None:
        """Goes on from a checkpoint. Weight decay, betas and eps stay those of this run's config, which may differ.

        Args:
            with_changes: accept other documents.

        Raises:
            ConfigError: the stored weights belong to a model of another shape, to another tokenizer or to other documents.
        """
        if stored.tokenizer != self.tokenizer:
            raise ConfigError(
                f"resume: {relative(stored.path)} was trained with another tokenizer, so its token ids mean other text. "
                "Use the tokenizer.* and data.* of that run."
            )
        if stored.state["corpus"] != self.corpus and not with_changes:
            raise ConfigError(
                f"resume: {relative(stored.path)} was trained on other documents: the files or the data set have changed "
                "since, and its batches with them. Bring them back, or accept that with resume_with_changes=true."
            )
        load_weights(self.model, stored)
        training = stored.training()
        state = {}
        for index, (name, parameter) in enumerate(_optimized(self.model, self.optimizer)):
            prefix = f"optimizer.{name}."
            state[index] = {
                key.removeprefix(prefix): placed(value, like=parameter) if value.ndim else value  # a count of steps is no part
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
        self.loss_sum = training["loss_sum"].to(self.loss_sum.device, copy=True)
        self.validation, self.best = (
            Validation(**kept) if (kept := stored.state[which]) else None for which in ("validation", "best")
        )
        self.best_step, self.owes_validation = stored.state["best_step"], stored.state["owes_validation"]


@dataclass(frozen=True)
class Stored:
    """A checkpoint, read. Its tensors stay on the disk until they are used."""

    path: Path
    state: dict[str, Any]
    tokenizer: str  # text of its tokenizer.json

    @property
    def config(self) -> dict[str, Any]:
        return self.state["config"]

    @property
    def step(self) -> int:
        return self.state["step"]

    def model(self) -> dict[str, torch.Tensor]:
        return load_file(self.path / MODEL)

    def training(self) -> dict[str, torch.Tensor]:
        return load_file(self.path / TRAINING)


def read(path: Path, *, verified: bool = False) -> Stored:
    """The checkpoint at `path`, or the newest one of the run at `path`.

    Args:
        verified: its sums have been compared already; otherwise those of all but the optimizer's state are.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    path = locate(path)
    try:
        if not verified:
            storage.verify(path, (MODEL, STATE, TOKENIZER))
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        tokenizer = (path / TOKENIZER).read_text(encoding="utf-8")
    except (DamagedError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable checkpoint: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ConfigError(f"{path}: not a checkpoint of this program, or of a version whose format is not {FORMAT}.")
    return Stored(path, state, tokenizer)


def locate(path: Path) -> Path:
    """`path` if it is a checkpoint, or the newest checkpoint of the run at `path`.

    Raises:
        ConfigError: it is neither.
    """
    if (path / storage.SUMS).is_file() or (path / STATE).is_file():
        return path.resolve()  # where the links last and best point to
    if kept := storage.kept(path):
        return kept[0].resolve()
    if path.is_dir():
        raise ConfigError(f"{path}: no checkpoints in this folder; the run has not reached its first one.")
    if path.is_file():
        raise ConfigError(f"{path} is a file. A checkpoint is a folder: give a run's, runs/NAME, or one in its checkpoints/.")
    if path.is_symlink():
        raise ConfigError(
            f"{path} points to {path.readlink()}, which is gone. Give the run, {path.parent}, for its newest checkpoint."
        )
    raise ConfigError(f"{path}: no such file or folder.{runs_beside(path)}")


def runs_beside(path: Path) -> str:
    """A sentence with the latest runs in the folder that `path` would be in, behind a space; empty if there are none."""
    near = sorted(folder.parent.name for folder in path.parent.glob(f"*/{storage.FOLDER}"))[-3:]
    return f" Latest runs beside it: {', '.join(near)}." if near else ""


def load_weights(model: torch.nn.Module, stored: Stored) -> None:
    """Raises ConfigError: names or shapes differ."""
    try:
        own = model.state_dict()
        model.load_state_dict({name: placed(value, like=own.get(name, value)) for name, value in stored.model().items()})
    except RuntimeError as error:
        raise ConfigError(f"the weights of {relative(stored.path)} do not fit this model: {error}") from error


def to_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in host memory. The copies from a GPU run side by side, through pinned memory, and are waited for once."""
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


def _write_text(file: Sink, text: str) -> None:
    file.write(text.encode())
