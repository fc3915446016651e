"""One training step, for all programs: forward, backward, clip, optimizer step.

What changes from step to step is in tensors that stay where they are, and nothing waits for the device. So on a GPU the whole
step can be one CUDA graph: the first steps of a run warm up, then the step is captured, and from then on replayed.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from configs import Config
from measure.graph import aside, captured, waits
from measure.timing import describe, free_memory
from training.checkpoint import TrainState
from training.distributed import ALONE, World, without_reduction
from training.evaluation import Evaluation
from training.inputs import Inputs
from training.precision import MixedPrecision
from training.sharding import full_tensor

WARM_UP = 3  # steps before the capture: kernels are compiled, and the optimizer makes its state in the first
STEPS_TO_GRAPH = WARM_UP + 2  # after these, a step is as long as all that follow


class TrainingStep:
    """One update: the gradient of the mean loss over the batch of all ranks, summed over micro-batches, clipped, applied.

    `step(number)` makes it, eagerly or as a CUDA graph: the same operations, so the same numbers. `loss` (the mean, in nats per
    token) and `grad_norm` (before clipping) are scalars on the device, the same on every rank, until the next step overwrites
    them.

    Args:
        forward: the model, compiled or not. With several ranks: what `World.replicate` returns.
        record: called at the end of a step with its number, int64 [1], loss and gradient norm, all on the device. A graph
            repeats what it launches, so it writes in place.
        graph: on a GPU, capture the step after WARM_UP steps.
        evaluation: captured with the step, in the same memory.
        say: is told why a step can't be captured. It then goes on as it began.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        state: TrainState,
        inputs: Inputs,
        cfg: Config,
        precision: MixedPrecision,
        world: World = ALONE,
        *,
        record: Callable[[Tensor, Tensor, Tensor], object] = lambda *_: None,
        graph: bool = False,
        evaluation: Evaluation | None = None,
        say: Callable[[str], object] = print,
    ) -> None:
        self.forward, self.state, self.inputs = forward, state, inputs
        self.cfg, self.precision, self.world = cfg, precision, world
        self.record, self.graph, self.evaluation, self.say = record, graph, evaluation, say
        self.loss = self.grad_norm = torch.tensor(math.nan)  # before the first step
        self.parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
        self._warm_ups = 0
        # PyTorch captures on a stream that is not the default one, and warms up on the same
        self._stream: Any = torch.cuda.Stream(precision.device) if graph else None
        self._make: Callable[[], object] = self._warm_up if graph else self.update

    def __call__(self, number: int) -> None:
        """Makes step `number`, counted from 0. Does not wait for a GPU."""
        self.inputs.load(number)
        self._make()

    def update(self) -> None:
        """The step that `inputs.load` has named."""
        number, tokens, targets, seeds, rate = self.inputs.read()
        pieces, state = self.cfg.train.accumulation, self.state
        total = torch.zeros((), device=self.precision.device)
        for piece, (x, y) in enumerate(zip(tokens.chunk(pieces), targets.chunk(pieces), strict=True)):
            last = piece == pieces - 1
            with nullcontext() if last else without_reduction(self.forward):
                with self.precision.autocast():
                    loss = self.forward(x, y, seeds=seeds[piece])
                loss = loss / pieces  # micro-batches are equal, so the mean of their means is the batch's
                state.scaler.scale(loss).backward()
            total += loss.detach()

        for group in state.optimizer.param_groups:
            group["lr"] = rate
        state.scaler.unscale_(state.optimizer)
        clip_norm = self.cfg.optim.clip_norm or math.inf
        self.grad_norm = full_tensor(torch.nn.utils.clip_grad_norm_(self.parameters, clip_norm)).detach()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad()
        self.loss = self.world.sum(total) / self.world.size
        self.record(number, self.loss, self.grad_norm)

    def _warm_up(self) -> None:
        """One of the first steps, or the capture and the first replay."""
        with aside(self._stream):
            if self._warm_ups == WARM_UP:
                self._capture()
            else:
                self._warm_ups += 1
                with waits() if self._warm_ups == WARM_UP else nullcontext(()) as found:
                    self.update()
                if found:
                    self._give_up(f"it waits for the device in {', '.join(dict.fromkeys(found))}")
                return
        self._make()

    def _capture(self) -> None:
        """Raises torch.OutOfMemoryError: the step does not fit, with a graph or without."""
        if self.evaluation is not None:
            self.evaluation.warm_up()  # in memory of the steps before, which goes now: graphs have their own
        free_memory(self.precision.device)
        groups, pool = self.state.optimizer.param_groups, torch.cuda.graph_pool_handle()
        try:
            for group in groups:
                group["capturable"] = True  # PyTorch's optimizers refuse a capture without it, and warn of it elsewhere
            self._make = captured(self.update, pool)
            if self.evaluation is not None:
                self.evaluation.capture(pool)
        except RuntimeError as error:
            cause = error.__context__ or error  # the end of a capture that failed raises an error of its own
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            self._give_up(describe(cause))
        finally:
            for group in groups:
                group["capturable"] = False

    def _give_up(self, why: str) -> None:
        self._make, self.graph = self.update, False
        self.state.optimizer.zero_grad()
        self.say(f"No CUDA graph of the step: {why}. It goes on without; train.graph=false leaves the attempt out.")
