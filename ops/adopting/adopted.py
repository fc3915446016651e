"""A module of somebody's model that runs another forward: how it is made, copied, pickled and given back.

It stays the same object, with its Parameters, buffers, hooks, device and training flag. Its class becomes a subclass of what it
was, of the same name. So optimizers, checkpoints and references to it hold, and isinstance finds what it found before.
"""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from types import new_class
from typing import Any

import torch
from torch import Tensor, nn

Only = Callable[[str, nn.Module], bool] | None  # of a module's name and the module: whether it may be changed


KEEPS = "its forward keeps something as an attribute"  # which ours would not


class LeftAlone(Exception):
    """The reason, in words."""


class Adopted(nn.Module):
    """Its direct subclasses are the kinds of such modules. Its names are private, as modules have names of their own."""

    _what = ""  # what a module of this kind computes in one kernel, in words
    _ours: Callable[[Any, Callable], Callable] | None = None  # from how, and its own forward, to the one in its place

    _kind: Any
    _own: Any  # the module's class before
    _how: Any  # what the class of this kind was made with; if that is a class, isinstance finds it too
    _recognised: Any  # the forward of `_own` that was looked at; of a copy made after a tool has replaced that, None
    _before: dict[str, list]  # the attributes that it got, each with the value that it had before if it had one

    @classmethod
    def _made(cls, own: Any, how: Any, recognised: Any) -> dict[str, Any]:
        """What a class of this kind has: by default a forward, where the kind has `_ours`."""
        if recognised is None or cls._ours is None:
            return {}
        return {"forward": in_place_of(recognised, own, cls._ours(how, recognised))}

    def _give_back(self) -> None:
        """What is to be undone beside class and attributes."""

    def has_own_forward(self) -> bool:
        """Whether its class still has the forward that was recognised, which a tool may have replaced since."""
        return self._own.forward is self._recognised

    def __reduce_ex__(self, protocol):
        cls = type(self)
        if "_own" not in vars(cls):  # of another tool's class, as a parametrization's, which refuses this
            return super().__reduce_ex__(protocol)
        return _rebuild, (cls._kind, cls._own, cls._how, self.has_own_forward()), self.__getstate__()


@cache
def adopted_class(kind: Any, own: Any, how: Any, recognised: Any) -> Any:
    body = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {"_kind": kind, "_own": own, "_how": how, "_recognised": staticmethod(recognised)}
    body |= kind._made(own, how, recognised)
    if forward := body.get("forward"):
        forward.__code__ = forward.__code__.replace()  # by which Dynamo counts what it compiles: of each class its own
    also = how if isinstance(how, type) else own
    # The module's own methods go first, but a class can't stand before its own subclass.
    bases = (kind, also) if issubclass(also, own) else (kind, own, also)
    return new_class(own.__name__, bases, {}, lambda space: space.update(body))


def in_place_of(recognised: Any, own: Any, ours: Callable) -> Callable:
    """A forward that runs ours as long as own has the forward that was recognised."""

    @wraps(own.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (ours if own.forward is recognised else own.forward)(self, *args, **kwargs)

    return forward


def is_known(t: Any) -> bool:
    """Whether our operators take it: no subclass, such as DTensor, which has rules for PyTorch's operations alone, but those of
    tracers."""
    return type(t) is Tensor or type(t).__module__.startswith("torch._subclasses")


def _rebuild(kind: Any, own: Any, how: Any, has_own_forward: bool) -> Any:
    """An adopted module without attributes, for copies and pickles."""
    return object.__new__(adopted_class(kind, own, how, own.forward if has_own_forward else None))


def become(module: nn.Module, kind: Any, how: Any = None, **attributes: Any) -> None:
    """Makes module one of this kind, with these attributes.

    Raises:
        TypeError: Python can't give its class a subclass.
    """
    own: Any = type(module)
    module.__class__ = adopted_class(kind, own, how, own.forward)
    before = {name: [vars(module)[name]] if name in vars(module) else [] for name in attributes}
    vars(module).update(attributes, _before=before)


def replace(
    model: nn.Module, kind: type[Adopted], trial_of: Callable[[nn.Module], Callable[[], Any] | None], only: Only
) -> list[tuple[str, str]]:
    """Makes modules of a model ones of this kind.

    trial_of: for a module that may become one, a function that returns how, or in words why not.

    Returns:
        The name of each such module, and what was done with it or why nothing was.
    """
    lines = []
    for name, module in model.named_modules():
        trial = None if isinstance(module, kind) else trial_of(module)
        if trial is None or (only is not None and not only(name, module)):
            continue
        was, own = type(module).__name__, type(module).forward
        if "forward" in vars(module) or inspect.unwrap(own) is not own or isinstance(module, torch.jit.ScriptModule):
            how = "its forward is wrapped by a decorator or a tool; adopt it before that"
        else:
            how = trial()
        if isinstance(how, str):
            lines.append((name or "model", f"{was}, {kind._what} left alone: {how}"))
        else:
            become(module, kind, how)
            lines.append((name or "model", f"{was}, {how}"))
    return lines


def restore(function: str, model: nn.Module, *kinds: type[Adopted]) -> list[str]:
    """Gives modules of these kinds their own class and attributes again; returns a line for each.

    Raises:
        ValueError: since then another tool gave one yet another class or forward. Then nothing is restored.
    """
    adopted = [(name or "model", m) for name, m in model.named_modules() if isinstance(m, kinds)]
    for name, module in adopted:
        if "forward" in vars(module) or "_own" not in vars(type(module)):
            changed = "its forward" if "forward" in vars(module) else f"its class, to {type(module).__name__}"
            raise ValueError(
                f"{function}: since {name}, a {module._own.__name__}, was replaced, another tool changed {changed} "
                "(fully_shard, a parametrization, module.forward = …); undo that first"
            )
    for _, module in adopted:
        module._give_back()
        for attribute, value in vars(module).pop("_before").items():
            vars(module).pop(attribute, None)
            vars(module).update((attribute, one) for one in value)
        module.__class__ = module._own
    return [f"{name}: {type(module).__name__} as it was" for name, module in adopted]


def raised(error: Exception) -> str:
    """Of anybody's code, in a line."""
    return f"raised {type(error).__name__}: {(str(error).splitlines() or ['without a message'])[0]}"
