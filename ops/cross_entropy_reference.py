"""Cross-entropy in PyTorch's own operations: what runs where no kernels do, and what they are tested against.

The formulas are those of `kernels.cross_entropy`, in fp32, or in fp64 for fp64 logits.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NONE, MEAN, SUM = range(3)
REDUCTIONS = {"none": NONE, "mean": MEAN, "sum": SUM}


class LossOptions(NamedTuple):
    """The options of `cross_entropy_fn`, as operators take them."""

    reduction: int
    ignore_index: int
    softcap: float  # 0: none
    z_loss: float
    label_smoothing: float


def losses(logits: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    """[M], of logits [M, V]; 0 where the target is ignored. Differentiable."""
    x = _capped(logits.to(torch.promote_types(logits.dtype, torch.float32)), options)
    found = F.cross_entropy(
        x, targets.long(), ignore_index=options.ignore_index, reduction="none", label_smoothing=options.label_smoothing
    )
    if options.z_loss:
        found = found + (options.z_loss * torch.logsumexp(x, -1).square()).masked_fill(targets == options.ignore_index, 0.0)
    return found


def gradient(logits: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    """[M, V], of each row's loss: in fp32 or fp64."""
    x = _capped(logits.to(torch.promote_types(logits.dtype, torch.float32)), options)
    lse = torch.logsumexp(x, -1, keepdim=True)
    counts = (targets != options.ignore_index)[:, None]
    g = torch.softmax(x, -1) * (1 + 2 * options.z_loss * lse) - options.label_smoothing / x.shape[1]
    column = targets.long()[:, None].where(counts, 0)
    g.scatter_add_(1, column, g.new_full((), options.label_smoothing - 1.0).expand(column.shape))
    if options.softcap:
        g *= 1 - (x / options.softcap).square()
    return g.masked_fill_(~counts, 0.0)


def _capped(x: Tensor, options: LossOptions) -> Tensor:
    return options.softcap * torch.tanh(x / options.softcap) if options.softcap else x


def one_pass(logits: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    """The losses [M]; the logits become the gradient of each row's loss."""
    found = losses(logits, targets, options)
    logits.copy_(gradient(logits, targets, options))
    return found


def finish(losses: Tensor, targets: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """[M], their sum, or their mean over the targets that count; and 1 / count for the mean, [1], else nothing, [0]."""
    if options.reduction != MEAN:
        return losses if options.reduction == NONE else losses.sum(), losses.new_empty(0)
    count = (targets != options.ignore_index).sum().to(losses.dtype)
    return losses.sum() / count, (1 / count).view(1)
