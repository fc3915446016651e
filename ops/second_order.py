"""Gradients of gradients, where there are none: refused in words, and never taken for zero.

PyTorch's `once_differentiable` refuses only where the upstream gradient has a graph of its own. Where that is a constant, as of
`y.sum()`, it leaves what follows from x and the weights out of a gradient penalty, without a word.
"""

from typing import Any

import torch
from torch import Tensor


def refuse_second_order(name: str, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The same gradients, for a backward pass that is recorded (create_graph=True); another one through them raises."""
    anchor = torch.zeros((), device="cpu", requires_grad=True)  # they have a history, whatever they were computed from
    return _Refused.apply(name, anchor, *gradients)


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, anchor: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.name = name
        return tuple([None if gradient is None else gradient.detach() for gradient in gradients])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{ctx.name}: its gradients can't be differentiated again. torch.func's transforms (grad, jvp, hessian) run the "
            "PyTorch reference, which can; so can torch.nn's norms (restore_norms gives back those that replace_norms took)"
        )
