"""What a model has learned: its loss on the validation set."""

import math
from collections.abc import Callable
from itertools import chain, islice, repeat

import torch

from data import Split, ValidationWindows
from training.checkpoint import Validation
from training.distributed import ALONE, World
from training.interrupt import Interrupt
from training.metrics import Metrics, NonFiniteError
from training.run import Run
from training.sharding import forward_only, is_sharded
from training.step import MixedPrecision


def validate(run: Run, split: Split, metrics: Metrics, interrupt: Interrupt, world: World = ALONE) -> None:
    """Evaluates after the step that `state.step` counts, logs it, and keeps the last and the best validation in the state.

    All ranks call it together.

    Raises:
        Stopped: a signal cut it short. The state, and so the next checkpoint, says that the evaluation is owed.
        NonFiniteError: the training or the validation loss is NaN or infinite.
    """
    cfg, state = run.cfg, metrics.state
    state.owes_validation = True
    with metrics.clock.paused():
        metrics.health.check()
        with interrupt.stopping_at_once("Leaving this evaluation for later, then a checkpoint."):
            # not the compiled model: it would be compiled again for evaluation, and for a last batch with fewer rows
            validation = evaluate(
                state.model,
                split,
                metrics.precision,
                context=cfg.model.context,
                batch_size=cfg.train.batch_size // cfg.train.accumulation // world.size,
                batches=cfg.eval.batches and cfg.eval.batches * world.size,
                world=world,
                before_batch=interrupt.check,
            )
    if not math.isfinite(validation.loss):
        raise NonFiniteError("the validation loss is NaN or infinite", state.step)
    figures = {f"val/{name}": value for name, value in vars(validation).items()}
    run.log(state.step, {"tokens": state.tokens} | figures)
    state.validation, state.owes_validation = validation, False
    if state.best is None or validation.loss < state.best.loss:
        state.best, state.best_step = validation, state.step


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
        mean = world.sum(total).item() / int(world.sum(torch.tensor(tokens)))
    finally:  # a signal may cut it short
        model.train(was_training)
    return Validation(mean, split.bits_per_byte(mean))
