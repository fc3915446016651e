"""The operators of a forward pass outside its norm sites: the part of a model's graph that arms must share."""

from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.norm import PreNorm
from training.precision import Precision

Operator = tuple[str, tuple[Any, ...]]


def operators_elsewhere(model: nn.Module, precision: Precision, context: int) -> list[Operator]:
    """Each operator with what it was given, tensors by dtype and shape, in the order in which they run.

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
