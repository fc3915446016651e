"""Norm sites for the arms of the parity protocol that are neither `torch` nor `fused`."""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from model.norm import PreNorm
from ops import seeded_dropout


def reorder(model: nn.Module) -> None:
    """From now on the sites of `model` sum their rows, and the gradients of their weights, in another order.

    A norm does not depend on the order of a row's features, nor of the rows; its rounding does. So this changes what PyTorch's
    norms give exactly as much as any other correct program for them may.
    """
    for site in _sites(model):
        site._norm = partial(_reordered, site._norm)  # type: ignore[method-assign]


def _reordered(norm: Callable[..., Tensor], r: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    def in_order(rows: Tensor, order: Tensor) -> Tensor:
        return norm(rows, weight.index_select(0, order), None if bias is None else bias.index_select(0, order))

    return in_another_order(in_order, r)


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
    return torch.randperm(n, generator=torch.Generator().manual_seed(n)).to(device)


def double(model: nn.Module) -> None:
    """Weights and arithmetic in fp64, with the masks of the fp32 arms."""
    model.double()
    for site in _sites(model):
        site._drop = _drop_double  # type: ignore[method-assign]


def _drop_double(x: Tensor, rowscale: Tensor | None, p: float, seed: Tensor | None, stream: int) -> Tensor:
    """PreNorm._drop in fp64: the kernel that makes masks has none, and 1/(1-p) is to be the number that fp32 arms use."""
    if rowscale is not None:
        x = x * rowscale[..., None]
    if p:
        assert seed is not None  # masks are shared
        x = x * seeded_dropout(torch.ones(x.shape, device=x.device), p, seed, stream)
    return x


def _sites(model: nn.Module) -> list[PreNorm]:
    return [module for module in model.modules() if isinstance(module, PreNorm)]
