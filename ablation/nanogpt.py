"""nanoGPT's training step as one more arm.

Its model is imported from the model.py of a checkout that the user names, and never copied. Its public interface is used:
GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, dropout, bias), GPT(config)(idx, targets) -> (logits, loss), and
configure_optimizers(weight_decay, learning_rate, betas, device_type).
"""

import copy
import math
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablation.arms import Arm
from ablation.config import NANOGPT
from configs import Config, ConfigError
from configs.schema import NormImpl
from model import GPT
from training import export
from training.checkpoint import TrainState
from training.schedule import learning_rate

MODULE = "nanogpt_model"  # its name here; `model` is ours
# In fp64 rounding is 1e-16 an operation; what two different models compute differs by far more than this.
SAME = 1e-9


def load(path: str | None) -> ModuleType:
    """The module model.py of a checkout: its folder, or the file.

    Raises:
        ConfigError: no such file, one that can't be imported, or one without GPT and GPTConfig.
    """
    try:
        file = Path(path or "")
        file = file / "model.py" if file.is_dir() else file
        module = ModuleType(MODULE)
        sys.modules[MODULE] = module  # where its dataclass looks its annotations up
        SourceFileLoader(MODULE, str(file)).exec_module(module)
        _ = module.GPT, module.GPTConfig
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"ablate.nanogpt={path}: {why}. Name the folder of a nanoGPT checkout.") from error
    return module


def build_peer(module: ModuleType, ours: GPT, cfg: Config) -> nn.Module:
    """nanoGPT's model in the sizes of ours, on the CPU, with our weights.

    Raises:
        ConfigError: it has other parameters.
    """
    m = cfg.model
    sizes = {"block_size": m.context, "vocab_size": ours.vocab_size, "n_layer": m.layers, "n_head": m.heads, "n_embd": m.width}
    peer: nn.Module = module.GPT(module.GPTConfig(**sizes, dropout=m.dropout, bias=m.bias))
    with torch.no_grad():
        for mine, theirs in paired(ours, peer, cfg):
            theirs.copy_(mine)
    return peer


def paired(ours: GPT, peer: nn.Module, cfg: Config) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Each parameter of ours with that of nanoGPT. Theirs have the names of GPT-2 on the Hub and our layout."""
    names = {entry.ours: entry.theirs[0] for entry in export.entries(export.GPT2, cfg.model, ours.vocab_size)}
    wanted = {names.get(name, name): parameter for name, parameter in ours.named_parameters()}
    found = dict(peer.named_parameters())
    shapes = ({(name, tuple(p.shape)) for name, p in of.items()} for of in (wanted, found))
    if differing := sorted(set.symmetric_difference(*shapes)):
        words = "; ".join(f"{name} {shape}" for name, shape in differing[:4])
        raise ConfigError(f"nanoGPT's parameters are not those of ours: only one of the two has {words}. Use model=gpt2.")
    return [(parameter, found[name]) for name, parameter in wanted.items()]


def check_same_model(module: ModuleType, cfg: Config, vocab_size: int) -> float:
    """Checks that both compute the same from the same weights: mean loss and its gradient in fp64, without dropout.

    The weights are drawn wide, biases and norms too: at the initial ones a model hardly tells whether it has a bias, and its
    loss is that of a uniform guess. Our norms are PyTorch's here, since kernels have no fp64; parity is about the fused ones.

    nanoGPT's newer versions have the exact GELU, ours is GPT-2's tanh approximation. They differ by 5e-4 at most and take the
    same time; for this check, and only for it, theirs is set to ours.

    Returns:
        The relative difference of the losses, or of a parameter's gradient where that is larger.

    Raises:
        ConfigError: a difference beyond rounding.
    """
    cfg = copy.deepcopy(cfg)
    cfg.norm.impl, cfg.model.dropout, cfg.model.attention_dropout, cfg.model.drop_path = NormImpl.torch, 0.0, None, 0.0
    ours = GPT(cfg.model, cfg.norm, vocab_size)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    peer = build_peer(module, ours, cfg).double()
    ours.double()
    for part in peer.modules():
        if isinstance(part, nn.GELU):
            part.approximate = "tanh"
    tokens = torch.randint(ours.vocab_size, (2, min(cfg.model.context, 32) + 1), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()  # it takes views of them
    loss, its_loss = F.cross_entropy(ours(inputs).flatten(0, 1), targets.flatten()), peer(inputs, targets)[1]
    loss.backward()
    its_loss.backward()
    compared: list[tuple[Tensor | None, Tensor | None]] = [(loss.detach(), its_loss.detach())]
    compared += [(mine.grad, theirs.grad) for mine, theirs in paired(ours, peer, cfg)]
    off = max(float((a - b).norm() / a.norm()) if a is not None and b is not None else 1.0 for a, b in compared)
    if not off <= SAME:
        raise ConfigError(
            f"nanoGPT's model and ours differ: from the same weights in fp64, the loss ({its_loss.item():.9f} and "
            f"{loss.item():.9f}) or a gradient is off by {off:.1e} of its size; rounding gives less than {SAME:g}."
        )
    return off


def nanogpt_arm(like: Arm, *, compiled: bool) -> Arm:
    """nanoGPT's model with the weights of `like`, a fresh arm of ours, and its step in the order of its train.py."""
    assert isinstance(like.state.model, GPT)
    cfg, precision = like.cfg, like.precision
    model = build_peer(load(cfg.ablate.nanogpt), like.state.model, cfg).to(precision.device)
    optim, betas = cfg.optim, (cfg.optim.beta1, cfg.optim.beta2)
    optimizer = model.configure_optimizers(optim.weight_decay, optim.lr, betas, precision.device.type)  # type: ignore[operator]
    state = TrainState(model, optimizer, precision.scaler(), tokenizer="")  # type: ignore[arg-type]  # its model is not ours
    forward = torch.compile(model) if compiled else model
    return Arm(NANOGPT, cfg, precision, state, like.inputs, NanoStep(forward, state, like))


class NanoStep:
    """A step of nanoGPT, on the inputs of an arm of ours."""

    def __init__(self, forward: Callable[..., tuple[Tensor, Tensor]], state: TrainState, like: Arm) -> None:
        self._forward, self._state, self._like = forward, state, like
        self.loss = torch.tensor(math.nan)

    def __call__(self, number: int) -> None:
        state, cfg, inputs = self._state, self._like.cfg, self._like.inputs
        optimizer, scaler, pieces = state.optimizer, state.scaler, cfg.train.accumulation
        inputs.load(number)
        _, tokens, targets, *_ = inputs.read()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, cfg.train.steps, cfg.optim)
        self.loss = torch.zeros((), device=inputs.device)
        for x, y in zip(tokens.chunk(pieces), targets.chunk(pieces), strict=True):
            with self._like.precision.autocast():
                _, loss = self._forward(x, y)
                loss = loss / pieces
            scaler.scale(loss).backward()
            self.loss += loss.detach()
        if cfg.optim.clip_norm:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(state.model.parameters(), cfg.optim.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
