"""Arms: one training run with another operator at its norm sites, everything else the same, and a check that it is."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ablation.graph import Operator, operators_elsewhere
from configs import Config, machine, to_dict
from configs.schema import Device, DropoutMasks, NormImpl
from data import Tokenizer
from model import GPT
from training import pretrained
from training.checkpoint import TrainState
from training.precision import Precision
from training.step import adamw, compile_model, prepare


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
    like: Arm | None = None,
) -> Arm:
    """A fresh arm: initial weights are a function of cfg.seed and cfg.model alone.

    Args:
        impl: what runs at the norm sites.
        masks: where dropout masks come from; None: as cfg says.
        like: a fresh arm of this seed and model, whose initial values are copied: drawing those of GPT-2 takes a CPU seconds.

    Raises:
        ValueError: options of the model that do not fit together.
    """
    cfg = copy.deepcopy(cfg)
    cfg.norm = replace(cfg.norm, impl=impl, dropout_masks=masks or cfg.norm.dropout_masks)
    cfg.train = replace(cfg.train, compile=compiled)
    torch.manual_seed(cfg.seed)
    if like is None:
        model = GPT(cfg.model, cfg.norm, vocab_size).to(precision.device)
    else:
        with torch.device("meta"):  # where nothing is drawn
            model = GPT(cfg.model, cfg.norm, vocab_size)
        model.to_empty(device=precision.device)
        copy_values(like.state.model, model)
    prepare(model, cfg.train, machine.inspect(Device(precision.device.type)))
    state = TrainState(model, adamw(model, cfg.optim), precision.scaler(), tokenizer="")
    forward: Callable[..., Tensor] = compile_model(model, cfg.train) if compiled else model
    return Arm(name, cfg, precision, state, forward)


def load_initial_weights(arm: Arm, tokenizer: Tokenizer) -> None:
    """Gives a fresh arm the weights that cfg.init_from names, if it names any; arms that are built like it have them too.

    Raises:
        ConfigError: they can't be had, or belong to another model or to other tokens.
    """
    if arm.cfg.init_from:
        pretrained.load(arm.state.model, arm.cfg.init_from, tokenizer)


def check_initial_weights(cfg: Config, tokenizer: Tokenizer) -> None:
    """That arms can begin with the weights that cfg.init_from names, if it names any.

    Raises:
        ConfigError: they can't.
        ValueError: options of the model that do not fit together.
    """
    if cfg.init_from:
        with torch.device("meta"):  # where nothing is drawn
            model = GPT(cfg.model, cfg.norm, tokenizer.vocab_size)
        pretrained.load(model.to_empty(device="cpu"), cfg.init_from, tokenizer)


@torch.no_grad()
def copy_values(source: nn.Module, target: nn.Module) -> None:
    """Parameters and buffers, also those that a state_dict leaves out.

    Raises:
        AssertionError: their names differ.
    """
    for kind in ("named_parameters", "named_buffers"):
        values, places = (dict(getattr(model, kind)()) for model in (source, target))
        assert values.keys() == places.keys(), f"different {kind.removeprefix('named_')}"
        for name, place in places.items():
            place.copy_(values[name])


def check_same(arms: Sequence[Arm]) -> None:
    """That the arms differ in what runs at their norm sites and in nothing else: configs, modules, the graph elsewhere,
    optimizer groups, initial values.

    Raises:
        AssertionError: they don't, which is a mistake of ours and would make every figure worthless.
    """
    first, *others = arms
    for other in others:
        for what, of in (("configs", _config), ("modules", _modules), ("graphs", _graph), ("optimizer groups", _groups)):
            if of(first) != of(other):
                raise AssertionError(f"{first.name} and {other.name} have different {what}")
    check_same_weights(arms)


def check_same_weights(arms: Sequence[Arm]) -> None:
    """That parameters and buffers have the same names, dtypes and values.

    Raises:
        AssertionError: they don't.
    """
    first, *others = arms
    for other in others:
        pair = f"{first.name} and {other.name}"
        for kind in ("named_parameters", "named_buffers"):
            mine, yours = (dict(getattr(arm.state.model, kind)()) for arm in (first, other))
            if mine.keys() != yours.keys():
                raise AssertionError(f"{pair} have different {kind.removeprefix('named_')}")
            for name, tensor in mine.items():
                if tensor.dtype != yours[name].dtype or not torch.equal(tensor, yours[name]):
                    raise AssertionError(f"{pair}: {name} differs")


def _config(arm: Arm) -> dict:
    plain = to_dict(arm.cfg)
    del plain["norm"]["impl"]
    return plain


def _modules(arm: Arm) -> list[tuple]:
    """Names, classes and every plain setting, training or evaluation among them; but for the operator of a norm site."""
    plain = (bool, int, float, str, tuple, type(None))
    return [
        (name, type(module), sorted((k, repr(v)) for k, v in vars(module).items() if isinstance(v, plain) and k != "impl"))
        for name, module in arm.state.model.named_modules()
    ]


def _graph(arm: Arm) -> list[Operator]:
    return operators_elsewhere(arm.state.model, arm.precision, arm.cfg.model.context)


def _groups(arm: Arm) -> list[tuple[list[str], dict]]:
    names = {id(parameter): name for name, parameter in arm.state.model.named_parameters()}
    return [
        ([names[id(p)] for p in group["params"]], {key: value for key, value in group.items() if key != "params"})
        for group in arm.state.optimizer.param_groups
    ]


class Snapshot:
    """Weights, optimizer state and loss scale of an arm, to be put into it or another one in place: what compiled code points
    to stays."""

    def __init__(self, arm: Arm) -> None:
        self._kept = [tensor.detach().clone() for tensor in _tensors(arm)]
        self._scale = arm.state.scaler.state_dict()  # empty but in fp16

    @torch.no_grad()
    def restore(self, arm: Arm) -> None:
        torch._foreach_copy_(_tensors(arm), self._kept)
        if self._scale:
            arm.state.scaler.load_state_dict(self._scale)

    @staticmethod
    def bytes_of(arm: Arm) -> int:
        return sum(tensor.nbytes for tensor in _tensors(arm))


def places_of(arms: Sequence[Arm]) -> list[list[Tensor]]:
    """Where the weights and the optimizer state of each arm lie."""
    return [[tensor.data for tensor in _tensors(arm)] for arm in arms]


def move(arms: Sequence[Arm], places: Sequence[list[Tensor]], order: Sequence[int]) -> None:
    """Has weights and optimizer state of the i-th arm lie at places[order[i]], with the values that are there.

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
