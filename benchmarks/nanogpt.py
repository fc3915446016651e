"""nanoGPT's model, read from a checkout that the user names: imported from its model.py, never copied.

What is used of it is its public interface: GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, dropout, bias),
GPT(config)(idx, targets) -> (logits, loss), and configure_optimizers(weight_decay, learning_rate, betas, device_type).
"""

import copy
import hashlib
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs import Config
from configs.schema import NormImpl
from model import GPT
from training import export
from training.precision import Precision
from training.step import learning_rate, set_learning_rate, to_device

MODULE = "nanogpt_model"  # its name here; `model` is ours
INTERFACE = ("GPT", "GPTConfig")
# In fp64 rounding is 1e-16 an operation; what two different models compute differs by far more than this.
SAME = 1e-9


class PeerError(ValueError):
    """The checkout has no such model, or one that computes something else."""


def load(path: Path) -> ModuleType:
    """The module model.py of a checkout.

    Args:
        path: the checkout's folder, or the file.

    Raises:
        PeerError: no such file, one that can't be imported, or one without GPT and GPTConfig.
    """
    file = path / "model.py" if path.is_dir() else path
    if not file.is_file():
        raise PeerError(f"--nanogpt {path}: there is no {file}. Name the folder of a nanoGPT checkout.")
    spec = importlib.util.spec_from_file_location(MODULE, file)
    if spec is None or spec.loader is None:
        raise PeerError(f"--nanogpt {path}: {file} is no Python module. Name the folder of a nanoGPT checkout.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # where its dataclass looks its annotations up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise PeerError(f"--nanogpt {path}: {file} can't be imported: {type(error).__name__}: {error}") from error
    if missing := [name for name in INTERFACE if not hasattr(module, name)]:
        raise PeerError(f"--nanogpt {path}: {file} has no {' and no '.join(missing)}. Name the folder of a nanoGPT checkout.")
    return module


def fingerprint(module: ModuleType) -> str:
    """The first digits of the SHA-256 of its file: which of its many versions was measured."""
    assert module.__file__ is not None
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()[:12]


def build(module: ModuleType, cfg: Config) -> nn.Module:
    """Its model in the sizes of ours, on the CPU with weights of its own.

    Raises:
        PeerError: it has other parameters than ours of this config.
    """
    m = cfg.model
    assert m.vocab_size is not None  # set by the benchmark
    sizes = {"block_size": m.context, "vocab_size": m.vocab_size, "n_layer": m.layers, "n_head": m.heads, "n_embd": m.width}
    with redirect_stdout(io.StringIO()):  # it tells its size
        peer = module.GPT(module.GPTConfig(**sizes, dropout=m.dropout, bias=m.bias))
    with torch.device("meta"):
        ours = GPT(m, cfg.norm, m.vocab_size)
    shapes = {name: tuple(p.shape) for name, p in ours.named_parameters()}
    if wrong := export.unsupported(export.GPT2, m, cfg.norm):
        raise PeerError(f"ours is not nanoGPT's architecture: {'; '.join(wrong)}. Leave these overrides out, or --nanogpt.")
    wanted = {theirs: shapes.pop(mine) for mine, theirs in _names(cfg) if mine in shapes}
    found = {name: tuple(p.shape) for name, p in peer.named_parameters()}
    differing = [f"{name}: {wanted.get(name)} wanted, {found.get(name)} found" for name in sorted(wanted.keys() ^ found.keys())]
    differing += [
        f"{name}: {wanted[name]} wanted, {found[name]} found"
        for name in wanted
        if found.get(name, wanted[name]) != wanted[name]
    ]
    differing += [f"{name}: only ours" for name in shapes]
    if differing:
        raise PeerError(f"nanoGPT's parameters are not those of ours: {'; '.join(differing[:4])}{'; …' * (len(differing) > 4)}")
    return peer


@torch.no_grad()
def copy_weights(ours: GPT, peer: nn.Module, cfg: Config) -> None:
    """Our weights into its parameters. Its names are those of GPT-2 on the Hub, its matrices lie as ours."""
    mine, theirs = dict(ours.named_parameters()), dict(peer.named_parameters())
    for name, its in _names(cfg):
        if name in mine:
            theirs[its].copy_(mine[name])


def _names(cfg: Config) -> Iterator[tuple[str, str]]:
    assert cfg.model.vocab_size is not None
    for entry in export.entries(export.GPT2, cfg.model, cfg.model.vocab_size):
        yield entry.ours, entry.theirs[0]


def check_same_model(module: ModuleType, cfg: Config, seed: int = 0) -> float:
    """That both compute the same from the same weights: mean loss and its gradient in fp64, without dropout.

    The weights are drawn wide, biases and norms too: at the initial ones a model hardly tells whether it has a bias, and its
    loss is that of a uniform guess. Our norms are PyTorch's here, since kernels have no fp64; that the fused ones agree with
    these is what `ablate.py` and the tests show, and `benchmarks.train_step` compares the losses of the steps that it times.

    nanoGPT's newer versions have the exact GELU, ours is GPT-2's tanh approximation. They differ by 5e-4 at most and take the
    same time; for this check, and only for it, theirs is set to ours.

    Returns:
        The relative difference of the losses, or of the gradients where that is larger.

    Raises:
        PeerError: a difference beyond rounding.
    """
    cfg = copy.deepcopy(cfg)
    cfg.norm.impl, cfg.model.dropout, cfg.model.attention_dropout, cfg.model.drop_path = NormImpl.torch, 0.0, None, 0.0
    peer = build(module, cfg).double()
    vocabulary = cfg.model.vocab_size
    assert vocabulary is not None
    ours = GPT(cfg.model, cfg.norm, vocabulary).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.1)
    copy_weights(ours, peer, cfg)
    for part in peer.modules():
        if isinstance(part, nn.GELU):
            part.approximate = "tanh"
    tokens = torch.randint(vocabulary, (2, min(cfg.model.context, 32) + 1), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()  # it takes views of them
    loss = F.cross_entropy(ours(inputs).flatten(0, 1), targets.flatten())
    its_loss = peer(inputs, targets)[1]
    loss.backward()
    its_loss.backward()
    off = {"loss": float((loss - its_loss).detach().abs() / loss.detach())}
    mine, theirs = dict(ours.named_parameters()), dict(peer.named_parameters())
    for name, its in _names(cfg):
        if name in mine:
            g, h = mine[name].grad, theirs[its].grad
            assert g is not None
            off[f"gradient of {name}"] = float((g - h).norm() / g.norm()) if h is not None else 1.0
    worst = max(off, key=off.__getitem__)
    if not off[worst] <= SAME:
        raise PeerError(
            f"nanoGPT's model and ours differ: from the same weights in fp64, losses are {its_loss.item():.9f} and "
            f"{loss.item():.9f}, and the {worst} is off by {off[worst]:.1e} of its size; rounding gives less than {SAME:g}. "
            "Models that compute different things are not timed against each other."
        )
    return off[worst]


@dataclass
class Peer:
    """nanoGPT's model with its optimizer, ready for steps as its train.py takes them."""

    cfg: Config
    precision: Precision
    model: nn.Module
    forward: Callable[..., Any]  # the model, or what torch.compile made of it
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    @classmethod
    def create(cls, module: ModuleType, cfg: Config, precision: Precision, ours: GPT, *, compiled: bool) -> "Peer":
        """With the weights of `ours`, whose sizes it has."""
        model = build(module, cfg)
        model.to(precision.device)
        copy_weights(ours, model, cfg)
        optim = cfg.optim
        with redirect_stdout(io.StringIO()):  # it tells its groups
            optimizer = model.configure_optimizers(  # type: ignore[operator]
                optim.weight_decay, optim.lr, (optim.beta1, optim.beta2), precision.device.type
            )
        forward = torch.compile(model) if compiled else model
        return cls(cfg, precision, model, forward, optimizer, precision.scaler())

    def step(self, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
        """One update, in the order of its train.py. The loss stays on the device."""
        pieces = self.cfg.train.accumulation
        inputs, targets = (to_device(part, self.precision.device).chunk(pieces) for part in batch)
        set_learning_rate(self.optimizer, learning_rate(step, self.cfg.train.steps, self.cfg.optim))
        total = torch.zeros((), device=self.precision.device)
        for x, y in zip(inputs, targets, strict=True):
            with self.precision.autocast():
                _, loss = self.forward(x, y)
                loss = loss / pieces
            self.scaler.scale(loss).backward()
            total += loss.detach()
        if self.cfg.optim.clip_norm:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.optim.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total
