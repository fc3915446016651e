"""Who takes part in benchmarks.train_step: our step in several configurations, and nanoGPT's, all from the same weights.

nanoGPT's model is imported from the model.py of a checkout that the user names, and never copied. Its public interface is used:
GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, dropout, bias), GPT(config)(idx, targets) -> (logits, loss), and
configure_optimizers(weight_decay, learning_rate, betas, device_type).
"""

import argparse
import copy
import hashlib
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import configs
from configs import Config, ConfigError
from configs.schema import NormImpl
from measure.timing import allocated_gb, describe
from model import GPT
from training import export
from training.checkpoint import TrainState
from training.precision import Precision
from training.step import adamw, compile_model, learning_rate, set_learning_rate, to_device, training_step

Step = Callable[[tuple[Tensor, Tensor], int], Tensor]  # of a batch and its number; returns the loss, on the device
EAGER, COMPILED = "eager", "compiled"
OURS, TORCH_NORMS, NANOGPT = "ours", "ours, torch norms", "nanoGPT"
SIZES = {
    "gpt2": ["model=gpt2", "model.vocab_size=50304", "train.batch_size=32"],
    "tiny": ["model=tiny", "model.vocab_size=2048"],  # the default run's
}
# What contenders can't differ in: the batches, the protocol, and what would make them another experiment.
SHARED = (
    "train.batch_size",
    "train.precision",
    "model.context",
    "model.vocab_size",
    "model.dropout",
    "seed",
    "device",
    "ablate",
)


@dataclass
class Contender:
    """What takes a training step; built with weights of its own."""

    name: str
    step: Step
    model: nn.Module
    resident_gb: float  # GiB that it holds between steps; 0 but on CUDA


def config_of(options: argparse.Namespace, dropout: float, overrides: Sequence[str] = ()) -> Config:
    """Raises ConfigError: a key, a value or a combination that can't be used."""
    if any(text.startswith("train.compile=") for text in (*options.common, *overrides)):
        raise ConfigError("train.compile: contenders are compiled or not by --mode. Leave it out.")
    # As the compiled cells will have it; cells of both kinds share a config, which must be able to run as either.
    compiled = str(COMPILED in options.mode).lower()
    own = [f"device={options.device}", f"model.dropout={dropout}", f"train.compile={compiled}"]
    return configs.load([*SIZES[options.size], *options.common, *own, *overrides])


def lineup(options: argparse.Namespace, dropout: float) -> dict[str, Config]:
    """Our contenders by name. Raises ConfigError."""
    found = {OURS: config_of(options, dropout), TORCH_NORMS: config_of(options, dropout, ["norm.impl=torch"])}
    for overrides in options.ours:
        found[f"{OURS}, {' '.join(overrides)}"] = config_of(options, dropout, overrides)
    for name, cfg in found.items():
        for key in SHARED:
            if attrgetter(key)(cfg) != attrgetter(key)(found[OURS]):
                raise ConfigError(
                    f"--ours {name.removeprefix(f'{OURS}, ')}: {key} is the same for all contenders. "
                    "Give it by --common; the dropout by --dropout."
                )
    return found


def check_models(module: ModuleType, found: dict[str, Config]) -> None:
    """Checks that each of our contenders is nanoGPT's model. Raises PeerError."""
    checked: list[dict[str, Any]] = []
    for name, cfg in found.items():
        plain = configs.to_dict(cfg)
        what = {"model": plain["model"], "norm": {**plain["norm"], "impl": None}}
        if what in checked:
            continue
        try:
            off = check_same_model(module, cfg)
        except PeerError as error:
            raise PeerError(f"{name}: {error}") from error
        print(f"{name} and nanoGPT compute the same: loss and gradients in fp64 agree to {off:.0e}", file=sys.stderr)
        checked.append(what)


