"""The lines of metrics.jsonl: the figures of training steps, and the check that they are finite numbers."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from configs import Config
from data import Corpus
from measure.clock import StepClock
from measure.gpu import peak_flops
from model import GPT
from training.checkpoint import TrainState
from training.distributed import World
from training.sharding import full_tensor
from training.step import MixedPrecision


def batch_tokens(cfg: Config) -> int:
    """Tokens of a training step, of all ranks together."""
    return cfg.train.batch_size * cfg.model.context


def quantities(cfg: Config, corpus: Corpus, model: GPT) -> dict[str, float]:
    """The sizes of a run, as numbers for tables and W&B. Lines of metrics have what changes with the step."""
    return {
        "parameters": model.parameter_count(),
        "vocabulary": corpus.tokenizer.vocab_size,
        "tokens_per_step": batch_tokens(cfg),
        "train_tokens": len(corpus.train.tokens),
        "val_tokens": len(corpus.val.tokens),
        "train_bytes_per_token": corpus.train.bytes_per_token,
        "val_bytes_per_token": corpus.val.bytes_per_token,
    }


class Metrics:
    """Collects what training steps return, for one line of metrics.jsonl after several steps.

    The sum of the losses since the last line is in the state of training, so that a resumed run continues it.
    """

    def __init__(
        self, state: TrainState, cfg: Config, corpus: Corpus, precision: MixedPrecision, clock: StepClock, world: World
    ) -> None:
        self.health = Health(precision.device, state.scaler)
        self.state, self.precision, self.clock = state, precision, clock
        self._corpus, self._batch_tokens = corpus, batch_tokens(cfg)
        gpu = torch.cuda.get_device_name(precision.device) if precision.device.type == "cuda" else ""
        self._peak_flops = world.size * (peak_flops(gpu, precision.dtype) or 0)
        state.loss_sum = state.loss_sum.to(precision.device)

    def add(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Adds the step that `state.step` counts. Does not synchronise with the device."""
        self.health.watch(self.state.step, loss, grad_norm)
        self.state.loss_sum, self.state.losses = self.state.loss_sum + loss, self.state.losses + 1
        self.state.tokens += self._batch_tokens
        self._grad_norm = grad_norm

    def line(self) -> dict[str, float | None]:
        """The figures of the steps since the last line, by their names in metrics.jsonl. None: not known. Synchronises.

        Raises:
            NonFiniteError: a loss or a gradient was NaN or infinite.
        """
        self.health.check()
        state, window = self.state, self.clock.window()
        tokens_per_s = 1000 * self._batch_tokens / window.mean_ms if window else None
        flops_per_token = state.model.flops_per_token()
        loss = (state.loss_sum / state.losses).item()
        line = {
            "tokens": state.tokens,
            "train/loss": loss,
            "train/bits_per_byte": self._corpus.train.bits_per_byte(loss),
            "train/grad_norm": self._grad_norm.item(),
            "train/lr": state.optimizer.param_groups[0]["lr"],  # of the step just done
            "perf/step_ms": window.median_ms if window else None,
            "perf/tokens_per_s": tokens_per_s,
            "perf/mfu": flops_per_token * tokens_per_s / self._peak_flops if self._peak_flops and tokens_per_s else None,
            "perf/peak_gb": self.clock.peak_gb,
        }
        state.loss_sum, state.losses = torch.zeros_like(state.loss_sum), 0
        return line


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl that are records: `step`, and figures by name. Damaged lines are left out."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            numbers = isinstance(record, dict) and all(type(value) in (int, float) for value in record.values())
            if numbers and type(record.get("step")) is int:
                lines.append(record)
    return lines


class NonFiniteError(RuntimeError):
    """The loss, the gradient or a weight is NaN or infinite."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(
            f"{what} at step {step}. Checkpoints have finite weights only: resume=FOLDER goes on from the newest one. "
            "A lower optim.lr, a longer optim.warmup_steps or train.precision=fp32 may help."
        )


class Health:
    """Finds the first step whose loss or gradient is NaN or infinite.

    `watch` notes it on the device; the host reads the note in `check`, where it waits for the device anyway. Steps are counted
    from 1, as in metrics.jsonl. An enabled gradient scaler finds its scale by overflowing, and skips a step that overflows. So
    with a scaler an infinite gradient is an error only if it stays.
    """

    SMALLEST_SCALE = 1.0  # scaling makes gradients larger: a gradient that overflows below this scale overflows without scaling

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
        """Synchronises.

        Raises:
            NonFiniteError: a watched value was NaN or infinite, or the gradient overflows at any scale.
        """
        if (step := int(self._first_bad)) >= 0:
            raise NonFiniteError("the loss or the gradient is NaN or infinite", step)
        if self._scaler.is_enabled() and (scale := self._scaler.get_scale()) < self.SMALLEST_SCALE:
            raise NonFiniteError(f"the gradient is NaN or infinite at every loss scale down to {scale:g}", self._step)

    def check_weights(self, model: torch.nn.Module, step: int) -> None:
        """Before a checkpoint: a step with a finite loss can still make a weight infinite.

        Raises:
            NonFiniteError: as `check`, or a weight is NaN or infinite after step `step`.
        """
        self.check()
        # the sum of absolute values: the largest one fails on a rank that holds no part of a sharded weight
        total = torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()], norm_type=1)
        if not torch.isfinite(full_tensor(total)):
            raise NonFiniteError("a weight is NaN or infinite", step)
