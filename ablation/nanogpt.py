"""nanoGPT's training step as one more arm.

Its model is imported from the model.py of a checkout that the user names, and never copied. Its public interface is used:
GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, dropout, bias), GPT(config)(idx, targets) -> (logits, loss), and
configure_optimizers(weight_decay, learning_rate, betas, device_type).
"""

import copy
import importlib.util
import io
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablation.arms import Arm, Mark
from configs import Config, ConfigError
from configs.rules import NANOGPT
from configs.schema import NormImpl
from model import GPT
from train import learning_rate
from training import export
from training.checkpoint import TrainState
from training.step import to_device

MODULE = "nanogpt_model"  # its name here; `model` is ours
# In fp64 rounding is 1e-16 an operation; what two different models compute differs by far more than this.
SAME = 1e-9


def load(path: Path) -> ModuleType:
    """The module model.py of a checkout.

    Args:
        path: the checkout's folder, or the file.

    Raises:
        ConfigError: no such file, one that can't be imported, or one without GPT and GPTConfig.
    """
    file = path / "model.py" if path.is_dir() else path
    spec = importlib.util.spec_from_file_location(MODULE, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"ablate.nanogpt={path}: {file} is no Python module. Name the folder of a nanoGPT checkout.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # where its dataclass looks its annotations up
    try:
        spec.loader.exec_module(module)
        _ = module.GPT, module.GPTConfig
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"ablate.nanogpt={path}: {why}. Name the folder of a nanoGPT checkout.") from error
    return module


def build_peer(module: ModuleType, cfg: Config) -> nn.Module:
    """nanoGPT's model in our sizes, on the CPU, with its own weights.

    Raises:
        ConfigError: it has other parameters than ours of this config.
    """
    m = cfg.model
    assert m.vocab_size is not None  # see `sized`
    sizes = {"block_size": m.context, "vocab_size": m.vocab_size, "n_layer": m.layers, "n_head": m.heads, "n_embd": m.width}
    with redirect_stdout(io.StringIO()):  # it tells its size
        peer = module.GPT(module.GPTConfig(**sizes, dropout=m.dropout, bias=m.bias))
    with torch.device("meta"):
        ours = GPT(m, cfg.norm, m.vocab_size)
    shapes = {name: tuple(p.shape) for name, p in ours.named_parameters()}
    if wrong := export.unsupported(export.GPT2, cfg):
        raise ConfigError(f"ours is not nanoGPT's architecture: {' '.join(wrong)} Leave these keys out, or ablate.nanogpt.")
    wanted = {theirs: shapes.pop(mine) for mine, theirs in _names(cfg) if mine in shapes} | shapes
    found = {name: tuple(p.shape) for name, p in peer.named_parameters()}
    if differing := sorted(set(wanted.items()) ^ set(found.items())):
        words = "; ".join(f"{name} {shape}" for name, shape in differing[:4])
        raise ConfigError(f"nanoGPT's parameters are not those of ours: only one of the two has {words}")
    return peer


@torch.no_grad()
def copy_weights(ours: GPT, peer: nn.Module, cfg: Config) -> None:
    """Copies our weights into nanoGPT's parameters. They have the names of GPT-2 on the Hub and our layout."""
    mine, theirs = dict(ours.named_parameters()), dict(peer.named_parameters())
    for name, its in _names(cfg):
        if name in mine:
            theirs[its].copy_(mine[name])


def _names(cfg: Config) -> Iterator[tuple[str, str]]:
    assert cfg.model.vocab_size is not None
    for entry in export.entries(export.GPT2, cfg.model, cfg.model.vocab_size):
        yield entry.ours, entry.theirs[0]


def check_same_model(module: ModuleType, cfg: Config, seed: int = 0) -> float:
    """Checks that both compute the same from the same weights: mean loss and its gradient in fp64, without dropout.

    The weights are drawn wide, biases and norms too: at the initial ones a model hardly tells whether it has a bias, and its
    loss is that of a uniform guess. Our norms are PyTorch's here, since kernels have no fp64; parity is about the fused ones.

    nanoGPT's newer versions have the exact GELU, ours is GPT-2's tanh approximation. They differ by 5e-4 at most and take the
    same time; for this check, and only for it, theirs is set to ours.

    Returns:
        The relative difference of the losses, or of the gradients where that is larger.

    Raises:
        ConfigError: a difference beyond rounding.
    """
    cfg = copy.deepcopy(cfg)
    cfg.norm.impl, cfg.model.dropout, cfg.model.attention_dropout, cfg.model.drop_path = NormImpl.torch, 0.0, None, 0.0
    peer = build_peer(module, cfg).double()
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
        raise ConfigError(
            f"nanoGPT's model and ours differ: from the same weights in fp64, losses are {its_loss.item():.9f} and "
            f"{loss.item():.9f}, and the {worst} is off by {off[worst]:.1e} of its size; rounding gives less than {SAME:g}. "
            "Models that compute different things are not timed against each other."
        )
    return off[worst]


def nanogpt_arm(module: ModuleType, like: Arm, *, compiled: bool) -> Arm:
    """nanoGPT's model with the weights of `like`, a fresh arm of ours, and its step in the order of its train.py.

    Raises:
        ConfigError: it has other parameters than ours.
    """
    assert isinstance(like.state.model, GPT)
    cfg, precision = sized(like.cfg, like.state.model.vocab_size), like.precision
    model = build_peer(module, cfg).to(precision.device)
    copy_weights(like.state.model, model, cfg)
    optim, pieces, scaler = cfg.optim, cfg.train.accumulation, precision.scaler()
    with redirect_stdout(io.StringIO()):  # it prints its parameter groups
        optimizer = model.configure_optimizers(  # type: ignore[operator]
            optim.weight_decay, optim.lr, (optim.beta1, optim.beta2), precision.device.type
        )
    forward = torch.compile(model) if compiled else model

    def step(batch: tuple[Tensor, Tensor], number: int, mark: Mark) -> Tensor:
        inputs, targets = (to_device(part, precision.device).chunk(pieces) for part in batch)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, cfg.train.steps, optim)
        total = torch.zeros((), device=precision.device)
        for x, y in zip(inputs, targets, strict=True):
            with precision.autocast():
                _, loss = forward(x, y)
                loss = loss / pieces
            mark("forward")
            scaler.scale(loss).backward()
            total += loss.detach()
            mark("backward")
        if optim.clip_norm:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        mark("optimizer")
        return total

    state = TrainState(model, optimizer, scaler, tokenizer="")  # type: ignore[arg-type]  # its model is not ours
    return Arm(NANOGPT, cfg, precision, state, forward, step)


def sized(cfg: Config, vocab_size: int) -> Config:
    """A copy of cfg that names the size of the embedding."""
    cfg = copy.deepcopy(cfg)
    cfg.model.vocab_size = vocab_size
    return cfg
