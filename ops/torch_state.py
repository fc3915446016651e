"""What PyTorch does to operator calls at the moment, and the private names of torch and Triton that operators and launches use.

The short way past the dispatcher is for calls that nobody watches. Where a name of torch is missing that only this question
needs, no call takes the short way: all go through the dispatcher, which is slower and gives the same bits. It is the same with
the names of Triton, which start a compiled kernel without its look at each argument.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

PLAIN = frozenset((Tensor, torch.nn.Parameter))
_STRIDED = torch.strided

# Without it, autograd records a kernel's operators once more, in a Function's forward, where it records nothing.
_AutoDispatchBelowAutograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", nullcontext)
# Without it, every module counts as one with hooks.
_has_any_global_hook: Any = getattr(torch.nn.modules.module, "_has_any_global_hook", lambda: True)
# Without it, torch.func differentiates the operators by their registered formulas.
_are_functorch_transforms_active: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)

try:
    from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack

    torch._C._are_functorch_transforms_active()
    _KNOWN = forward_ad._current_level < 0
except (AttributeError, ImportError):
    _KNOWN = False


def is_eager(tensors: Iterable[Any]) -> bool:
    """Whether all that are not None are plain tensors, and nobody watches or rewrites operator calls.

    Plain is a dense tensor or parameter. What is stored under z.conj().imag has the other sign; the dispatcher knows.

    Dynamo and make_fx must see an operator; so must FakeTensor and every other dispatch mode (flop counters, selective
    checkpointing) and tensor subclass, functorch's transforms, whose wrappers have the type Tensor, torch-function modes
    and jit.trace.
    """
    if (
        torch.compiler.is_compiling()
        or not _KNOWN
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _are_functorch_transforms_active()
        or _get_tracing_state()
        or forward_ad._current_level >= 0
    ):
        return False
    for t in tensors:  # noqa: SIM110 all() takes 0.6 µs more
        if t is not None and (type(t) not in PLAIN or t.layout is not _STRIDED or t.is_neg()):
            return False
    return True


def kinds_of(tensors: Iterable[Tensor | None]) -> tuple | None:
    """Their device and the dtype of each. None where one is not plain, or on another device. In one pass, as it is part of
    every eager backward."""
    kinds: list[Any] = []
    device = None
    for t in tensors:
        if t is None:
            kinds.append(None)
        elif type(t) in PLAIN and t.layout is _STRIDED and not t.is_neg():
            if device is None:
                device = t.device
                kinds.append(device)
            elif t.device != device:
                return None
            kinds.append(t.dtype)
        else:
            return None
    return tuple(kinds)


def has_tangents() -> bool:
    """Whether forward-mode differentiation is on; the norm has no formula for it, and autograd must be there to say so."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def below_autograd(op: Callable, *arguments: Any, **named: Any) -> Any:
    with _AutoDispatchBelowAutograd():
        return op(*arguments, **named)


def saved_through() -> Any:
    """The hook that tensors which are saved for backward go through, as under activation checkpointing; None without one."""
    hooks = None if torch.compiler.is_compiling() else torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def transformed_by_func() -> bool:
    """Whether any of torch.func's transforms is on, vmap among them."""
    return not torch.compiler.is_compiling() and _are_functorch_transforms_active()


def product_dtype(weight: Tensor) -> torch.dtype:
    """In which F.linear would compute: autocast's, or else the weight's."""
    device = weight.device.type
    autocasts = device != "meta" and torch.is_autocast_enabled(device)  # which knows no autocast
    return torch.get_autocast_dtype(device) if autocasts else weight.dtype


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Its apply without the Python code that is for functorch, which takes longer than a launch: for eager calls."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def known_to_inductor(*ops: Any) -> None:
    """Tells torch.compile's backend that it is to call these operators as they are, which it would find out by itself.

    PyTorch 2.11 then first writes down all of the graph that they depend on, for a log that nobody has asked for. Behind
    twelve blocks with two fused norms each that takes for ever: a text for each path through the residual stream.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    for op in ops if hasattr(lowering, "make_fallback") else ():
        if op not in lowering.lowerings:
            lowering.make_fallback(op, warn=False)


def has_hooks(module: torch.nn.Module, but: str = "") -> bool:
    """Whether anybody but the module's class sees what it is given and what it gives: hooks other than that with the key `but`,
    hooks of all modules, or a forward that a tool has put on the instance."""
    after, ahead = module._forward_hooks, module._forward_pre_hooks
    if (after or ahead) and len(after) + len(ahead) > (but in after or but in ahead):
        return True
    return bool(module._backward_hooks or module._backward_pre_hooks or "forward" in module.__dict__ or _has_any_global_hook())


def triton_internals() -> Any:
    """With `CompiledKernel`, `driver` and `knobs` of Triton, or None: every launch then goes through Triton's own dispatch."""
    try:
        from triton import knobs
        from triton.compiler import CompiledKernel
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        own_launch = "".join(inspect.getsource(JITFunction.run).split())
    except (ImportError, AttributeError, OSError, TypeError):
        return None
    known = _LAUNCH in own_launch and hasattr(knobs.runtime, "launch_enter_hook") and hasattr(knobs.runtime, "launch_exit_hook")
    return SimpleNamespace(CompiledKernel=CompiledKernel, driver=driver, knobs=knobs) if known else None


# How Triton 3.6 to 3.9 start a compiled kernel. In another order the numbers would be other arguments' and no error.
_LAUNCH = (
    "kernel.run(grid_0,grid_1,grid_2,stream,kernel.function,kernel.packed_metadata,launch_metadata,"
    "knobs.runtime.launch_enter_hook,knobs.runtime.launch_exit_hook,*bound_args.values())"
)


def start_of(compiled: Any) -> tuple[Callable[..., None], tuple]:
    """What starts a compiled kernel, and what it is called with between stream and arguments: as in _LAUNCH, without hooks."""
    return compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
