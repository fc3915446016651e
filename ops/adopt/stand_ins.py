"""What a trial puts in the place of sublayers, of their outputs, and of arguments of which nothing is known."""

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from . import lazy
from .lazy import Branch, Lazy, settled


class Anything:
    """Stands for an argument of which nothing is known."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Anything()

    def __getitem__(self, index: Any) -> Any:
        return Anything()

    def __iter__(self) -> Iterator[Any]:
        return iter((Anything(), Anything()))

    def __bool__(self) -> bool:
        return False

    @classmethod
    def __torch_function__(cls, *call: Any) -> Any:
        return Anything()


for _name in ["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "eq", "ne", "lt", "le", "gt", "ge", "invert", "neg"]:
    setattr(Anything, f"__{_name}__", lambda self, *operands: Anything())


def on_cpu(value: Any) -> Any:
    """A copy, in fp32."""
    if type(value) in (list, dict, set):
        return copy(value)
    if not isinstance(value, Tensor) or is_lazy(value):
        return value
    value = torch.zeros_like(value, device="cpu") if value.device.type == "meta" else value.detach().to("cpu", copy=True)
    return value.float() if value.is_floating_point() else value


class StandIn(nn.Module):
    """Some function of its first tensor in place of a sublayer, with its attributes."""

    def __init__(self, part: nn.Module, path: str, run: Any) -> None:
        super().__init__()
        self.__dict__["standing_for"], self.__dict__["run"], self.__dict__["path"] = part, run, path

    def __getattr__(self, name: str) -> Any:
        return on_cpu(getattr(self.__dict__["standing_for"], name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run, path = self.run, self.path
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor | Lazy) and x.is_floating_point() and x.ndim]
        if any(isinstance(x, Lazy) and not isinstance(x, _Learning) for x in (*args, *kwargs.values())):
            run.got_lazy.add(path)
        x = settled(tensors[0]) if tensors else run.residual
        width = getattr(self.standing_for, "out_features", getattr(self.standing_for, "nf", x.shape[-1]))
        phase = 0.1 * (1 + [*run.stand_ins].index(path))
        rows = x if width == x.shape[-1] else x.mean(-1, keepdim=True) + torch.arange(width)
        y: Any = torch.sin(rows + phase)
        if run.mode == "learning":
            run.returns.setdefault(path, 0)
            return _Learning(y, run, path)
        y = Branch(y, source=path) if run.mode == "lazy" and path in run.branches else y
        count = run.returns.get(path, 0)
        return (y, *[None] * (count - 1)) if count else y


class _Learning(Lazy):
    """What a stand-in returns as long as it is not known whether the sublayer returns a tensor or a tuple of one."""

    def __init__(self, value: Tensor, run: Any, path: str) -> None:
        self._value, self._had_grad, self.run, self.path = value, False, run, path

    def _like(self) -> Tensor:
        return self.tensor()

    def __iter__(self) -> Iterator[Any]:
        self.run.asked = self.path
        self.run.returns[self.path] = max(1, self.run.returns[self.path])
        return iter((self._value, *[None] * (self.run.returns[self.path] - 1)))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.start == 1:  # the rest of a tuple
            self.run.returns[self.path] = max(self.run.returns[self.path], 1)
            return (None,) * (self.run.returns[self.path] - 1)
        if type(index) is not int:
            return self.tensor()[settled(index)]
        self.run.returns[self.path] = max(self.run.returns[self.path], index + 1, 2)
        return None if index else self._value

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*settled(args), **settled(kwargs or {}))

    def contiguous(self) -> Any:
        return self.tensor()


for _name in ["add", "radd", "iadd", "mul", "rmul", "imul", "truediv", "itruediv"]:
    setattr(_Learning, f"__{_name}__", lazy._by_value(f"__{_name.replace('i', '', 1) if _name.startswith('i') else _name}__"))


class HalvedDropout(TorchFunctionMode):
    """Dropout halves, so that two runs drop the same."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.dropout:
            return function(*args, **(kwargs or {}))
        x, p, training = _dropout_arguments(*args, **(kwargs or {}))
        if not training or p == 0.0:
            return x
        if isinstance(x, Branch) and x._value is None and x.more is None:
            return x.then(factor=x.factor * 0.5, notes=(*x.notes, "dropout"))
        return settled(x) * 0.5


def _dropout_arguments(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[Any, float, bool]:
    return input, p, training
