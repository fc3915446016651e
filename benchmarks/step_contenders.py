"""Who takes part in benchmarks.train_step: our step in several configurations, and nanoGPT's, all from the same weights."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any

from torch import Tensor, nn

import configs
from ablation import timing as protocol
from ablation.arms import Arm, build
from benchmarks import nanogpt
from benchmarks.nanogpt import Peer, PeerError
from benchmarks.timing import describe
from configs import Config, ConfigError, machine, rules
from training.precision import Precision
from training.step import training_step

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
    step: Callable[[tuple[Tensor, Tensor], int], Tensor]  # of a batch and its number; returns the loss, on the device
    model: nn.Module
    resident_gb: float  # GiB that it holds between steps; 0 but on CUDA


def config_of(options: argparse.Namespace, dropout: float, overrides: Sequence[str] = ()) -> Config:
    """Raises ConfigError: a key, a value or a combination that can't be used."""
    if any(text.startswith("train.compile=") for text in (*options.common, *overrides)):
        raise ConfigError("train.compile: contenders are compiled or not by --mode. Leave it out.")
    # As the compiled cells will have it; cells of both kinds share a config, which must be able to run as either.
    compiled = str(COMPILED in options.mode).lower()
    own = [f"device={options.device}", f"model.dropout={dropout}", f"train.compile={compiled}"]
    cfg = configs.compose_only([*SIZES[options.size], *options.common, *own, *overrides])
    rules.check(cfg, machine.inspect(cfg.device))
    return cfg


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
    """That every one of ours is nanoGPT's model. Raises PeerError."""
    checked: list[dict[str, Any]] = []
    for name, cfg in found.items():
        plain = configs.to_dict(cfg)
        what = {"model": plain["model"], "norm": {**plain["norm"], "impl": None}}
        if what in checked:
            continue
        try:
            off = nanogpt.check_same_model(module, cfg)
        except PeerError as error:
            raise PeerError(f"{name}: {error}") from error
        print(f"{name} and nanoGPT compute the same: loss and gradients in fp64 agree to {off:.0e}", file=sys.stderr)
        checked.append(what)


def built(
    found: dict[str, Config], module: ModuleType | None, precision: Precision, mode: str
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders of a cell with the same weights, none of which has taken a step; and why others could not be built."""
    contenders, errors = {}, {}
    first: Arm | None = None
    for name, cfg in found.items():
        before = protocol.allocated(precision.device)
        try:
            assert cfg.model.vocab_size is not None
            like = first if first is not None and same_parameters(first.cfg, cfg) else None
            compiled = mode == COMPILED
            arm = build(name, cfg, cfg.norm.impl, precision, cfg.model.vocab_size, compiled=compiled, like=like)
        except Exception as error:  # a contender's failure is a result
            errors[name] = describe(error)
            continue
        first = first or arm
        contenders[name] = Contender(name, ours_of(arm), arm.state.model, protocol.allocated(precision.device) - before)
    if module is not None:
        before = protocol.allocated(precision.device)
        try:
            assert first is not None, "none of ours could be built, and it has the weights of one"
            peer = Peer.create(module, found[OURS], precision, first.state.model, compiled=mode == COMPILED)
            contenders[NANOGPT] = Contender(NANOGPT, peer.step, peer.model, protocol.allocated(precision.device) - before)
        except Exception as error:
            errors[NANOGPT] = describe(error)
    return contenders, errors


def same_parameters(one: Config, other: Config) -> bool:
    """Whether weights of one fit the other as they are."""
    return configs.to_dict(one)["model"] == configs.to_dict(other)["model"] and one.norm.kind == other.norm.kind


def ours_of(arm: Arm) -> Callable[[tuple[Tensor, Tensor], int], Tensor]:
    def step(batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        return training_step(arm.forward, arm.state, batch, number, arm.cfg, arm.precision)[0]

    return step
