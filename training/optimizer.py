"""AdamW with weight decay on matrices only."""

import torch
from torch import nn

from configs.schema import OptimConfig


def adamw(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW over two groups: matrices decay; vectors (biases, norm weights) and everything in a norm do not."""
    decay, no_decay = parameter_groups(model)
    device = next(model.parameters()).device
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": optim.weight_decay}, {"params": no_decay, "weight_decay": 0.0}],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=device.type in ("cuda", "cpu", "mps"),  # one kernel for the whole update; these devices have it
    )


def parameter_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(decayed, not decayed). Decided by dimensions, never by class: an isinstance test misses a norm it doesn't know, and the
    fused norms would decay where PyTorch's don't.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in parameters if p.ndim >= 2]
    no_decay = [p for p in parameters if p.ndim < 2]

    decayed, kept = {id(p) for p in decay}, {id(p) for p in no_decay}
    assert not decayed & kept, "a parameter is in both optimizer groups"
    assert decayed | kept == {id(p) for p in parameters}, "a parameter is in no optimizer group"
    for name, p in model.named_parameters():
        if p.requires_grad and "norm" in name.lower():
            assert id(p) in kept, f"norm parameter {name} {tuple(p.shape)} would be decayed"
    return decay, no_decay


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
