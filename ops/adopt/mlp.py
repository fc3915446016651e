"""Gated MLPs: the activation of the gate and its product with the value in one kernel, found by trial and replaced in place.

    down_proj(act_fn(gate_proj(x)) * up_proj(x))

A clone with small matrices runs its own forward in fp64 on the CPU. Where one of our activations gives the same values and
gradients, a module of this kind gets a class with our forward, which calls the same linear layers.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial, wraps
from itertools import product
from types import new_class
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..activation import Activation, gated_activation_fn
from ..torch_state import has_hooks
from .recognise import undisturbed
from .stand_ins import clone_of

# Names of the linear layers that give gate and value, or both in one, and of the one behind: Llama, Phi-3, Llama's own code.
_LAYERS = ((("gate_proj", "up_proj"), "down_proj"), (("gate_up_proj",), "down_proj"), (("w1", "w3"), "w2"))
_SAME = 1e-9  # of the values, in fp64


# In PyTorch's operations, for tensors that the kernel does not take.
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda z: F.relu(z).square(),
}


class Gated(NamedTuple):
    """What a module computes: last(φ(gate) · value)."""

    inputs: tuple[str, ...]
    last: str
    activation: str
    function: str | None  # its submodule that is φ
    kind: type | None  # the class of that


class AdoptedMLP(nn.Module):
    """An MLP of somebody's model that runs `gated_activation_fn`."""

    _own: type  # the module's class before
    _gated: Gated
    _recognised: Any

    def __reduce_ex__(self, protocol):
        own: Any = self._own
        return _rebuild, (own, self._gated, own.forward is self._recognised), dict(vars(self))


def _rebuild(own: Any, gated: Gated, has_own_forward: bool) -> Any:
    """An adopted module without attributes, for copies and pickles."""
    return object.__new__(_adopted_class(own, gated, own.forward if has_own_forward else None))


