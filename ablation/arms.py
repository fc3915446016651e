"""Arms: one training run with another operator at its norm sites, everything else the same, and a check that it is."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs import Config, to_dict
from configs.schema import DropoutMasks, NormImpl
from data import Tokenizer
from model import GPT
from model.norm import PreNorm
from training import pretrained
from training.checkpoint import TrainState
from training.precision import Precision
from training.step import adamw, compile_model

Operator = tuple[str, tuple[Any, ...]]


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
    """A fresh arm. Its initial weights depend on cfg.seed and cfg.model alone.

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
        model = GPT(cfg.model, cfg.norm, vocab_size, cfg.loss).to(precision.device)
    else:
        with torch.device("meta"):  # where nothing is drawn
            model = GPT(cfg.model, cfg.norm, vocab_size, cfg.loss)
        model.to_empty(device=precision.device)
        copy_values(like.state.model, model)
    model.recompute = cfg.train.recompute
    state = TrainState(model, adamw(model, cfg.optim), precision.scaler(), tokenizer="")
    forward: Callable[..., Tensor] = compile_model(model, cfg.train) if compiled else model
    return Arm(name, cfg, precision, state, forward)


def load_initial_weights(arm: Arm, tokenizer: Tokenizer) -> None:
    """Loads the weights of cfg.init_from, if set, into a fresh arm. Arms that are built `like` it get them too.

    Raises:
        ConfigError: they can't be had, or belong to another model or to other tokens.
    """
    if arm.cfg.init_from:
        pretrained.load(arm.state.model, arm.cfg.init_from, tokenizer)


def check_initial_weights(cfg: Config, tokenizer: Tokenizer) -> None:
    """Checks that arms can begin with the weights of cfg.init_from, if set.

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
    """Copies parameters and buffers, also those that a state_dict leaves out.

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
    """Checks that parameters and buffers have the same names, dtypes and values.

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
    """Names, classes and plain settings of all modules, with the training mode and without the operator of a norm site."""
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


# ---- the graph outside the norm sites ----------------------------------------------------------------------------------------


def operators_elsewhere(model: nn.Module, precision: Precision, context: int) -> list[Operator]:
    """The operators in the order in which they run, each with its arguments; tensors as dtype and shape.

    From tokens to logits, in evaluation mode: masks are drawn at norm sites, or for them. Nothing is computed: weights and
    tokens are fake ones, and of the CPU, whatever the model's device, so that no kernel is compiled for it.
    """
    recorder = _Recorder()
    sites = [module for module in model.modules() if isinstance(module, PreNorm)]
    hooks = [site.register_forward_pre_hook(recorder.enter) for site in sites]
    hooks += [site.register_forward_hook(recorder.leave) for site in sites]
    training = model.training
    model.eval()
    try:
        with FakeTensorMode(), torch.no_grad(), replace(precision, device=torch.device("cpu")).autocast():
            named = chain(model.named_parameters(), model.named_buffers())
            values = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in named}
            tokens = torch.zeros(1, context, dtype=torch.int64)
            with recorder:
                torch.func.functional_call(model, values, (tokens,))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return recorder.found


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operator] = []
        self.inside = False  # a norm site

    def enter(self, *_) -> None:
        self.inside = True

    def leave(self, *_) -> None:
        self.inside = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.inside:
            given = (_shown(value) for value in tree_leaves((args, kwargs)))
            self.found.append((str(func), tuple(given)))
        return func(*args, **kwargs)


def _shown(value: Any) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else repr(value)
