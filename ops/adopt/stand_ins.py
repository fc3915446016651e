"""What a trial puts in the place of sublayers and of their outputs."""

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from .lazy import Lazy, dropout, settled


class StandIn(nn.Module):
    """Some function of its first tensor in place of a sublayer, with its attributes."""

    def __init__(self, part: nn.Module, path: str, run: Any) -> None:
        super().__init__()
        vars(self).update(standing_for=part, path=path, run=run)

    def __getattr__(self, name: str) -> Any:
        return on_cpu(getattr(vars(self)["standing_for"], name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run, path, given = self.run, self.path, (*args, *kwargs.values())
        if any(isinstance(x, Lazy) and (type(x) is not Output or x.is_branch) for x in given):
            run.got_lazy.add(path)
        tensors = [x for x in given if isinstance(x, Tensor | Lazy) and x.is_floating_point() and x.ndim]
        x = settled(tensors[0]) if tensors else run.residual
        width = getattr(self.standing_for, "out_features", getattr(self.standing_for, "nf", x.shape[-1]))
        rows = x if width == x.shape[-1] else x.mean(-1, keepdim=True) + torch.arange(width)
        y = torch.sin(rows + 0.1 * (1 + [*run.stand_ins].index(path)))
        run.made[y.data_ptr()] = (path, y)
        return Output(y, run, path)


class Output(Lazy):
    """What a stand-in returns: a tensor, or a tuple of one and of nothing more if the block takes it for a tuple."""

    def __init__(self, y: Tensor, run: Any, path: str) -> None:
        super().__init__(y)
        self.run, self.path, self.is_branch = run, path, path in run.branches
        if not self.is_branch:
            self._value = y  # so it takes part by its value

    def _items(self, least: int) -> tuple:
        count = self.run.returns[self.path] = max(least, self.run.returns.get(self.path, 0))
        return (Lazy(self.x) if self.is_branch else self.x, *[None] * (count - 1))

    def __iter__(self) -> Iterator[Any]:
        self.run.asked = self.path
        return iter(self._items(1))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.start == 1:  # the rest of a tuple
            return self._items(1)[1:]
        return self._items(max(index + 1, 2))[index] if type(index) is int else self.tensor()[settled(index)]


class SameDropout(TorchFunctionMode):
    """Two runs drop the same."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.dropout:
            return dropout(*args, **(kwargs or {}), seed=torch.tensor([1]))
        return function(*args, **(kwargs or {}))


def on_cpu(value: Any) -> Any:
    """A copy, in fp32."""
    if type(value) in (list, dict, set):
        return copy(value)
    if not isinstance(value, Tensor) or is_lazy(value):
        return value
    value = torch.zeros_like(value, device="cpu") if value.device.type == "meta" else value.detach().to("cpu", copy=True)
    return value.float() if value.is_floating_point() else value