@cache
def _adopted_class(own: Any, gated: Gated, recognised: Any) -> type:
    """recognised: the forward of `own` that was tried; None: a tool has replaced it since."""
    name = None if recognised is None else [*inspect.signature(recognised).parameters][1]

    @wraps(own.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = args if not kwargs else (*args, *kwargs.values()) if [*kwargs] == [name] else ()
        function: Any = None if gated.function is None else getattr(self, gated.function)
        kind = None if function is None else type(function)
        same = kind is gated.kind and (function is None or not has_hooks(function))
        if len(given) != 1 or not same or own.forward is not recognised:
            return own.forward(self, *args, **kwargs)
        gate, value, *_ = *[getattr(self, part)(given[0]) for part in gated.inputs], None
        if all(_is_known(t) for t in (gate, value)) and (value is None or value.dtype == gate.dtype):
            hidden = gated_activation_fn(gate, value, activation=gated.activation)
        else:
            gate, value = gate.chunk(2, -1) if value is None else (gate, value)
            hidden = _PLAIN[gated.activation](gate) * value
        return getattr(self, gated.last)(hidden)

    body = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")} | {"_own": own, "_gated": gated}
    body |= {"_recognised": staticmethod(recognised), "forward": forward}
    return new_class(own.__name__, (AdoptedMLP, own), {}, lambda space: space.update(body))


def _is_known(t: Any) -> bool:
    """Not a subclass, such as DTensor, which has rules for PyTorch's operations alone; those of tracers have none."""
    return t is None or type(t) is Tensor or type(t).__module__.startswith("torch._subclasses")


def replace_mlps(model: nn.Module, *, only: Callable[[str, nn.Module], bool] | None = None) -> list[tuple[str, str]]:
    """Lets gated MLPs compute the activation and the product in one kernel each way, in place.

    Takes modules with linear layers named as those of Llama or Phi-3 if ours gives the same values and gradients. The linear
    layers are called as before. If a hook looks at the activation's module, the module's own forward runs.

    Args:
        model: any module; before DDP, FSDP or torch.compile are put around it.
        only: a function of each module's name and module; what it returns False for is left alone.

    Returns:
        The name of each such MLP, and what was done with it or why nothing was.
    """
    lines = []
    for name, module in model.named_modules():
        layers = next((of for of in _LAYERS if {*of[0], of[1]} <= {name for name, _ in module.named_children()}), None)
        if layers is None or isinstance(module, AdoptedMLP) or (only is not None and not only(name, module)):
            continue
        was, found = type(module).__name__, _tried(module, *layers)
        if isinstance(found, Gated):
            module.__class__ = _adopted_class(type(module), found, type(module).forward)  # type: ignore[arg-type]
            lines.append((name or "model", f"{was}, {found.activation} and product in one kernel"))
        else:
            lines.append((name or "model", f"{was}, activation left alone: {found}"))
    return lines


def restore_mlps(model: nn.Module) -> list[str]:
    """Gives MLPs their own class again; returns a line for each.

    Raises:
        ValueError: since then another tool gave one yet another class or forward. Then nothing is restored.
    """
    adopted = {name: module for name, module in model.named_modules() if isinstance(module, AdoptedMLP)}
    for name, module in adopted.items():
        if "forward" in vars(module) or type(module) is not _adopted_class(module._own, module._gated, module._recognised):
            raise ValueError(
                f"restore_mlps: since {name}, a {module._own.__name__}, was replaced, another tool changed its forward or its "
                "class (fully_shard, a parametrization, module.forward = …); undo that first"
            )
    for module in adopted.values():
        module.__class__ = module._own
    return [f"{name or 'model'}: {type(module).__name__} as it was" for name, module in adopted.items()]


def _tried(module: Any, inputs: tuple[str, ...], last: str) -> Gated | str:
    """What it computes, or why it is left alone."""
    own: Any = type(module)
    forward = own.forward
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module) or inspect.unwrap(forward) is not forward:
        return "its forward is wrapped by a decorator or a tool; adopt it before that"
    if len(inspect.signature(forward).parameters) != 2:
        return "its forward takes more than one tensor"
    others = {name: part for name, part in module.named_children() if name not in (*inputs, last)}
    functions = [name for name, part in others.items() if not [*part.children(), *part.parameters()]]
    if len(others) > 1 or len(functions) < len(others):
        return f"it has other parts: {', '.join(others)}"
    function, kind = (functions[0], type(others[functions[0]])) if functions else (None, None)
    sizes = dict.fromkeys(inputs, (6, 10 if len(inputs) == 2 else 20)) | {last: (10, 6)}
    with undisturbed(torch.device("cpu")), torch.enable_grad():
        torch.default_generator.manual_seed(0)
        try:
            clone = clone_of(
                module, torch.randn_like, lambda path, _: nn.Linear(*sizes[path]) if path in sizes else None
            ).double()
            expected = _results(clone, forward)
            for activation in Activation:
                found = Gated(inputs, last, activation.name, function, kind)
                ours = _adopted_class(own, found, forward).forward  # type: ignore[attr-defined]
                if all(
                    torch.allclose(a, b, rtol=_SAME, atol=_SAME) for a, b in zip(expected, _results(clone, ours), strict=True)
                ):
                    return found
        except Exception as error:  # anybody's code
            return f"trying it raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return f"it computes something else than {', '.join(kind.name for kind in Activation)} of its gate times its value"


def _results(module: nn.Module, forward: Callable[[Any, Tensor], Tensor]) -> list[Tensor]:
    """Values and gradients, in training and in evaluation; also where a clamp would be reached."""
    found = []
    for training, size in product((True, False), (4.0, 40.0, 4000.0)):
        module.train(training)
        x = torch.linspace(-3, 3, 42, dtype=torch.float64).view(7, 6).sin().mul(size).requires_grad_()
        y = forward(module, x)
        upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
        found += [y, *torch.autograd.grad(y, [x, *module.parameters()], upstream)]
    return found