def built(
    found: dict[str, Config], module: ModuleType | None, precision: Precision, mode: str
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders of a cell with the same weights, none of which has taken a step; and why others could not be built."""
    contenders, errors = {}, {}
    first: GPT | None = None  # nanoGPT's model gets its weights

    def ours(cfg: Config) -> tuple[nn.Module, Step]:
        nonlocal first
        model, step = our_step(cfg, precision, compiled=mode == COMPILED)
        first = first or model
        return model, step

    def theirs() -> tuple[nn.Module, Step]:
        assert module is not None and first is not None, "none of ours could be built, and nanoGPT gets the weights of one"
        return nanogpt_step(module, found[OURS], precision, first, compiled=mode == COMPILED)

    builders: dict[str, Callable[[], tuple[nn.Module, Step]]] = {name: partial(ours, cfg) for name, cfg in found.items()}
    if module is not None:
        builders[NANOGPT] = theirs
    for name, build in builders.items():
        before = allocated_gb(precision.device)
        try:
            model, step = build()
        except Exception as error:  # a contender's failure is a result
            errors[name] = describe(error)
        else:
            contenders[name] = Contender(name, step, model, allocated_gb(precision.device) - before)
    return contenders, errors


def fresh_model(cfg: Config, device: torch.device) -> GPT:
    """Our model with weights that depend on cfg.seed and cfg.model alone. They are drawn on the device, which takes no time."""
    assert cfg.model.vocab_size is not None  # set by the benchmark
    torch.manual_seed(cfg.seed)
    with device:
        model = GPT(cfg.model, cfg.norm, cfg.model.vocab_size, cfg.loss)
    model.recompute = cfg.train.recompute
    return model


def our_step(cfg: Config, precision: Precision, *, compiled: bool) -> tuple[GPT, Step]:
    model = fresh_model(cfg, precision.device)
    cfg = copy.deepcopy(cfg)
    cfg.train.compile = compiled
    state = TrainState(model, adamw(model, cfg.optim), precision.scaler(), tokenizer="")
    forward: Callable[..., Tensor] = compile_model(model, cfg.train) if compiled else model

    def step(batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        return training_step(forward, state, batch, number, cfg, precision)[0]

    return model, step


def token_stream(cfg: Config) -> np.ndarray:
    """Random tokens, the frequent ones as frequent as words are (Mandelbrot's law): the gradient of the embedding takes longer
    where rows repeat."""
    assert cfg.model.vocab_size is not None
    weights = 1 / (np.arange(cfg.model.vocab_size) + 2.7)
    count = 64 * cfg.train.batch_size * cfg.model.context + 1  # then they come again in another order
    return np.random.default_rng(cfg.seed).choice(cfg.model.vocab_size, size=count, p=weights / weights.sum())


# ---- nanoGPT's model --------------------------------------------------------------------------------------------------------


MODULE = "nanogpt_model"  # its name here; `model` is ours
INTERFACE = ("GPT", "GPTConfig")
# In fp64 rounding is 1e-16 an operation; what two different models compute differs by far more than this.
SAME = 1e-9


class PeerError(ValueError):
    """The checkout has no such model, or one that computes something else."""


def load_nanogpt(path: Path) -> ModuleType:
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


def build_peer(module: ModuleType, cfg: Config) -> nn.Module:
    """nanoGPT's model in our sizes, on the CPU, with its own weights.

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
        raise PeerError(
            f"nanoGPT's model and ours differ: from the same weights in fp64, losses are {its_loss.item():.9f} and "
            f"{loss.item():.9f}, and the {worst} is off by {off[worst]:.1e} of its size; rounding gives less than {SAME:g}. "
            "Models that compute different things are not timed against each other."
        )
    return off[worst]


def nanogpt_step(module: ModuleType, cfg: Config, precision: Precision, ours: GPT, *, compiled: bool) -> tuple[nn.Module, Step]:
    """nanoGPT's model with the weights of `ours`, whose sizes it has, and its step in the order of its train.py."""
    model = build_peer(module, cfg)
    model.to(precision.device)
    copy_weights(ours, model, cfg)
    optim, pieces, scaler = cfg.optim, cfg.train.accumulation, precision.scaler()
    with redirect_stdout(io.StringIO()):  # it prints its parameter groups
        optimizer = model.configure_optimizers(  # type: ignore[operator]
            optim.weight_decay, optim.lr, (optim.beta1, optim.beta2), precision.device.type
        )
    forward = torch.compile(model) if compiled else model

    def step(batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        inputs, targets = (to_device(part, precision.device).chunk(pieces) for part in batch)
        set_learning_rate(optimizer, learning_rate(number, cfg.train.steps, optim))
        total = torch.zeros((), device=precision.device)
        for x, y in zip(inputs, targets, strict=True):
            with precision.autocast():
                _, loss = forward(x, y)
                loss = loss / pieces
            scaler.scale(loss).backward()
            total += loss.detach()
        if optim.clip_norm:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return total

    return model, step
