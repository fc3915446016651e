"""The figures of training steps: the lines of metrics.jsonl, and the check that they are finite numbers."""

import math
import os

import torch

from configs import Config
from configs.schema import Parallel
from data import Corpus
from model import GPT
from training.checkpoint import TrainState, Validation
from training.clock import StepClock
from training.distributed import World, full_tensor
from training.environment import peak_flops
from training.precision import Precision
from training.step import makes_cuda_graphs

WAITING = 0.2  # of a step: if the GPU waits for longer, the CPU is the bound


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
        self, state: TrainState, cfg: Config, corpus: Corpus, precision: Precision, clock: StepClock, world: World
    ) -> None:
        self.health = Health(precision.device, state.scaler)
        self.state, self.precision, self.clock, self._cfg = state, precision, clock, cfg
        self._advised, self._ranks = False, world.size
        self._corpus, self._batch_tokens = corpus, batch_tokens(cfg)
        self._peak_flops = world.size * (peak_flops(precision.device, precision.dtype) or 0)
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

    def validation(self, validation: Validation) -> dict[str, float | None]:
        """The figures of an evaluation, for a line of metrics.jsonl."""
        return {"tokens": self.state.tokens} | {f"val/{name}": value for name, value in vars(validation).items()}

    def advice(self) -> str:
        """One line, the first time that enough steps are timed to say it: the GPU waits for the CPU, or other programs use the
        cores. Else empty."""
        if self._advised or (step_ms := self.clock.median_ms) is None:
            return ""
        if (gpu_ms := self.clock.gpu_ms) is None:
            self._advised = self.precision.device.type == "cpu"
            return crowded(os.getloadavg()[0], os.cpu_count() or 1, torch.get_num_threads()) if self._advised else ""
        self._advised = True
        return waiting(step_ms, gpu_ms, self._cfg, self._ranks)


def crowded(load: float, cores: int, threads: int) -> str:
    """What to do where other programs use the cores. Empty where they don't; `load` is the mean number of runnable threads."""
    if threads == 1 or load - threads < cores / 2:
        return ""
    what = f"Other programs use the {cores} cores too (load {load:.1f}), and this run's {threads} threads wait for each other."
    return f"{what} OMP_NUM_THREADS=1 or OMP_WAIT_POLICY=passive may make steps many times faster."


def waiting(step_ms: float, gpu_ms: float, cfg: Config, ranks: int = 1) -> str:
    """What to do where the GPU waits for the CPU in much of a step. Empty where it does not."""
    share = 1 - gpu_ms / step_ms
    if share <= WAITING:
        return ""
    helps = (
        "a larger train.batch_size"
        if makes_cuda_graphs(cfg.train) or ranks > 1 or cfg.parallel is Parallel.fsdp  # which take no graphs
        else "train.compile=true train.compile_mode=reduce-overhead (CUDA graphs)"
    )
    return (
        f"The GPU waits for the CPU in {100 * share:.0f} % of a step: its kernels take {gpu_ms:.1f} of {step_ms:.1f} ms. "
        f"Try {helps}."
    )


class NonFiniteError(RuntimeError):
    """The loss, the gradient or a weight is NaN or infinite."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step  # the first bad one, counted from 1 as in metrics.jsonl


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
            raise NonFiniteError(f"the loss or the gradient is NaN or infinite at step {step}", step)
        if self._scaler.is_enabled() and (scale := self._scaler.get_scale()) < self.SMALLEST_SCALE:
            what = f"the gradient is NaN or infinite at every loss scale down to {scale:g}"
            raise NonFiniteError(f"{what} at step {self._step}", self._step)

    def check_validation(self, loss: float, step: int) -> None:
        """Raises NonFiniteError: the validation loss after step `step` is NaN or infinite."""
        if not math.isfinite(loss):
            raise NonFiniteError(f"the validation loss is NaN or infinite at step {step}", step)

    def check_weights(self, model: torch.nn.Module, step: int) -> None:
        """Before a checkpoint: a step with a finite loss can still make a weight infinite.

        Raises:
            NonFiniteError: as `check`, or a weight is NaN or infinite after step `step`.
        """
        self.check()
        # the sum of absolute values: the largest one fails on a rank that holds no part of a sharded weight
        total = torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()], norm_type=1)
        if not torch.isfinite(full_tensor(total)):
            raise NonFiniteError(f"a weight is NaN or infinite at step {step}", step)
