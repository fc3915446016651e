"""The figures of a run: of its training steps and of the validation set, and the check that they are finite numbers."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from configs import Config
from data import Corpus
from measure.clock import StepClock
from measure.gpu import peak_flops
from model import GPT
from training.checkpoint import TrainState
from training.distributed import World
from training.evaluation import Evaluation
from training.precision import MixedPrecision
from training.schedule import learning_rate
from training.sharding import full_tensor


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
    """Collects what training steps give, for one line of metrics.jsonl after several steps, and evaluates.

    The sum of the losses since the last line is in the state of training, so that a resumed run continues it. A line is
    written once its figures have arrived from the device, so that steps do not wait for it.

    Args:
        log: writes a line, given its step and its figures by their names; None: not known.
    """

    def __init__(
        self,
        state: TrainState,
        cfg: Config,
        corpus: Corpus,
        precision: MixedPrecision,
        clock: StepClock,
        world: World,
        log: Callable[[int, dict[str, float | None]], object],
    ) -> None:
        self.health = Health(precision.device, state.scaler)
        self._state, self._cfg, self._corpus, self._clock, self._log = state, cfg, corpus, clock, log
        self._batch_tokens, self._flops_per_token = cfg.train.batch_size * cfg.model.context, state.model.flops_per_token()
        self._gpu = precision.device.type == "cuda"
        gpu = torch.cuda.get_device_name(precision.device) if self._gpu else ""
        self._peak_flops = world.size * (peak_flops(gpu, precision.dtype) or 0)
        state.loss_sum = state.loss_sum.to(precision.device)
        self._grad_norm = torch.zeros((), device=precision.device)
        self._lines: deque[tuple[Any, Callable[[], None]]] = deque()  # the CUDA event at which a line can be written, and how
        self.evaluation = Evaluation(
            state.model,
            corpus.val,
            precision,
            context=cfg.model.context,
            batch_size=cfg.train.batch_size // cfg.train.accumulation // world.size,
            batches=cfg.eval.batches and cfg.eval.batches * world.size,
            world=world,
        )

    def record(self, number: Tensor, loss: Tensor, grad_norm: Tensor) -> None:
        """Of a training step: notes its figures on the device."""
        self._state.loss_sum += loss
        self._grad_norm.copy_(grad_norm)
        self.health.watch(number + 1, loss, grad_norm)

    def add(self) -> None:
        """Counts the step that has been recorded as `state.step`, and writes lines that have arrived."""
        state = self._state
        state.losses, state.tokens = state.losses + 1, state.tokens + self._batch_tokens
        while self._lines and self._lines[0][0].query():
            self._lines.popleft()[1]()

    def line(self) -> None:
        """Begins a line of the steps since the last one. On a GPU it is written later, without waiting."""
        state = self._state
        sent = torch.stack((state.loss_sum, self._grad_norm)), *self.health.found()
        figures, first_bad, scale = (tensor.to("cpu", non_blocking=self._gpu, copy=True) for tensor in sent)
        counts = (state.step, state.tokens, state.losses, self._clock.counted)
        state.loss_sum.zero_()
        state.losses = 0

        def write() -> None:
            self.health.judge(first_bad, scale, counts[0])
            self._write(*counts, *figures)

        self._lines.append((torch.cuda.current_stream().record_event() if self._gpu else None, write))
        if not self._gpu:
            self.flush()

    def flush(self) -> None:
        """Writes all lines that were begun. Synchronises.

        Raises:
            NonFiniteError: a loss or a gradient was NaN or infinite. So do `add` and `line`.
        """
        while self._lines:
            arrived, write = self._lines.popleft()
            if arrived is not None:
                arrived.synchronize()
            write()

    def _write(self, step: int, tokens: int, losses: int, counted: int, loss_sum: Tensor, grad_norm: Tensor) -> None:
        window, loss, peak = self._clock.window(counted), (loss_sum / losses).item(), self._peak_flops
        tokens_per_s = 1000 * self._batch_tokens / window.mean_ms if window else None
        line = {
            "tokens": tokens,
            "train/loss": loss,
            "train/bits_per_byte": self._corpus.train.bits_per_byte(loss),
            "train/grad_norm": grad_norm.item(),
            "train/lr": learning_rate(step - 1, self._cfg.train.steps, self._cfg.optim),
            "perf/step_ms": window.median_ms if window else None,
            "perf/tokens_per_s": tokens_per_s,
            "perf/mfu": self._flops_per_token * tokens_per_s / peak if peak and tokens_per_s else None,
            "perf/peak_gb": self._clock.peak_gb,
        }
        self._log(step, line)

    def validate(self, before_batch: Callable[[], None]) -> None:
        """Evaluates, keeps the last and the best validation in the state, and writes a line. All ranks call it together.

        If before_batch, as in `Evaluation`, ends it, the state, and so the next checkpoint, says that an evaluation is owed.

        Raises:
            NonFiniteError: the training or the validation loss is NaN or infinite.
        """
        state = self._state
        state.owes_validation = True
        with self._clock.paused():
            self.flush()
            self.health.check(state.step)
            found = self.evaluation(before_batch)
        if not math.isfinite(found.loss):
            raise NonFiniteError("the validation loss is NaN or infinite", state.step)
        state.validation, state.owes_validation = found, False
        if state.best is None or found.loss < state.best.loss:
            state.best, state.best_step = found, state.step
        self._log(state.step, {"tokens": state.tokens, "val/loss": found.loss, "val/bits_per_byte": found.bits_per_byte})


class NonFiniteError(RuntimeError):
    """The loss, the gradient or a weight is NaN or infinite."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(
            f"{what} at step {step}. A lower optim.lr, a longer optim.warmup_steps or train.precision=fp32 may help."
        )


