"""Somebody's models, as `adoption` takes them: checks of what is given, and one forward and backward pass with all its results.

A model that somebody fused by hand has no modules of ours. So model_b only has to differ from model_a in something.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ablation.rounding import row_scales

Loss = Callable[[Any], Tensor]
SHOWN = 5  # names in a message
_WRAPPED = "_orig_mod"  # what torch.compile's wrapper calls the model that it was given
_COMPILED_IN_PLACE = "_compiled_call_impl"  # what model.compile() leaves on the model
_LEFT_BY_COMPILE = {_COMPILED_IN_PLACE, "_is_torch_compile"}  # the latter by its wrapper, on the model inside
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TELL_NOTHING = {*vars(nn.Module()), *_LEFT_BY_COMPILE, "_super_module_initialized"}  # attributes; hooks are looked at apart


def check_before_and_after(function: str, model_a: Any, model_b: Any) -> None:
    """Looks through torch.compile.

    Raises:
        TypeError: a model is no module.
        ValueError: both are one model, norms of model_a are fused, or nothing is replaced in model_b.
    """
    for argument, model in (("model_a", model_a), ("model_b", model_b)):
        if not isinstance(model, nn.Module):
            raise TypeError(f"{function}: {argument} must be a torch.nn.Module, got {type(model).__name__}")
    a, b = _modules(model_a), _modules(model_b)
    if a[""] is b[""]:
        raise ValueError(
            f"{function}: model_a and model_b are one and the same model, expected it before and after; copy it ahead of "
            "replace_norms (before = copy.deepcopy(model)), and give the copy as model_a"
        )
    if fused := [name or "model_a itself" for name, module in a.items() if _is_fused_norm(module)]:
        raise ValueError(
            f"{function}: model_a must be the model as it was, but {len(fused)} of its norms are fused: {_listed(fused)}. "
            "Copy it ahead of replace_norms (before = copy.deepcopy(model)), or restore_norms a copy of it; if it is model_b "
            "that is as it was, exchange the two. To see what one more step of adoption adds, compare the model as it was with "
            "each"
        )
    if a.keys() == b.keys() and all(_same(module, b[name]) for name, module in a.items()):
        raise ValueError(
            f"{function}: nothing is replaced in model_b: all its modules have the classes and attributes of model_a's. Call "
            "replace_norms on it, whose lines say why if a norm is left alone"
        )


def check_autocast(caller: str, autocast: object) -> None:
    """Raises ValueError for a dtype that torch would refuse less clearly, or ignore with a warning."""
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"{caller}: autocast must be torch.bfloat16, torch.float16 or None, got {autocast!r}")


def scalar(caller: str, loss: Loss) -> Loss:
    """Wraps the loss, so that it raises ValueError if its value is no scalar.

    Raises:
        TypeError: loss is no function.
    """
    if not callable(loss):
        raise TypeError(f"{caller}: loss must be a function of the model's output, got {loss!r}")

    def checked(output: Any) -> Tensor:
        value = loss(output)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{caller}: loss must give a tensor of one number, got {got}")
        return value

    return checked


def check_not_compiled(model_a: nn.Module, model_b: nn.Module) -> None:
    """
    Raises:
        ValueError: a model or a part of it is compiled, so that the forwards of its norms can't be exchanged.
    """
    for argument, model in (("model_a", model_a), ("model_b", model_b)):
        for name, module in model.named_modules():
            at = f"{argument}.{name}" if name else argument
            if _is_wrapper(module):
                todo = f"{at}.{_WRAPPED}, the model that torch.compile was given"
                todo = f"a model with {todo}, in its place" if name else todo
            elif vars(module).get(_COMPILED_IN_PLACE) is not None:
                todo = f"copy.deepcopy({argument}), which leaves out what .compile() did"
            elif _is_compiled(vars(module).get("forward")):
                todo = f"the model without its compiled forward (del {at}.forward)"
            else:
                continue
            raise ValueError(f"check_parity: {at} is compiled, expected models that are not; pass {todo}. measure takes both")


def check_same_parameters(model_a: nn.Module, model_b: nn.Module) -> None:
    """
    Raises:
        ValueError: names, shapes, dtypes, values or requires_grad differ.
    """
    a, b = dict(model_a.named_parameters()), dict(model_b.named_parameters())
    if a.keys() != b.keys():
        only = _listed(sorted(a.keys() ^ b.keys()))
        raise ValueError(f"check_parity: the models must have parameters of the same names; only one of them has {only}")
    for name, p in a.items():
        if p.requires_grad != b[name].requires_grad:
            raise ValueError(f"check_parity: {name} requires a gradient in one model only; freeze it in both or in neither")
        if p.shape != b[name].shape or p.dtype != b[name].dtype or not torch.equal(p, b[name].to(p.device)):
            raise ValueError(f"check_parity: {name} differs between the models; load the state_dict of one into the other")


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by the names that they have without torch.compile. The model itself has the name ''."""
    return {
        ".".join(part for part in name.split(".") if part != _WRAPPED): module
        for name, module in model.named_modules(remove_duplicate=False)
        if not _is_wrapper(module)
    }


def _is_wrapper(module: nn.Module) -> bool:
    return _WRAPPED in module._modules


def _is_compiled(function: Any) -> bool:
    # torch.compiler.disable leaves the first attribute too
    return hasattr(function, "_torchdynamo_orig_callable") and not hasattr(function, "_torchdynamo_disable")


