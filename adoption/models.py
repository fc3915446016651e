"""Somebody's models, as `check` takes them: what is refused, copies with other norms, and one forward and backward pass."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ablation.rounding import Keep, hooked, in_another_order, row_scales
from ops.adopting import lazy
from ops.adopting.norms import AdoptedNorm
from ops.adopting.recognise import Formula, compute, may_be_a_norm, recognise

Loss = Callable[[Any], Tensor]
SHOWN = 5  # names in a message
TARGETS = ("labels", "label", "targets", "target")  # arguments of a forward with which it computes a loss
WRAPPED = "_orig_mod"  # what torch.compile's wrapper calls the model that it was given


def check_before_and_after(function: str, model_a: nn.Module, model_b: nn.Module) -> None:
    """Raises ValueError if both are one model, compiled or not, or norms of model_a are fused."""
    if getattr(model_a, WRAPPED, model_a) is getattr(model_b, WRAPPED, model_b):
        raise ValueError(
            f"{function}: model_a and model_b are one and the same model, expected it before and after; copy it ahead of "
            "replace_norms (before = copy.deepcopy(model)), and give the copy as model_a"
        )
    if fused := fused_norms(model_a):
        raise ValueError(
            f"{function}: model_a must be the model as it was, but {len(fused)} of its norms are fused: {_listed(fused)}. "
            "Copy it ahead of replace_norms (before = copy.deepcopy(model)), or restore_norms a copy of it; if it is model_b "
            "that is as it was, exchange the two"
        )


def check_comparable(model_a: nn.Module, model_b: nn.Module) -> None:
    """Raises ValueError if a part of a model is compiled, as its norms' forwards can't be exchanged, or parameters differ."""
    for argument, model in (("model_a", model_a), ("model_b", model_b)):
        for module in model.modules():
            if WRAPPED in module._modules or vars(module).get("_compiled_call_impl") is not None:
                raise ValueError(
                    f"check_parity: {argument} is compiled, expected models that are not; pass what torch.compile was given "
                    f"(.{WRAPPED}), or a copy.deepcopy, which leaves out what .compile() did. measure takes both"
                )
    a, b = dict(model_a.named_parameters()), dict(model_b.named_parameters())
    if only := sorted(a.keys() ^ b.keys()):
        raise ValueError(f"check_parity: parameters must have the same names in both models; only one has {_listed(only)}")
    for name, p in a.items():
        if p.requires_grad != b[name].requires_grad:
            raise ValueError(f"check_parity: {name} requires a gradient in one model only; freeze it in both or in neither")
        if p.shape != b[name].shape or p.dtype != b[name].dtype or not torch.equal(p, b[name].to(p.device)):
            raise ValueError(f"check_parity: {name} differs between the models; load the state_dict of one into the other")


FUSED = ("_Fused", "AdoptedGatedNorm")  # names of the classes


def fused_norms(model: nn.Module) -> list[str]:
    """The names of the norms that are those of `ops`, or of a copy of it: the installed `prenorm` or a folder."""
    ours = {
        name.replace(f"{WRAPPED}.", "") or "model_a itself": any(cls.__name__ in FUSED for cls in type(module).__mro__)
        for name, module in model.named_modules()
    }
    return [name for name, is_ours in ours.items() if is_ours]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + ", …" * (len(names) > SHOWN)


# ---- copies with other norms -------------------------------------------------------------------------------------------------


def norms_of(model: nn.Module) -> dict[str, Formula]:
    """The norms of a model by name, with their formula."""
    return {
        name: formula
        for name, module in model.named_modules()
        if may_be_a_norm(module) and isinstance(formula := recognise(module), Formula)
    }


def norms_of_attention(model: nn.Module) -> set[str]:
    """The names of the norms that run with rotary positions, as long as no hook looks at them."""
    norms = {name: getattr(getattr(module, "_how", None), "norms", ()) for name, module in model.named_modules()}
    return {f"{name}.{norm}" if name else norm for name, of in norms.items() for norm in of}


def exact_copy(model: nn.Module, norms: Mapping[str, Formula], dtype: torch.dtype) -> nn.Module:
    """A copy in a wider dtype. Its norms are computed from their formula, since modules may round to fp32 inside."""

    def by_formula(module: nn.Module, formula: Formula, x: Tensor) -> Tensor:
        return compute(formula, module._parameters, x).to(x.dtype)  # type: ignore[arg-type]

    model = copy.deepcopy(model).to(dtype)
    eager: Any = getattr(model, "set_experts_implementation", None)
    if callable(eager):  # transformers: grouped matrix products take no fp64
        eager("eager")
    return _with_norms(model, norms, by_formula)


def reordered_copy(model: nn.Module, norms: Mapping[str, Formula]) -> nn.Module:
    """A copy whose norms sum in another order."""

    def reordered(module: nn.Module, formula: Formula, x: Tensor) -> Tensor:
        def norm(rows: Tensor, order: Tensor) -> Tensor:
            clone = object.__new__(type(module))
            weights = {name: p if p is None else p.index_select(0, order) for name, p in module._parameters.items()}
            clone.__dict__ |= vars(module) | {"_parameters": weights}
            return type(module).forward(clone, rows)

        return in_another_order(norm, x)

    return _with_norms(copy.deepcopy(model), norms, reordered)


def _with_norms(model: nn.Module, norms: Mapping[str, Formula], norm: Callable[..., Tensor]) -> nn.Module:
    """The model, with `norm` in the place of the norms' forwards where they are called with a tensor and nothing else."""
    for name, formula in norms.items():
        module = model.get_submodule(name)

        def forward(*args: Any, _of: Any = (module, formula), _own: Any = module.forward, **kwargs: Any) -> Any:
            plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
            return norm(*_of, *args) if plain else _own(*args, **kwargs)

        module.forward = forward
    return model


