"""The loss of next tokens, from the hidden states that the head takes."""

from collections.abc import Callable
from functools import cache
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema import LossConfig, LossImpl
from ops import linear_cross_entropy_fn

# For torch.compile, of a model with this loss in it: maximum and sum of a row of logits in two plain passes. The second finds
# the row in cache: 1.7 ms for GPT-2's 32768 rows on an H200; in one pass, with a sum corrected for each new maximum, 2.2.
TWO_PASSES: dict[str, str | int | bool | Callable] = {"online_softmax": False}


def next_token_loss(hidden: Tensor, weight: Tensor, targets: Tensor, cfg: LossConfig, training: bool) -> Tensor:
    """The mean over rows of -log softmax(logits)[target] in nats: a scalar, computed in fp32, in fp64 for fp64 logits.

    Args:
        hidden: [N, width].
        weight: [V, width] of the head; logits = hidden @ weight.T.
        targets: [N] int64; rows of -100 don't count.
        cfg: which operator computes it; the cap of the logits; and, in training, the weight of log² Σ exp(logits).
    """
    z_loss = cfg.z_loss if training else 0.0  # it regularises, and is no part of what validation measures
    match cfg.impl:
        case LossImpl.fused:
            return linear_cross_entropy_fn(hidden, weight, targets, chunks=cfg.chunks, softcap=cfg.softcap, z_loss=z_loss)
        case LossImpl.compiled:
            # Eager PyTorch goes through several fp32 copies of the logits, by far GPT-2's largest tensor; compiled, they are
            # read as they are, and only their gradient is written. In a model that is compiled whole, the loss is a part.
            function = cross_entropy if torch.compiler.is_compiling() else _compiled()
        case LossImpl.torch:
            function = cross_entropy
        case _:
            assert_never(cfg.impl)
    return function(F.linear(hidden, weight), targets, cfg.softcap, z_loss)


def cross_entropy(logits: Tensor, targets: Tensor, softcap: float | None, z_loss: float) -> Tensor:
    """In PyTorch's own operators, as people write it."""
    x = softcapped(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)
    loss = F.cross_entropy(x, targets)
    if z_loss:
        counts = targets != -100
        loss = loss + z_loss * (x.logsumexp(-1).square() * counts).sum() / counts.sum()
    return loss


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """Gemma 2's cap (arXiv:2408.00118): c · tanh(logits / c)."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(cross_entropy, options=TWO_PASSES)
