"""The figures of a run: of its training steps and of the validation set, and the check that they are finite numbers."""

import math
from collections.abc import Callable
from itertools import chain, islice, repeat

import torch

from configs import Config
from data import Corpus, Split, ValidationWindows
from measure.clock import StepClock
from measure.gpu import peak_flops
from model import GPT
from training.checkpoint import TrainState, Validation
from training.distributed import ALONE, World
from training.sharding import forward_only, full_tensor, is_sharded
from training.step import MixedPrecision


def quantities(cfg: Config, corpus: Corpus, model: GPT) -> dict[str, float]:
    """The sizes of a run, as numbers for tables and W&B. Lines of metrics have what changes with the step."""
    return {
        "parameters": model.parameter_count(),
        "vocabulary": corpus.tokenizer.vocab_size,
        "tokens_per_step": cfg.train.batch_size * cfg.model.context,  # of all ranks together
        "train_tokens": len(corpus.train.tokens),
        "val_tokens": len(corpus.val.tokens),
        "train_bytes_per_token": corpus.train.bytes_per_token,
        "val_bytes_per_token": corpus.val.bytes_per_token,
    }


class Metrics:
    """Collects what training steps return, for one line of metrics.jsonl after several steps, and evaluates.

    The sum of the losses since the last line is in the state of training, so that a resumed run continues it.
    """

    def __init__(
        self, state: TrainState, cfg: Config, corpus: Corpus, precision: MixedPrecision, clock: StepClock, world: World
    ) -> None:
        self.health = Health(precision.device, state.scaler)
        self._state, self._cfg, self._corpus, self._precision, self._clock = state, cfg, corpus, precision, clock
        self._world, self._batch_tokens = world, cfg.train.batch_size * cfg.model.context
        gpu = torch.cuda.get_device_name(precision.device) if precision.device.type == "cuda" else ""
        self._peak_flops = world.size * (peak_flops(gpu, precision.dtype) or 0)
        state.loss_sum = state.loss_sum.to(precision.device)

    def add(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Adds the step that `state.step` counts. Does not synchronise with the device."""
        state = self._state
        self.health.watch(state.step, loss, grad_norm)
        state.loss_sum, state.losses, state.tokens = state.loss_sum + loss, state.losses + 1, state.tokens + self._batch_tokens
        self._grad_norm = grad_norm

    def line(self) -> dict[str, float | None]:
        """The figures of the steps since the last line, by their names in metrics.jsonl. None: not known. Synchronises.

        Raises:
            NonFiniteError: a loss or a gradient was NaN or infinite.
        """
        self.health.check()
        state, window = self._state, self._clock.window()
        tokens_per_s = 1000 * self._batch_tokens / window.mean_ms if window else None
        flops_per_token = state.model.flops_per_token()
        loss = (state.loss_sum / state.losses).item()
        state.loss_sum, state.losses = torch.zeros_like(state.loss_sum), 0
        return {
            "tokens": state.tokens,
            "train/loss": loss,
            "train/bits_per_byte": self._corpus.train.bits_per_byte(loss),
            "train/grad_norm": self._grad_norm.item(),
            "train/lr": state.optimizer.param_groups[0]["lr"],  # of the step just done
            "perf/step_ms": window.median_ms if window else None,
            "perf/tokens_per_s": tokens_per_s,
            "perf/mfu": flops_per_token * tokens_per_s / self._peak_flops if self._peak_flops and tokens_per_s else None,
            "perf/peak_gb": self._clock.peak_gb,
        }

    def validation(self, before_batch: Callable[[], None]) -> dict[str, float | None]:
        """Evaluates, keeps the last and the best validation in the state, and returns the figures. All ranks call it together.

        before_batch: as in `evaluate`. If it ends the evaluation, the state, and so the next checkpoint, says that one is owed.

        Raises:
            NonFiniteError: the training or the validation loss is NaN or infinite.
        """
        cfg, state, ranks = self._cfg, self._state, self._world.size
        state.owes_validation = True
        with self._clock.paused():
            self.health.check()
            # not the compiled model: it would be compiled again for evaluation, and for a last batch with fewer rows
            found = evaluate(
                state.model,
                self._corpus.val,
                self._precision,
                context=cfg.model.context,
                batch_size=cfg.train.batch_size // cfg.train.accumulation // ranks,
                batches=cfg.eval.batches and cfg.eval.batches * ranks,
                world=self._world,
                before_batch=before_batch,
            )
        if not math.isfinite(found.loss):
            raise NonFiniteError("the validation loss is NaN or infinite", state.step)
        state.validation, state.owes_validation = found, False
        if state.best is None or found.loss < state.best.loss:
            state.best, state.best_step = found, state.step
        return {"tokens": state.tokens, "val/loss": found.loss, "val/bits_per_byte": found.bits_per_byte}


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    split: Split,
    precision: MixedPrecision,
    *,
    context: int,
    batch_size: int,
    batches: int | None = None,
    world: World = ALONE,
    before_batch: Callable[[], None] = lambda: None,
) -> Validation:
    """The mean loss over every predicted token of `split`, the same on every rank. Draws no random numbers.

    Args:
        model: all ranks of a sharded model call this together.
        batch_size: rows of a batch. The ranks take batches in turn.
        batches: the number of batches to evaluate, of all ranks together; None: all. Their windows are spread evenly over the
            split. Both figures are then estimates: the loss of a sample, and bits per byte with the bytes per token of the
            whole split.
        before_batch: called before each batch, equally often on all ranks. An exception that it raises on all of them ends the
            evaluation.
    """
    was_training = model.training
    model.eval()
    total, tokens = torch.zeros((), device=precision.device), 0
    windows = ValidationWindows(
        split.tokens, context=context, batch_size=batch_size, batches=batches, rank=world.rank, ranks=world.size
    )
    most = world.max(len(windows))
    nothing = torch.zeros(1, context, dtype=torch.int64)
    try:
        with forward_only(model), precision.autocast():
            for batch in islice(chain(windows, repeat(None)), most):
                before_batch()
                if batch is not None:
                    inputs, targets = batch
                    loss = model(inputs.to(precision.device), targets.to(precision.device))
                    total += loss * targets.numel()  # the last batch may have fewer rows
                    tokens += targets.numel()
                elif is_sharded(model):  # its ranks gather weights together, so each makes as many passes as the busiest
                    model(nothing.to(precision.device))
    finally:
        model.train(was_training)
    mean = world.sum(total).item() / int(world.sum(torch.tensor(tokens)))
    return Validation(mean, split.bits_per_byte(mean))


class NonFiniteError(RuntimeError):
    """The loss, the gradient or a weight is NaN or infinite."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(
            f"{what} at step {step}. A lower optim.lr, a longer optim.warmup_steps or train.precision=fp32 may help."
        )


