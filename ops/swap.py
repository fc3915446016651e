"""Another forward for a module that exists, by another class.

The module stays the object it is: its Parameters, buffers, hooks, device, dtype, training flag, and everyone who holds a
reference to it. Only its class becomes a subclass of what it was, so isinstance goes on finding what it found. The new class
is made once for each original and pickles by its parts.
"""

import types
from functools import cache
from typing import Any

from torch import nn

_BEFORE = "_before_swap"  # names of the attributes that came with the new class, and what they were before


class Swapped(nn.Module):
    """First base of every class that is put in the place of a module's own. Subclasses define forward."""

    _parts: tuple[type, ...]  # the class with the new forward, the module's own, and others to be found by isinstance

    def __reduce_ex__(self, protocol):
        return _rebuild, self._parts, dict(self.__dict__)


@cache
def _swapped_class(forward: type, original: type, *others: type) -> type:
    # The original's methods go first, but a class can't stand before its own subclasses.
    last = [other for other in others if not issubclass(other, original)]
    first = [other for other in others if issubclass(other, original)]
    bases = (forward, *first, *([] if first else [original]), *last)
    body = {"_parts": (forward, original, *others), "__module__": forward.__module__, "__doc__": forward.__doc__}
    return types.new_class(f"Fused{original.__name__}", bases, {}, lambda namespace: namespace.update(body))


def _rebuild(*parts: type) -> Any:
    return object.__new__(_swapped_class(*parts))


def swap(module: nn.Module, forward: type[Swapped], *others: type, **attributes: Any) -> None:
    """Gives `module` a class made of `forward`, its own and `others`, and these attributes.

    Raises:
        TypeError: Python can't, as the module's class has slots or bases that do not go together.
    """
    parts: list[Any] = [forward, type(module), *others]
    module.__class__ = _swapped_class(*parts)
    before = {name: value for name, value in module.__dict__.items() if name in attributes}
    module.__dict__.update(attributes | {_BEFORE: (tuple(attributes), before)})


def unswap(module: Swapped) -> None:
    """Undoes `swap`.

    Raises:
        ValueError: the module has been given yet another class since, which would be lost, or a forward of its own, which may
            call ours.
    """
    if "forward" in module.__dict__:
        raise ValueError(
            f"restore_norms: the forward of a {original_class(module).__name__} was wrapped on the instance after it was "
            "replaced, and what wraps it calls the fused one; undo that first (del module.forward)"
        )
    if type(module) is not _swapped_class(*module._parts):
        raise ValueError(
            f"restore_norms: {original_class(module).__name__} was made a {type(module).__name__} by another tool after it was "
            "replaced (fully_shard, a parametrization); undo that first"
        )
    names, before = module.__dict__.pop(_BEFORE)
    for name in names:
        module.__dict__.pop(name, None)
    module.__dict__.update(before)
    module.__class__ = original_class(module)


def original_class(module: nn.Module) -> type:
    """What the module was; its class if it is not swapped."""
    return module._parts[1] if isinstance(module, Swapped) else type(module)
