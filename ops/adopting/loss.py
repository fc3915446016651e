"""The fused cross-entropy in place of the loss of a transformers model, and back.

    replace_loss(model)         LlamaForCausalLM.loss_function: ForCausalLMLoss → fused cross-entropy
    restore_loss(model)

A causal language model of transformers computes its loss by `model.loss_function(logits, labels, vocab_size, …)`, an attribute
that may be set. What stands there is tried on a few logits: only a loss that computes what ours does is replaced.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..loss import cross_entropy_fn

_IGNORED = -100


class FusedCausalLoss:
    """The loss of next tokens with the arguments of transformers' ForCausalLMLoss.

    A plain object, so that the model has no submodule more, and what was there before stays with it.
    """

    def __init__(self, was: Callable[..., Tensor]) -> None:
        self.was, self.in_place = was, False

    def __call__(
        self, logits: Tensor, labels: Tensor | None, vocab_size: int | None = None, num_items_in_batch: Any = None,
        ignore_index: int = _IGNORED, shift_labels: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        if shift_labels is None:
            if labels is None:
                raise ValueError("fused loss: labels is None, and so is shift_labels; give one of them")
            # Shifting the labels leaves the logits in one piece.
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets, rows = shift_labels.to(logits.device), logits.shape[:-1]
        if targets.numel() == rows.numel():  # of any shape, as in transformers
            targets = targets.reshape(rows)
        if num_items_in_batch is None:
            return cross_entropy_fn(logits, targets, ignore_index=ignore_index, in_place=self.in_place)
        total = cross_entropy_fn(logits, targets, ignore_index=ignore_index, reduction="sum", in_place=self.in_place)
        count = num_items_in_batch
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

    def __str__(self) -> str:
        return getattr(self.was, "__name__", type(self.was).__name__)


def replace_loss(model: nn.Module, *, in_place: bool = False, verbose: bool = True) -> str:
    """Lets a causal language model of transformers compute its loss by `cross_entropy_fn`, on logits as they are.

    transformers' own loss goes through fp32 copies of the logits. A second call changes in_place alone.

    Args:
        model: has `loss_function`, called as transformers' models call it; before DDP or torch.compile are put around it.
        in_place: the logits' memory takes their gradient, which saves as much again. `outputs.logits` of a training step then
            hold the gradient: for training loops that don't read them.
        verbose: print the returned line.

    Returns:
        A line that says what was replaced.

    Raises:
        ValueError: model calls no loss_function, or one that is not the mean cross-entropy of next tokens.
    """
    name = type(model).__name__
    if not calls_loss(model):
        raise ValueError(
            f"replace_loss: {name} calls no loss_function, as transformers' models with a language-model head do; call "
            "cross_entropy_fn where it computes its loss"
        )
    found: Any = model.loss_function
    loss = found if isinstance(found, FusedCausalLoss) else FusedCausalLoss(found)
    if loss is not found:
        if problem := _difference(found, loss):
            raise ValueError(f"replace_loss: {name}.loss_function is {loss}, {problem}; left alone")
        model.loss_function = loss  # type: ignore[assignment]
    loss.in_place = in_place
    was = "already" if loss is found else f"{loss} →"
    line = f"{name}.loss_function: {was} fused cross-entropy{', in place' if in_place else ''}"
    print(f"{line}\n" * verbose, end="")
    return line


def calls_loss(model: nn.Module) -> bool:
    """Whether a forward of its class calls `self.loss_function`, which every model of transformers has."""
    forwards = [inspect.unwrap(vars(cls)["forward"]) for cls in type(model).__mro__ if "forward" in vars(cls)]
    called = any("loss_function" in getattr(getattr(forward, "__code__", None), "co_names", ()) for forward in forwards)
    return called and callable(getattr(model, "loss_function", None))


def restore_loss(model: nn.Module, *, verbose: bool = True) -> str:
    """Undoes `replace_loss`. Returns a line that says so, or "" if there was nothing to undo."""
    found: Any = getattr(model, "loss_function", None)
    if not isinstance(found, FusedCausalLoss):
        return ""
    model.loss_function = found.was  # type: ignore[assignment]
    line = f"{type(model).__name__}.loss_function: {found} as it was"
    print(f"{line}\n" * verbose, end="")
    return line


def _difference(loss: Callable[..., Tensor], ours: Callable[..., Tensor]) -> str:
    """In what a loss differs from ours on a few logits; empty if in nothing."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator, device="cpu")
    labels = torch.randint(7, (2, 5), generator=generator, device="cpu")
    labels[0, 3] = _IGNORED
    for given in ({}, {"num_items_in_batch": 11}, {"shift_labels": labels.flip(0)}):
        try:
            with torch.enable_grad():
                a, b = (_value_and_gradient(fn, logits, labels=labels, vocab_size=7, **given) for fn in (loss, ours))
        except Exception as error:  # anybody's code
            return f"which can't be called as transformers' models do ({type(error).__name__}: {error})"
        if not torch.allclose(a, b, rtol=1e-4, atol=1e-6):
            how = "".join(f" with {argument}" for argument in given)
            return f"which computes something else than the mean cross-entropy of next tokens{how}"
    return ""


def _value_and_gradient(fn: Callable[..., Tensor], logits: Tensor, **given: Any) -> Tensor:
    leaf = logits.clone().requires_grad_()
    value = fn(logits=leaf, **given)
    return torch.cat([value.view(1), torch.autograd.grad(value, leaf)[0].flatten()])
