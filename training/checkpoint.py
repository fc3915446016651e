"""Checkpoints: written whole or not at all, read without running code."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs import Config, ConfigError, to_dict
from model import GPT

FORMAT = 1


@dataclass
class TrainState:
    """What changes while training. Batches, dropout seeds and learning rates are functions of `step` and need no state."""

    model: GPT  # not the compiled one: its parameter names carry a prefix
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    tokenizer: str  # fingerprint of the run's tokenizer.json: what the model's token ids mean
    step: int = 0  # optimizer steps done

    def save(self, path: Path, cfg: Config) -> None:
        """Everything that resuming needs. Sampling, and copying weights into another model, need the first rows."""
        content = {
            "format": FORMAT,
            "config": to_dict(cfg),
            "model": self.model.state_dict(),
            "tokenizer": self.tokenizer,
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        write(path, content)

    def restore(self, stored: dict[str, Any]) -> None:
        """Goes on from a checkpoint. Weight decay, betas and eps stay those of this run's config, which may differ.

        Raises:
            ConfigError: the stored weights belong to a model of another shape or to another tokenizer, or there is no
                optimizer state.
        """
        if "optimizer" not in stored:
            raise ConfigError("resume: this checkpoint holds weights only. Resume from last.pt.")
        if stored.get("tokenizer") != self.tokenizer:
            raise ConfigError(
                "resume: the checkpoint was trained with another tokenizer, so its token ids mean other text. "
                "Use the tokenizer.* and data.* of that run."
            )
        load_weights(self.model, stored)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": stored["optimizer"]["state"], "param_groups": groups})
        if stored["scaler"]:  # empty unless the run was in fp16
            self.scaler.load_state_dict(stored["scaler"])
        self.step = stored["step"]


def fingerprint(tokenizer: Path) -> str:
    """Of a tokenizer.json: equal for equal ids."""
    return hashlib.sha256(tokenizer.read_text(encoding="utf-8").encode()).hexdigest()


def load_weights(model: torch.nn.Module, stored: dict[str, Any]) -> None:
    """Raises ConfigError: names or shapes differ."""
    try:
        model.load_state_dict(stored["model"])
    except RuntimeError as error:
        raise ConfigError(f"the checkpoint's weights do not fit this model: {error}") from error


def write(path: Path, content: dict[str, Any]) -> None:
    """Replaces `path` in one step: a crash at any moment leaves the old file or the new one, whole."""
    # On the same file system, or the replacement would be a copy. A run owns its folder, so the name is free: what a killed
    # write left under it is written over.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())  # the bytes are on the disk before the name points to them
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # where a folder can be opened: the new name is on the disk too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """The content of a checkpoint file, or of last.pt in a run folder, on the CPU.

    Args:
        mmap: leave the tensors on disk until they are used; for a look at the small parts.

    Raises:
        ConfigError: there is none, or it can't be read.
    """
    path = locate(path)
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        raise ConfigError(f"{path}: not a readable checkpoint ({type(error).__name__}: {error})") from error
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise ConfigError(f"{path}: not a checkpoint of this program, or of a version whose format is not {FORMAT}.")
    return stored


def locate(path: Path) -> Path:
    """`path`, or last.pt in it. Raises ConfigError: neither is a file."""
    if path.is_dir() and (path / "last.pt").is_file():
        return path / "last.pt"
    if path.is_dir():
        raise ConfigError(f"{path}: no last.pt in this folder; the run has not reached its first checkpoint.")
    if not path.is_file():
        near = sorted(folder.parent.name for folder in path.parent.glob("*/last.pt"))[-3:]
        hint = f" Latest runs beside it: {', '.join(near)}." if near else ""
        raise ConfigError(f"{path}: no such file or folder.{hint}")
    return path
