"""What a trial puts in the place of sublayers and of their outputs."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from .lazy import Lazy, dropout, settled


class Returns:
    """What each stand-in returns, by its path: a tensor, or a tuple of one for each stream that it gets and of nothing more.
    What the block does with the output tells."""

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}  # of the tuples
        self.asked = ""  # the stand-in whose output was unpacked last
        self.copies: dict[nn.Module, nn.Module] = {}  # of parts of sublayers that the block calls itself
        self.are_known = False

    def of(self, path: str, ys: list) -> Any:
        length = self.lengths.get(path)
        return ys[0] if length is None else (*ys, *[None] * length)[:length]

    def learn(self, error: Exception) -> bool:
        """Whether an error of the block tells that the last stand-in that was unpacked returns more."""
        is_short = isinstance(error, ValueError) and "values to unpack" in str(error) and self.asked in self.lengths
        if is_short:
            self.lengths[self.asked] += 1
        return is_short


class StandIn(nn.Module):
    """Some function of its first tensor in place of a sublayer, with its attributes."""

    def __init__(self, part: nn.Module, path: str, number: int, returns: Returns) -> None:
        super().__init__()
        vars(self).update(standing_for=part, path=path, number=number, returns=returns, got_lazy=False)

    def __getattr__(self, name: str) -> Any:
        value, copies = getattr(vars(self)["standing_for"], name), vars(self)["returns"].copies
        if isinstance(value, nn.Module):
            if value not in copies:
                copies[value] = clone_of(value, lambda p: 0.1 * torch.randn(p.shape, device="cpu"), lambda *part: None)
            return copies[value]
        return on_cpu(value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor | Lazy) and x.is_floating_point() and x.ndim]
        if any(isinstance(x, Lazy) for x in given):
            vars(self)["got_lazy"] = True
        if not given:
            raise TypeError(f"{self.path} gets no tensor")
        streams = [x for x in given if x.ndim == given[0].ndim and x.shape[-1] == given[0].shape[-1]]
        ys = [self._of(settled(x)) for x in streams]
        if any(x is streams[0] for x in streams[1:]) and not isinstance(self.standing_for, nn.MultiheadAttention):
            ys[0] = ys[0] + settled(streams[0])  # as Bloom's attention, which gets its residual too
        return self.returns.of(self.path, ys) if self.returns.are_known else Output(ys, self.returns, self.path)

    def _of(self, x: Tensor) -> Tensor:
        columns = torch.arange(getattr(self.standing_for, "out_features", getattr(self.standing_for, "nf", x.shape[-1])))
        phase = 0.1 * (1 + self.number) + 0.3 * (columns // x.shape[-1])  # no two chunks are the same
        y = torch.sin(x.float()[..., columns % x.shape[-1]] + phase).to(x.dtype)
        # as a matrix product
        return y.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else y


class Output(Lazy):
    """What a stand-in returns while it is not known whether that is a tensor or a tuple."""

    def __init__(self, ys: list[Tensor], returns: Returns, path: str) -> None:
        super().__init__(ys[0])
        self._value, self.ys, self.returns, self.path = ys[0], ys, returns, path

    def _items(self, least: int) -> Any:
        self.returns.asked = self.path
        self.returns.lengths[self.path] = max(least, self.returns.lengths.get(self.path, 0))
        return self.returns.of(self.path, self.ys)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items(1))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.start == 1:  # the rest of a tuple
            return self._items(1)[1:]
        return self._items(max(index + 1, 1))[index] if type(index) is int else self.x[settled(index)]


class SameDropout(TorchFunctionMode):
    """Two runs drop the same."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.dropout:
            return dropout(*args, **(kwargs or {}), seed=torch.tensor([1]))
        return function(*args, **(kwargs or {}))


def clone_of(
    module: nn.Module, random: Callable[[Tensor], Tensor], instead: Callable[[str, nn.Module], Any], path: str = ""
) -> Any:
    """A copy on the CPU, in fp32, without hooks and without a forward on an instance.

    Args:
        random: gives the value of a parameter.
        instead: of a part's path and the part: another module in its place, or None.
    """
    if path and (other := instead(path, module)) is not None:
        return other
    clone: Any = object.__new__(type(module))
    clone.__dict__ |= {name: on_cpu(value) for name, value in module.__dict__.items() if name != "forward"}
    parts = {n: m and clone_of(m, random, instead, f"{path}.{n}" if path else n) for n, m in module._modules.items()}
    parameters = {n: None if p is None else nn.Parameter(random(p), p.requires_grad) for n, p in module._parameters.items()}
    clone.__dict__ |= {
        name: OrderedDict() for name in clone.__dict__ if name.endswith("_hooks") or name.startswith("_forward_")
    }
    clone.__dict__ |= {"_modules": parts, "_parameters": parameters, "gradient_checkpointing": False}
    clone.__dict__["_buffers"] = {name: on_cpu(b) for name, b in module._buffers.items()}
    return clone


def attributes(module: nn.Module) -> dict[str, Any]:
    """What another look differs from if a forward has kept something: which objects each attribute is and holds, and how often
    a tensor was changed."""

    def marks(value: Any) -> list:
        inside = [*value.values()] if type(value) is dict else [*value] if type(value) in (list, set) else []
        objects = [value, *inside]
        changes = [t._version for t in objects if isinstance(t, Tensor) and not t.is_inference()]
        return [[*map(id, objects)], changes, objects]  # with the objects, so that no other gets their ids

    ours = ("training", "_parameters")  # which a trial sets
    return {name: marks(value) for name, value in vars(module).items() if name not in ours}


def on_cpu(value: Any) -> Any:
    """A copy, in fp32; some values, where it is on meta."""
    if type(value) in (list, dict, set):
        return copy(value)
    if not isinstance(value, Tensor) or is_lazy(value):
        return value
    if value.is_meta:
        numbers = torch.linspace(0, 1, value.numel(), device="cpu").view(value.shape)
        return numbers if value.is_floating_point() else numbers.to(value.dtype)
    value = value.detach().to("cpu", copy=True)
    return value.float() if value.is_floating_point() else value
