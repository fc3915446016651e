"""Stops a run whose loss or weights are no longer numbers."""

import torch


class NonFiniteError(RuntimeError):
    """The loss, the gradient or a weight is NaN or infinite."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(f"{what} at step {step}")
        self.step = step  # counted from 0, as Batches counts: the first bad one


class Health:
    """Notes the first bad step on the device; the host looks only when it waits for the device anyway."""

    def __init__(self, device: torch.device) -> None:
        self._first_bad = torch.full((), -1, device=device, dtype=torch.int64)

    def watch(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, *, scaled: bool = False) -> None:
        """Notes `step` if the loss or the gradient is NaN or infinite and no earlier step was. Does not synchronise.

        Args:
            scaled: a gradient scaler is at work: it finds its scale by overflowing, and skips the step when it does.
        """
        bad = ~torch.isfinite(loss if scaled else loss + grad_norm)
        self._first_bad = torch.where((self._first_bad < 0) & bad, step, self._first_bad)

    def check(self) -> None:
        """Synchronises.

        Raises:
            NonFiniteError: a watched value was NaN or infinite.
        """
        if (step := int(self._first_bad)) >= 0:
            raise NonFiniteError("the loss or the gradient is NaN or infinite", step)

    def check_weights(self, model: torch.nn.Module, step: int) -> None:
        """Before a checkpoint: a finite loss can still have pushed a weight over the edge.

        Raises:
            NonFiniteError: as `check`, or a weight is NaN or infinite after step `step`.
        """
        self.check()
        norms = torch._foreach_norm([p.detach() for p in model.parameters()], ord=float("inf"))
        if not torch.isfinite(torch.stack(list(norms))).all():
            raise NonFiniteError("a weight is NaN or infinite", step)
