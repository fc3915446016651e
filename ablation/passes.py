"""One forward and backward pass of somebody's model, and all that it gives."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ablation.judgement import row_scales

Loss = Callable[[Any], Tensor]


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
    """All that is compared, of one model and batch, by name. sites, rows: as for `row_scales`."""
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
    return found | {f"row scale of {name}": scale for name, scale in scales.items()}


def default_loss() -> Loss:
    """A loss: the output's `loss`, a scalar in it, or a projection of its first tensor on a random one, which it keeps."""
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
    """The model's, or of one without parameters its batch's."""
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
    """Evaluation mode, or training mode with seeded generators; then modules and generators as they were."""
    training = {module: module.training for module in model.modules()}
    model.train(seed is not None)
    elsewhere = device.type != "cpu"
    with torch.random.fork_rng([device] if elsewhere else [], device_type=device.type if elsewhere else "cuda"):
        if seed is not None:
            torch.manual_seed(seed)
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