class Health:
    """Finds the first step, counted from 1, whose loss or gradient is NaN or infinite.

    `watch` notes it on the device; the host judges the note where it has it anyway. An enabled gradient scaler finds its scale
    by overflowing, and skips a step that overflows: an infinite gradient is then an error only if it stays, below a scale of 1,
    which makes gradients no larger.
    """

    def __init__(self, device: torch.device, scaler: torch.amp.GradScaler) -> None:
        self._first_bad = torch.full((1,), -1, device=device, dtype=torch.int64)
        self._scaler, self._one = scaler, torch.ones((), device=device)

    def watch(self, step: Tensor, loss: Tensor, grad_norm: Tensor) -> None:
        """Notes `step`, int64 [1], if its loss or gradient is NaN or infinite and no earlier step is noted."""
        bad = ~torch.isfinite(loss if self._scaler.is_enabled() else loss + grad_norm)
        self._first_bad.copy_(torch.where((self._first_bad < 0) & bad, step, self._first_bad))

    def found(self) -> tuple[Tensor, Tensor]:
        """What `judge` takes: the note, and the scale of losses."""
        return self._first_bad, self._scaler.scale(self._one)

    def judge(self, first_bad: Tensor, scale: Tensor, step: int) -> None:
        """Raises NonFiniteError: a watched value was NaN or infinite, or the gradient overflows at any scale."""
        if (bad := int(first_bad)) >= 0:
            raise NonFiniteError("the loss or the gradient is NaN or infinite", bad)
        if (value := scale.item()) < 1.0:
            raise NonFiniteError(f"the gradient is NaN or infinite at every loss scale down to {value:g}", step)

    def check(self, step: int) -> None:
        """As `judge`, of what is found after `step` steps. Synchronises."""
        self.judge(*self.found(), step)

    def check_weights(self, model: torch.nn.Module, step: int) -> None:
        """Before a checkpoint: as `check`, and raises for weights too. A step with a finite loss can make one infinite."""
        self.check(step)
        # the sum of absolute values: the largest one fails on a rank that holds no part of a sharded weight
        total = torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()], norm_type=1)
        if not torch.isfinite(full_tensor(total)):
            raise NonFiniteError("a weight is NaN or infinite", step)