class Health:
    """Finds the first step, counted from 1, whose loss or gradient is NaN or infinite.

    `watch` notes it on the device; the host reads the note in `check`, where it waits for the device anyway. An enabled
    gradient scaler finds its scale by overflowing, and skips a step that overflows: an infinite gradient is then an error only
    if it stays, below a scale of 1, which makes gradients no larger.
    """

    def __init__(self, device: torch.device, scaler: torch.amp.GradScaler) -> None:
        self._first_bad = torch.full((), -1, device=device, dtype=torch.int64)
        self._scaler = scaler
        self._step = 0  # the last one watched

    def watch(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Notes `step` if its loss or gradient is NaN or infinite and no earlier step is noted. Does not synchronise."""
        bad = ~torch.isfinite(loss if self._scaler.is_enabled() else loss + grad_norm)
        self._first_bad = torch.where((self._first_bad < 0) & bad, step, self._first_bad)
        self._step = step

    def check(self) -> None:
        """Raises NonFiniteError: a watched value was NaN or infinite, or the gradient overflows at any scale. Synchronises."""
        if (step := int(self._first_bad)) >= 0:
            raise NonFiniteError("the loss or the gradient is NaN or infinite", step)
        if self._scaler.is_enabled() and (scale := self._scaler.get_scale()) < 1.0:
            raise NonFiniteError(f"the gradient is NaN or infinite at every loss scale down to {scale:g}", self._step)

    def check_weights(self, model: torch.nn.Module) -> None:
        """Before a checkpoint: as `check`, and raises for weights too. A step with a finite loss can make one infinite."""
        self.check()
        # the sum of absolute values: the largest one fails on a rank that holds no part of a sharded weight
        total = torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()], norm_type=1)
        if not torch.isfinite(full_tensor(total)):
            raise NonFiniteError("a weight is NaN or infinite", self._step)
