"""The loss on the validation set, in nats per token and in bits per byte."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice, repeat

import torch

from data import Split, ValidationWindows
from training.distributed import ALONE, World
from training.precision import Precision
from training.sharding import evaluated, is_sharded


@dataclass(frozen=True)
class Validation:
    loss: float  # nats per token
    bits_per_byte: float  # of the text that the tokens stand for: compares across tokenizers


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Nats per token in bits per byte of text."""
    return loss / math.log(2) / bytes_per_token


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    split: Split,
    precision: Precision,
    *,
    context: int,
    batch_size: int,
    batches: int | None = None,
    world: World = ALONE,
    before_batch: Callable[[], None] = lambda: None,
) -> Validation:
    """The mean over every predicted token of `split`, the same on every rank. Draws no random numbers.

    Args:
        model: where it is sharded, all ranks call this together.
        batch_size: rows of a batch. The batches go round the ranks: all would wait for one that did it alone.
        batches: evaluate this many batches, of all ranks together, whose windows are spread evenly over the split. Both figures
            are then estimates: the loss from a sample, and the bits per byte also because it takes the whole split's bytes per
            token.
        before_batch: called before each, equally often on all ranks; what it raises on all of them ends the evaluation.
    """
    was_training = model.training
    model.eval()
    total, tokens = torch.zeros((), device=precision.device), 0
    windows = ValidationWindows(
        split.tokens, context=context, batch_size=batch_size, batches=batches, rank=world.rank, ranks=world.size
    )
    most = world.highest(len(windows))
    nothing = torch.zeros(1, context, dtype=torch.int64)
    try:
        with evaluated(model), precision.autocast():
            for batch in islice(chain(windows, repeat(None)), most):
                before_batch()
                if batch is not None:
                    inputs, targets = batch
                    loss = model(inputs.to(precision.device), targets.to(precision.device))
                    total += loss * targets.numel()  # the last batch may have fewer rows
                    tokens += targets.numel()
                elif is_sharded(model):  # whose ranks gather weights together, as often as the one with most batches
                    model(nothing.to(precision.device))
        mean = world.sum(total).item() / int(world.sum(torch.tensor(tokens)))
    finally:  # a signal may cut it short
        model.train(was_training)
    return Validation(mean, bits_per_byte(mean, split.bytes_per_token))
