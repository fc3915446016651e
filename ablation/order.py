"""Norms that sum in another order, as legitimate as the first."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor


def in_another_order(norm: Callable[[Tensor, Tensor], Tensor], r: Tensor) -> Tensor:
    """norm(r), with rows and features of r shuffled before and put back behind it.

    Args:
        norm: called with rows [M, N] and the order int64 [N] in which their features stand, which its weights have to follow.
    """
    rows = r.reshape(-1, r.shape[-1])
    row_order, column_order = (_shuffled(n, r.device) for n in rows.shape)
    y = norm(rows.index_select(0, row_order).index_select(1, column_order), column_order)
    return y.index_select(1, column_order.argsort()).index_select(0, row_order.argsort()).view(r.shape)


@lru_cache
def _shuffled(n: int, device: torch.device) -> Tensor:
    """Always the same order of n things, int64 [n]. Shuffled: a mere reversal would leave vector lanes with what they had."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(n), device="cpu").to(device)
