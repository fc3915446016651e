"""The fused cross-entropy in place of the loss of a transformers model, and back.

    replace_loss(model)         LlamaForCausalLM.loss_function: ForCausalLMLoss → fused cross-entropy
    restore_loss(model)

A causal language model of transformers computes its loss by `model.loss_function(logits, labels, vocab_size, …)`, an attribute
that may be set. What stands there is tried on a few logits: only a loss that computes what ours does is replaced.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..cross_entropy import cross_entropy_fn

_IGNORED = -100


class FusedCausalLoss:
    """The loss of next tokens with the arguments of transformers' ForCausalLMLoss.

    A plain object, so that the model has no submodule more, and what was there before stays with it.
    """

    def __init__(self, was: Callable[..., Tensor], own: Callable[..., Tensor] | None, in_place: bool) -> None:
        self.was, self.in_place = was, in_place
        self.own = own  # what the model itself had in the attribute; None: what its class has

    def __call__(
        self, logits: Tensor, labels: Tensor | None, vocab_size: int | None = None, num_items_in_batch: Any = None,
        ignore_index: int = _IGNORED, shift_labels: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        if shift_labels is None:
            if labels is None:
                raise ValueError("fused loss: labels is None, and so is shift_labels; give one of them")
            # Shifting the labels leaves the logits in one piece.
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.to(logits.device)
        if num_items_in_batch is None:
            return cross_entropy_fn(logits, targets, ignore_index=ignore_index, in_place=self.in_place)
        total = cross_entropy_fn(logits, targets, ignore_index=ignore_index, reduction="sum", in_place=self.in_place)
        count = num_items_in_batch
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)


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
        TypeError: model is no module.
        ValueError: model has no loss_function, or one that computes something else than the mean cross-entropy of next tokens.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"replace_loss: model must be a torch.nn.Module, got {type(model).__name__}")
    found = getattr(model, "loss_function", None)
    name = type(model).__name__
    if not callable(found):
        raise ValueError(
            f"replace_loss: {name} has no loss_function, as transformers' models with a language-model head have; call "
            "cross_entropy_fn where it computes its loss"
        )
    if isinstance(found, FusedCausalLoss):
        found.in_place = in_place
        was = found.was
    else:
        was = found
        if problem := _differs(was):
            raise ValueError(f"replace_loss: {name}.loss_function is {_called(was)}, {problem}; left alone")
        owner: Any = model
        owner.loss_function = FusedCausalLoss(was, vars(model).get("_loss_function"), in_place)
    line = f"{name}.loss_function: {_called(was)} → fused cross-entropy{', in place' if in_place else ''}"
    if verbose:
        print(line)
    return line


def restore_loss(model: nn.Module, *, verbose: bool = True) -> str:
    """Undoes `replace_loss`. Returns a line that says so, or "" if there was nothing to undo.

    Raises:
        TypeError: model is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"restore_loss: model must be a torch.nn.Module, got {type(model).__name__}")
    found = getattr(model, "loss_function", None)
    if not isinstance(found, FusedCausalLoss):
        return ""
    owner: Any = model
    if found.own is None and "_loss_function" in vars(model):
        del owner._loss_function  # where transformers keeps what is set
    else:
        owner.loss_function = found.was
    line = f"{type(model).__name__}.loss_function: {_called(found.was)} as it was"
    if verbose:
        print(line)
    return line


def _called(loss: Callable) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _differs(loss: Callable[..., Tensor]) -> str:
    """In what a loss differs from ours on a few logits; empty if in nothing."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator, device="cpu")
    labels = torch.randint(7, (2, 5), generator=generator, device="cpu")
    labels[0, 3] = _IGNORED
    ours = FusedCausalLoss(loss, None, in_place=False)
    for given in ({}, {"num_items_in_batch": 11}, {"shift_labels": labels.flip(0)}):
        results = []
        for fn in (loss, ours):
            leaf = logits.clone().requires_grad_()
            try:
                with torch.enable_grad():
                    value = fn(logits=leaf, labels=labels, vocab_size=7, **given)
                    value.backward()
            except Exception as error:  # anybody's code
                return f"which can't be called as transformers' models do ({type(error).__name__}: {error})"
            results.append((value.detach(), leaf.grad))
        if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*results, strict=True)):
            how = "".join(f" with {argument}" for argument in given)
            return f"which computes something else than the mean cross-entropy of next tokens{how}"
    return ""
