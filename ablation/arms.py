"""Arms: one training run with another operator at its norm sites, everything else the same."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ablation.config import Config
from configs.schema import DropoutMasks
from data import Batches, Tokenizer
from measure.comparison import TWIN
from model import GPT
from training import export
from training.build import build, copy_values
from training.checkpoint import TrainState
from training.inputs import Inputs
from training.precision import MixedPrecision
from training.step import TrainingStep


class Step(Protocol):
    """A TrainingStep, or the step of another project."""

    loss: Tensor  # of the last step, on the device, until the next one overwrites it

    def __call__(self, number: int) -> None: ...


@dataclass
class Arm:
    """A model with its optimizer, ready for training steps."""

    name: str
    cfg: Config
    precision: MixedPrecision
    state: TrainState
    inputs: Inputs
    step: Step

    @property
    def update(self) -> TrainingStep:
        """The step of an arm of ours."""
        assert isinstance(self.step, TrainingStep)
        return self.step

    @property
    def other(self) -> bool:
        """Whether the arm is another project's."""
        return not isinstance(self.step, TrainingStep)


def switched(cfg: Config, arm: str) -> Config:
    """A copy of cfg for an arm: with the implementation that it is named after."""
    cfg = copy.deepcopy(cfg)
    switch = cfg.ablate.switch
    getattr(cfg, switch).impl = switch.impls(arm.removesuffix(TWIN))
    return cfg


def build_arm(
    name: str,
    cfg: Config,
    precision: MixedPrecision,
    tokenizer: Tokenizer,
    batches: Batches,
    *,
    value: str | None = None,
    compiled: bool = False,
    graph: bool = False,
    masks: DropoutMasks | None = None,
    like: Arm | None = None,
) -> Arm:
    """A fresh arm. Its initial weights depend on cfg.seed and cfg.model alone, or are those of cfg.init_from.

    Args:
        batches: what it trains on.
        value: the implementation, if it is not the arm's name.
        graph: make its step one CUDA graph.
        masks: where dropout masks come from; None: as cfg says.
        like: a fresh arm of this seed and model, whose initial values are copied, as drawing those of GPT-2 takes a CPU
            seconds. On one device both read the same inputs.

    Raises:
        ConfigError: options of the model that do not fit together, or weights of another model.
    """
    cfg = switched(cfg, value or name)
    cfg.norm.dropout_masks = masks or cfg.norm.dropout_masks
    cfg.train.compile = compiled

    def fill(model: GPT) -> None:
        if like is not None:
            copy_values(like.state.model, model)
        elif cfg.init_from:
            export.load(model, cfg.init_from, tokenizer)

    _, state, forward = build(cfg, precision, tokenizer.vocab_size, fill=fill, draw_on="cpu" if like is None else "meta")
    same = like is not None and like.precision.device == precision.device
    inputs = like.inputs if like and same else Inputs(batches, cfg, state.model.dropout_sites, precision.device)
    return Arm(
        name, cfg, precision, state, inputs, TrainingStep(forward, state, inputs, cfg, precision, graph=graph, say=_refuse)
    )


def _refuse(why: str) -> None:
    """What is timed as a CUDA graph must be one."""
    raise RuntimeError(why)


def check_same(arms: Sequence[Arm]) -> None:
    """That arms begin with the same weights, buffers and optimizer groups: else every figure would be worthless. (That the code
    outside of the norm sites does not depend on the implementation is for the tests.)"""
    first, *others = arms
    weights, groups = first.state.model.state_dict(), first.state.optimizer.state_dict()["param_groups"]
    for other in others:
        found, both = other.state.model.state_dict(), f"{first.name} and {other.name}"
        assert found.keys() == weights.keys(), f"{both} differ in {', '.join(found.keys() ^ weights)}"
        differing = [name for name, tensor in weights.items() if not torch.equal(tensor, found[name])]
        differing += [] if groups == other.state.optimizer.state_dict()["param_groups"] else ["optimizer groups"]
        assert not differing, f"{both} differ in {', '.join(differing)}"


# ---- state -------------------------------------------------------------------------------------------------------------------


class Snapshot:
    """Weights, optimizer state and loss scale of an arm, to be put into it or another one in place: what compiled code points
    to stays."""

    def __init__(self, arm: Arm) -> None:
        self._kept = [tensor.detach().clone() for tensor in _tensors(arm)]
        self.nbytes = sum(tensor.nbytes for tensor in self._kept)
        self._scale = arm.state.scaler.state_dict()  # empty but in fp16

    @torch.no_grad()
    def restore(self, arm: Arm) -> None:
        torch._foreach_copy_(_tensors(arm), self._kept)
        if self._scale:
            arm.state.scaler.load_state_dict(self._scale)


def places_of(arms: Sequence[Arm]) -> list[list[Tensor]]:
    """The memory of the weights and the optimizer state of each arm."""
    return [[tensor.data for tensor in _tensors(arm)] for arm in arms]


def move(arms: Sequence[Arm], places: Sequence[list[Tensor]], order: Sequence[int]) -> None:
    """Moves weights and optimizer state of the i-th arm to places[order[i]], where they take the values that are there.

    A step's time may depend on where its tensors lie, and an arm would keep that for as long as it lives: two equal arms then
    differ beyond what their intervals explain. Not for CUDA graphs, which have the addresses in them.
    """
    for arm, at in zip(arms, order, strict=True):
        for tensor, place in zip(_tensors(arm), places[at], strict=True):
            tensor.data = place


def _tensors(arm: Arm) -> list[Tensor]:
    """In an order that arms share; AdamW has no state before its first step."""
    parameters = [p for group in arm.state.optimizer.param_groups for p in group["params"]]
    state = arm.state.optimizer.state
    return [*parameters, *(value for p in parameters for value in state[p].values() if isinstance(value, Tensor))]
