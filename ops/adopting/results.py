"""What two runs of a module give, and in what they differ."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

_ACCEPTED = {torch.float64: 1e-6, torch.float32: 1e-3}  # ‖found − wanted‖ / ‖wanted‖ of a tensor; 0.05 for the others
_GRADIENT = "the gradient of "


def floats_in(output: Any, name: str) -> dict[str, Tensor]:
    """The tensors of floats in an output, tuple, list, mapping or dataclass, by what a reader would call them."""
    if isinstance(output, Mapping):
        inside = [floats_in(one, f"{name}.{key}") for key, one in output.items()]
    elif is_dataclass(output):
        inside = [floats_in(getattr(output, of.name, None), f"{name}.{of.name}") for of in fields(output)]
    elif isinstance(output, tuple | list):
        inside = [floats_in(one, f"{name}[{i}]") for i, one in enumerate(output)]
    else:
        return {name: output} if isinstance(output, Tensor) and output.is_floating_point() else {}
    return {name: t for some in inside for name, t in some.items()}


def upstream(y: Tensor) -> Tensor:
    """A fixed gradient of y."""
    return torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype).cos()


def gradients(outputs: Mapping[str, Tensor], leaves: Mapping[str, Tensor], retain_graph: bool = False) -> dict[str, Tensor]:
    """Those that the outputs give to the leaves that they come from."""
    live = [y for y in outputs.values() if y.requires_grad]
    if not live or not leaves:
        return {}
    found = torch.autograd.grad(live, [*leaves.values()], [upstream(y) for y in live], retain_graph, allow_unused=True)
    return {f"{_GRADIENT}{name}": g for name, g in zip(leaves, found, strict=True) if g is not None}


def difference(
    wanted: dict[str, Tensor], found: dict[str, Tensor], dtype: torch.dtype | None = None, least: float = 0.0
) -> str:
    """In words, what differs by more than rounding to dtype, or to that of each tensor; empty if nothing does.

    least: a gradient that is less than this part of the largest may be off as if it were as large: it may be rounding alone.
    """
    largest = max((float(_finite(g).norm()) for name, g in wanted.items() if name.startswith(_GRADIENT)), default=0.0)
    for name in dict.fromkeys((*wanted, *found)):
        if name not in wanted or name not in found:
            return f"{name} is there {'before' if name in wanted else 'after'} alone"
        a, b = wanted[name], found[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{name} is {b.dtype} of shape {tuple(b.shape)}, before it was {a.dtype} of {tuple(a.shape)}"
        if not torch.equal(a.isfinite(), b.isfinite()):
            return f"{name} is infinite or NaN in other places"
        a, b = _finite(a), _finite(b)
        error, size = float((b - a).norm()), float(a.norm())
        counted = max(size, least * largest) if name.startswith(_GRADIENT) else size
        if error > _ACCEPTED.get(dtype or wanted[name].dtype, 0.05) * counted + 1e-9:
            return f"{name} is off by {error / max(size, 1e-9):.2g} of its size"
    return ""


def _finite(t: Tensor) -> Tensor:
    return t.double().nan_to_num(0.0, 0.0, 0.0)