# ---- one pass ----------------------------------------------------------------------------------------------------------------


def results_of(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    norms: Iterable[str] = (),
    rows: dict[str, Tensor] | None = None,
    seed: int | None = None,
    autocast: torch.dtype | None = None,
    floats: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """All tensors that are compared, by name, of one forward and backward pass.

    Args:
        norms: names of modules whose rows' scales are compared with `rows`, which the first model fills: see `row_scales`.
        seed: of training mode; None: evaluation mode.
        floats: what the floats of the batch become; None: they stay.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    batch = tree_map(partial(_own_leaf, floats=floats), batch)
    device = device_of(model, batch)
    sites = {name: model.get_submodule(name) for name in norms}
    with _as_before(model, device), row_scales(sites, {} if rows is None else rows, autocast, watched) as scales:
        if floats is not None and seed is None:
            # A mask that forward makes should be in the reference's dtype too: torch's attention takes one in fp32 beside an
            # fp64 query, and on CPUs computes nonsense. But what is drawn in another dtype is another number.
            torch.set_default_dtype(floats)
        model.train(seed is not None)
        if seed is not None:
            torch.manual_seed(seed)
        with autocasting(device, autocast):
            output = call(model, batch)
            value = loss(output)
    gradients = _gradients(value, [*parameters.values()])
    outputs = [t for t in float_tensors(output) if t.dim() > 0]
    found = {f"output {i}" if len(outputs) > 1 else "output": t.detach() for i, t in enumerate(outputs)}
    if loss is not default_loss or own_loss(output) is not None:  # not of a projection, whose output is compared itself
        found["loss"] = value.detach()
    # A parameter that the loss does not reach has a gradient of zeros, so that one which is lost in model_b is seen.
    for (name, p), g in zip(parameters.items(), gradients, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(p) if g is None else g
    found |= {f"row scale of {name}": scale for name, scale in scales.items()}
    return {name: t for name, t in found.items() if t.numel()}  # an empty parameter has nothing to compare


@contextmanager
def watched(sites: Mapping[str, nn.Module], keep: Keep) -> Iterator[None]:
    """As `hooked`; but an adopted norm that has a hook would compute nothing together with the sum before it."""
    adopted = {site: name for name, site in sites.items() if isinstance(site, AdoptedNorm)}

    def watch(what: Any, x: object, y: Any = None) -> None:
        if what in adopted:
            with torch.no_grad():  # so that what waits for its sum goes on waiting
                keep(adopted[what], lazy.settled(y))

    with hooked({name: site for name, site in sites.items() if site not in adopted}, keep):
        lazy.WATCH = watch
        try:
            yield
        finally:
            lazy.WATCH = None


def _own_leaf(x: Any, floats: torch.dtype | None) -> Any:
    """A tensor of a batch, without what gradients it has, or came from."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().to(floats or x.dtype).requires_grad_(x.requires_grad)


def _gradients(value: Tensor, parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """By backward, as reentrant checkpointing refuses torch.autograd.grad. Those that were there before are there again."""
    before = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        if value.requires_grad:
            value.backward()
        return [p.grad for p in parameters]
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


@contextmanager
def _as_before(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards modes, generators and the default dtype are what they were."""
    training, dtype = {module: module.training for module in model.modules()}, torch.get_default_dtype()
    elsewhere = device.type != "cpu"
    with torch.random.fork_rng([device] if elsewhere else [], device_type=device.type if elsewhere else "cuda"):
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            for module, mode in training.items():
                module.training = mode


def own_loss(output: Any) -> Tensor | None:
    """The output's `loss`, or a scalar in it."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return own if isinstance(own, Tensor) else next((t for t in float_tensors(output) if t.dim() == 0), None)


def default_loss(output: Any) -> Tensor:
    """The output's own loss, or a fixed random projection of its first tensor."""
    own = own_loss(output)
    if own is not None:
        return own
    tensors = float_tensors(output)
    if not tensors:
        raise ValueError(f"loss: there is no float tensor in the model's output, a {type(output).__name__}; pass loss=")
    y = tensors[0]
    return (y.to(torch.promote_types(y.dtype, torch.float32)) * _projection(y.shape, y.device)).sum() / math.sqrt(y.numel())


@lru_cache(maxsize=4)  # drawing takes longer than many a model's step
def _projection(shape: torch.Size, device: torch.device) -> Tensor:
    # In one dtype whatever the default is: drawn in fp64 they are other numbers, and the reference has another loss.
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)


def left_out(model: nn.Module, batch: Any, has_loss: bool) -> str:
    """What a reader of a check must know of how the model was called: keys that its forward does not name, and a loss that it
    could have computed. Empty if there is nothing."""
    named = inspect.signature(model.forward).parameters
    words = ""
    if unknown := [key for key in batch if key not in named] if isinstance(batch, Mapping) else []:
        words = f" The forward of {type(model).__name__} names no {', '.join(unknown)}, which batch has."
    if not has_loss and (targets := [name for name in named if name in TARGETS]):
        words += (
            f" It takes {' and '.join(targets)}, and returned no loss, so a projection of its output stands in for one: put "
            "them into batch, or pass loss=."
        )
    return words


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


def autocasting(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"autocast is {dtype!r}, expected a dtype such as torch.bfloat16, or None")
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
