"""Gated MLPs: the activation of the gate and its product with the value in one kernel, found by trial and replaced in place.

    down_proj(act_fn(gate_proj(x)) * up_proj(x))

A clone with small matrices runs its own forward in fp64 on the CPU. Where one of our activations gives the same values and
gradients, a module of this kind gets a class with our forward, which calls the same linear layers.
"""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..activation import Activation, gated_activation_fn
from ..torch_state import has_hooks
from .adopted import KEEPS, Adopted, Only, is_known, raised, replace, restore
from .recognise import undisturbed
from .results import difference, gradients
from .stand_ins import attributes, clone_of

# Names of the linear layers that give gate and value, or both in one, and of the one behind: Llama, Phi-3, Llama's own code.
_LAYERS = ((("gate_proj", "up_proj"), "down_proj"), (("gate_up_proj",), "down_proj"), (("w1", "w3"), "w2"))


# In PyTorch's operations, for tensors that the kernel does not take.
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class Gated(NamedTuple):
    """What a module computes: last(φ(gate) · value)."""

    inputs: tuple[str, ...]
    last: str
    activation: str
    function: str | None  # its submodule that is φ
    kind: type | None  # the class of that

    def __str__(self) -> str:
        return f"{self.activation} and product in one kernel"


class AdoptedMLP(Adopted):
    """An MLP of somebody's model that runs `gated_activation_fn`."""

    _what = "activation"
    _how: Gated

    @staticmethod
    def _ours(gated: Gated, own: Callable) -> Callable:
        """The forward that runs in place of the module's own."""
        name = [*inspect.signature(own).parameters][1]

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = args if not kwargs else (*args, *kwargs.values()) if [*kwargs] == [name] else ()
            function: Any = None if gated.function is None else getattr(self, gated.function)
            kind = None if function is None else type(function)
            if len(given) != 1 or kind is not gated.kind or (function is not None and has_hooks(function)):
                return own(self, *args, **kwargs)
            gate, value, *_ = *[getattr(self, part)(given[0]) for part in gated.inputs], None
            if is_known(gate) and (value is None or (is_known(value) and value.dtype == gate.dtype)):
                hidden = gated_activation_fn(gate, value, activation=gated.activation)
            else:
                gate, value = gate.chunk(2, -1) if value is None else (gate, value)
                hidden = _PLAIN[gated.activation](gate) * value
            return getattr(self, gated.last)(hidden)

        return forward


def replace_mlps(model: nn.Module, *, only: Only = None) -> list[tuple[str, str]]:
    """Lets gated MLPs compute the activation and the product in one kernel each way, in place.

    Takes modules with linear layers named as those of Llama or Phi-3 if ours gives the same values and gradients. The linear
    layers are called as before. If a hook looks at the activation's module, the module's own forward runs.

    Args:
        model: any module; before DDP, FSDP or torch.compile are put around it.
        only: a function of each module's name and module; what it returns False for is left alone.

    Returns:
        The name of each such MLP, and what was done with it or why nothing was.
    """
    return replace(model, AdoptedMLP, _trial_of, only)


def restore_mlps(model: nn.Module) -> list[str]:
    """Undoes `replace_mlps`; returns a line for each module.

    Raises:
        ValueError: since then another tool gave one yet another class or forward. Then nothing is restored.
    """
    return restore("restore_mlps", model, AdoptedMLP)


def _trial_of(module: nn.Module) -> Callable[[], Gated | str] | None:
    parts = {name for name, _ in module.named_children()}
    layers = next((of for of in _LAYERS if {*of[0], of[1]} <= parts), None)
    return None if layers is None else partial(_tried, module, *layers)


def _tried(module: Any, inputs: tuple[str, ...], last: str) -> Gated | str:
    """What it computes, or why it is left alone."""
    forward: Any = type(module).forward
    if len(inspect.signature(forward).parameters) != 2:
        return "its forward takes more than one tensor"
    others = {name: part for name, part in module.named_children() if name not in (*inputs, last)}
    functions = [name for name, part in others.items() if not [*part.children(), *part.parameters()]]
    functions = [name for name in functions if not isinstance(others[name], nn.Dropout)]  # whose p may be set later
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
            for buffer in clone.buffers():  # a checkpoint may bring other values
                if buffer.is_floating_point():
                    buffer.normal_()
            before = attributes(clone)
            expected = _results(clone, forward)
            if attributes(clone) != before:
                return KEEPS
            for activation in Activation:
                found = Gated(inputs, last, activation.name, function, kind)
                if not difference(expected, _results(clone, AdoptedMLP._ours(found, forward))):
                    return found
        except Exception as error:  # anybody's code
            return f"trying it {raised(error)}"
    return f"it computes something else than {', '.join(kind.name for kind in Activation)} of its gate times its value"


def _results(module: nn.Module, forward: Callable[[Any, Tensor], Tensor]) -> dict[str, Tensor]:
    """Values and gradients, in training and in evaluation; also where a clamp would be reached."""
    found: dict[str, Tensor] = {}
    for training, size in product((True, False), (4.0, 40.0, 4000.0)):
        module.train(training)
        x = torch.linspace(-3, 3, 42, dtype=torch.float64).view(7, 6).sin().mul(size).requires_grad_()
        y = {"y": forward(module, x)}
        results = y | gradients(y, {"x": x, **dict(module.named_parameters())})
        found |= {f"{name}, {training}, {size}": t for name, t in results.items()}
    return found
