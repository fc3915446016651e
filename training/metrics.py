"""Stops a run whose loss or weights are no longer numbers."""

import math

import torch

from training.sharding import whole


class NonFiniteError(RuntimeError):
    """The loss, the gradient or a weight is NaN or infinite."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step  # the first bad one, counted from 1 as in metrics.jsonl


class Health:
    """Notes the first bad step on the device; the host looks only when it waits for the device anyway.

    Steps are counted from 1, as in metrics.jsonl. An enabled gradient scaler finds its scale by overflowing and skips the step
    when it does, so with one an infinite gradient is no fault in itself; one that stays is.
    """

    SMALLEST_SCALE = 1.0  # scaling is there to make gradients larger: one that overflows below it overflows by itself

    def __init__(self, device: torch.device, scaler: torch.amp.GradScaler) -> None:
        self._first_bad = torch.full((), -1, device=device, dtype=torch.int64)
        self._scaler = scaler
        self._step = 0  # the last one watched

    def watch(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Notes `step` if the loss or the gradient is NaN or infinite and no earlier step was. Does not synchronise."""
        bad = ~torch.isfinite(loss if self._scaler.is_enabled() else loss + grad_norm)
        self._first_bad = torch.where((self._first_bad < 0) & bad, step, self._first_bad)
        self._step = step

    def check(self) -> None:
        """Synchronises.

        Raises:
            NonFiniteError: a watched value was NaN or infinite, or the gradient overflows at any scale.
        """
        if (step := int(self._first_bad)) >= 0:
            raise NonFiniteError(f"the loss or the gradient is NaN or infinite at step {step}", step)
        if self._scaler.is_enabled() and (scale := self._scaler.get_scale()) < self.SMALLEST_SCALE:
            what = f"the gradient is NaN or infinite at every loss scale down to {scale:g}"
            raise NonFiniteError(f"{what} at step {self._step}", self._step)

    def check_validation(self, loss: float, step: int) -> None:
        """Raises NonFiniteError: the validation loss after step `step` is NaN or infinite."""
        if not math.isfinite(loss):
            raise NonFiniteError(f"the validation loss is NaN or infinite at step {step}", step)

    def check_weights(self, model: torch.nn.Module, step: int) -> None:
        """Before a checkpoint: a finite loss can still have pushed a weight over the edge.

        Raises:
            NonFiniteError: as `check`, or a weight is NaN or infinite after step `step`.
        """
        self.check()
        # the sum of absolute values, not the largest one, which a rank that holds nothing of a sharded weight can't tell
        total = torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()], norm_type=1)
        if not torch.isfinite(whole(total)):
            raise NonFiniteError(f"a weight is NaN or infinite at step {step}", step)
