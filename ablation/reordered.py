"""Norm sites for the arms of the parity protocol that are neither `torch` nor `fused`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ablation.order import in_another_order
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
