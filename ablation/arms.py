"""Arms: one training run with another operator at its norm sites, everything else the same, and a check that it is."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from configs import Config
from configs.schema import DropoutMasks, NormImpl
from model import GPT
from training.checkpoint import TrainState
from training.optimizer import adamw
from training.precision import Precision


@dataclass
class Arm:
    """A model with its optimizer, ready for `training.step.training_step`."""

    name: str
    cfg: Config
    precision: Precision
    state: TrainState
    forward: Callable[..., Tensor]  # the model, or what torch.compile made of it


def build(
    name: str,
    cfg: Config,
    impl: NormImpl,
    precision: Precision,
    vocab_size: int,
    *,
    compiled: bool = False,
    masks: DropoutMasks | None = None,
) -> Arm:
    """A fresh arm: initial weights are a function of cfg.seed and cfg.model alone.

    Args:
        impl: what runs at the norm sites.
        masks: where dropout masks come from; None: as cfg says.

    Raises:
        ValueError: options of the model that do not fit together.
    """
    cfg = copy.deepcopy(cfg)
    cfg.norm = replace(cfg.norm, impl=impl, dropout_masks=masks or cfg.norm.dropout_masks)
    cfg.train = replace(cfg.train, compile=compiled)
    torch.manual_seed(cfg.seed)
    model = GPT(cfg.model, cfg.norm, vocab_size).to(precision.device)
    state = TrainState(model, adamw(model, cfg.optim), precision.scaler(), tokenizer="")
    forward: Callable[..., Tensor] = torch.compile(model, fullgraph=True) if compiled else model
    return Arm(name, cfg, precision, state, forward)


def check_same(arms: Sequence[Arm]) -> None:
    """That the arms differ in what runs at their norm sites and in nothing else: modules, parameters, initial values, groups.

    Raises:
        AssertionError: they don't, which is a mistake of ours and would make every figure worthless.
    """
    first, *others = arms
    for other in others:
        pair = f"{first.name} and {other.name}"
        modules, theirs = ([(name, type(m)) for name, m in arm.state.model.named_modules()] for arm in (first, other))
        assert modules == theirs, f"{pair} have different modules"
        mine, yours = (dict(arm.state.model.named_parameters()) for arm in (first, other))
        assert mine.keys() == yours.keys(), f"{pair} have different parameters"
        for name, parameter in mine.items():
            assert parameter.dtype == yours[name].dtype and torch.equal(parameter, yours[name]), f"{pair}: {name} differs"
        assert _groups(first) == _groups(other), f"{pair} have different optimizer groups"


def _groups(arm: Arm) -> list[tuple[list[str], dict]]:
    names = {id(parameter): name for name, parameter in arm.state.model.named_parameters()}
    return [
        ([names[id(p)] for p in group["params"]], {key: value for key, value in group.items() if key != "params"})
        for group in arm.state.optimizer.param_groups
    ]


class Snapshot:
    """Weights and optimizer state of an arm, to be put into it or another one in place: what compiled code points to stays."""

    def __init__(self, arm: Arm) -> None:
        self._kept = [tensor.detach().clone() for tensor in _tensors(arm)]

    @torch.no_grad()
    def restore(self, arm: Arm) -> None:
        for live, kept in zip(_tensors(arm), self._kept, strict=True):
            live.copy_(kept)

    @staticmethod
    def bytes_of(arm: Arm) -> int:
        return sum(tensor.nbytes for tensor in _tensors(arm))


def _tensors(arm: Arm) -> list[Tensor]:
    """In an order that arms share; AdamW has no state before its first step."""
    parameters = [p for group in arm.state.optimizer.param_groups for p in group["params"]]
    state = arm.state.optimizer.state
    return [*parameters, *(value for p in parameters for value in state[p].values() if isinstance(value, Tensor))]
