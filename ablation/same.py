"""A check that arms differ in what runs at their norm sites and in nothing else."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ablation.arms import Arm
from configs import to_dict
from configs.schema import NormImpl
from model.attention import QueryKeySite
from model.norm import NormSite
from training.precision import Precision

Operator = tuple[str, tuple[Any, ...]]


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
    del plain[arm.cfg.ablate.switch]["impl"]
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


# ---- the graph outside the norm sites ----------------------------------------------------------------------------------------


def operators_elsewhere(model: nn.Module, precision: Precision, context: int) -> list[Operator]:
    """The operators in the order in which they run, each with its arguments; tensors as dtype and shape.

    From tokens to logits, in evaluation mode: masks are drawn at norm sites, or for them. Nothing is computed: weights and
    tokens are fake ones, and of the CPU, whatever the model's device, so that no kernel is compiled for it.
    """
    recorder = _Recorder()
    sites = [module for module in model.modules() if isinstance(module, NormSite | QueryKeySite)]
    hooks = [site.register_forward_pre_hook(recorder.enter) for site in sites]
    hooks += [site.register_forward_hook(recorder.leave) for site in sites]
    impls = [site.impl for site in sites]
    for site in sites:
        if site.impl not in (NormImpl.fused, NormImpl.torch):  # compiled code and kernels can't take fake tensors
            site.impl = NormImpl.torch
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
        for site, impl in zip(sites, impls, strict=True):
            site.impl = impl
        for hook in hooks:
            hook.remove()
    return recorder.found


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operator] = []
        self.inside = 0  # norm sites; that of queries and keys may call two

    def enter(self, *_) -> None:
        self.inside += 1

    def leave(self, *_) -> None:
        self.inside -= 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.inside:
            given = (_shown(value) for value in tree_leaves((args, kwargs)))
            self.found.append((str(func), tuple(given)))
        return func(*args, **kwargs)


def _shown(value: Any) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else repr(value)