def _is_fused_norm(module: nn.Module) -> bool:
    """Whether a module is a norm of `ops`, or of a copy of it: the installed `prenorm` or a folder."""
    for cls in type(module).__mro__:
        package = sys.modules.get(cls.__module__.rpartition(".")[0])
        norms = [getattr(package, name, None) for name in ("LayerNorm", "RMSNorm")]
        if hasattr(package, "replace_norms") and cls in norms:
            return True
    return False


def _same(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules compute the same, as far as classes, hooks and attributes show. In doubt: no."""
    if type(a) is not type(b):
        return False
    if any([*getattr(a, hooks).values()] != [*getattr(b, hooks).values()] for hooks in _HOOKS):
        return False
    # A forward that somebody put on the instance is an attribute too.
    names = (a.__dict__.keys() | b.__dict__.keys()) - _TELL_NOTHING
    return all(name in a.__dict__ and name in b.__dict__ and _equal(a.__dict__[name], b.__dict__[name]) for name in names)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor | nn.Module) and isinstance(b, Tensor | nn.Module):
        return True  # values are compared as parameters are, and modules by their names
    try:
        return a is b or bool(a == b)
    except Exception:  # an array has no one answer, and whose == raises has none
        return False


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + ", …" * (len(names) > SHOWN)


@dataclass(frozen=True)
class How:
    loss: Loss
    seed: int | None  # None: evaluation mode
    autocast: torch.dtype | None
    floats: torch.dtype | None  # what the floats of the batch become; None: they stay


def results_of(
    model: nn.Module,
    sites: Mapping[str, nn.Module],
    how: How,
    rows: dict[str, Tensor],
    batch: Any,
) -> dict[str, Tensor]:
    """All tensors that are compared, by name, of one model and batch. `sites` and `rows` are those of `row_scales`."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if how.floats is not None:
        batch = tree_map(lambda x: x.to(how.floats) if isinstance(x, Tensor) and x.is_floating_point() else x, batch)
    device = device_of(model, batch)
    # A mask that forward makes should be in the reference's dtype too: torch's attention takes one in fp32 beside an fp64
    # query, and on CPUs computes nonsense. But what is drawn in another dtype is another number.
    default = how.floats if how.floats is not None and how.seed is None else torch.get_default_dtype()
    with (
        _default_dtype(default),
        _mode(model, how.seed, device),
        row_scales(sites, rows, how.autocast) as scales,
        autocasting(device, how.autocast),
    ):
        output = call(model, batch)
        value = how.loss(output)
    reached = bool(parameters) and value.requires_grad
    gradients = (
        torch.autograd.grad(value, list(parameters.values()), allow_unused=True) if reached else [None] * len(parameters)
    )
    outputs = [t for t in float_tensors(output) if t.dim() > 0]
    found = {f"output {i}" if len(outputs) > 1 else "output": t.detach() for i, t in enumerate(outputs)}
    found["loss"] = value.detach()
    # A parameter that the loss does not reach has a gradient of zeros, so that one which is lost in model_b is seen.
    found |= {
        f"gradient of {name}": torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(parameters.items(), gradients, strict=True)
    }
    found |= {f"row scale of {name}": scale for name, scale in scales.items()}
    return {name: t for name, t in found.items() if t.numel()}  # an empty parameter has nothing to compare


def default_loss() -> Loss:
    """A loss: the output's `loss`, a scalar in the output, or a fixed random projection of its first tensor."""
    drawn: dict[tuple[torch.Size, torch.device], Tensor] = {}  # once: drawing takes longer than many a model's step

    def loss(output: Any) -> Tensor:
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, Tensor):
            return own
        tensors = float_tensors(output)
        scalars = [t for t in tensors if t.dim() == 0]
        if scalars:
            return scalars[0]
        if not tensors:
            raise ValueError(f"loss: there is no float tensor in the model's output, a {type(output).__name__}; pass loss=")
        y = tensors[0]
        if (key := (y.shape, y.device)) not in drawn:
            # In one dtype whatever the default is: drawn in fp64 they are other numbers, and the reference has another loss.
            generator = torch.Generator().manual_seed(0)
            drawn[key] = torch.randn(y.shape, generator=generator, dtype=torch.float32, device="cpu").to(y.device)
        return (y.to(torch.promote_types(y.dtype, torch.float32)) * drawn[key]).sum() / math.sqrt(y.numel())

    return loss


def device_of(model: nn.Module, batch: Any) -> torch.device:
    """The device of the model, or of its batch if the model has no parameters."""
    tensors = [*model.parameters(), *(t for t in tree_leaves(batch) if isinstance(t, Tensor))]
    return tensors[0].device if tensors else torch.device("cpu")


def call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def float_tensors(output: Any) -> list[Tensor]:
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


@contextmanager
def _mode(model: nn.Module, seed: int | None, device: torch.device) -> Iterator[None]:
    """Evaluation mode, or training mode with seeded generators. Restores modules and generators afterwards."""
    training = {module: module.training for module in model.modules()}
    model.train(seed is not None)
    elsewhere = device.type != "cpu"
    with torch.random.fork_rng([device] if elsewhere else [], device_type=device.type if elsewhere else "cuda"):
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all other devices too
            if elsewhere:
                module = torch.get_device_module(device)
                with module.device(device) if device.type == "cuda" else nullcontext():
                    module.manual_seed(seed)
        try:
            yield
        finally:
            for module, mode in training.items():
                module.training = mode


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def autocasting(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
