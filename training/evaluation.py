"""The loss of a model on a split of the text."""

from collections import deque
from collections.abc import Callable
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data import Split, validation_starts
from data.windows import Windows
from measure.graph import captured
from training.checkpoint import Validation
from training.distributed import ALONE, World
from training.precision import MixedPrecision
from training.sharding import forward_only, is_sharded

AHEAD = 16  # batches that the host may be ahead of a GPU, so that a signal is answered soon
IGNORED = -100  # a target that the loss leaves out


class Evaluation:
    """The mean loss over every predicted token of `split`, the same on every rank. Draws no random numbers.

    All batches have one shape, so that one CUDA graph can hold each of them: the last is filled up with rows that don't count.

    Args:
        model: not the compiled one, which would be compiled again. All ranks of a sharded model evaluate together.
        batch_size: rows of a batch. The ranks take batches in turn.
        batches: the number of batches to evaluate, of all ranks together; None: all. Their windows are spread evenly over the
            split. Both figures are then estimates: the loss of a sample, and bits per byte with the bytes per token of the
            whole split.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        precision: MixedPrecision,
        *,
        context: int,
        batch_size: int,
        batches: int | None = None,
        world: World = ALONE,
    ) -> None:
        self._model, self._split, self._precision, self._world, self._context = model, split, precision, world, context
        device = precision.device
        given = validation_starts(
            len(split.tokens), context=context, batch_size=batch_size, batches=batches, rank=world.rank, ranks=world.size
        )
        self._rows = [len(batch) for batch in given]
        starts = np.zeros((len(given), batch_size), np.int64)
        for batch, found in enumerate(given):
            starts[batch, : len(found)] = found
        self._windows = Windows(split.tokens, starts.__getitem__, context, batch_size, device)
        self._starts, self._counts = torch.from_numpy(starts).to(device), torch.tensor(self._rows).to(device)
        self._numbers = torch.arange(batch_size, device=device)[:, None]
        self._at, self._total = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros((), device=device)
        self._batch: Callable[[], object] = self._add  # or what replays it

    @torch.no_grad()
    def __call__(self, before_batch: Callable[[], None] = lambda: None, most: int | None = None) -> Validation:
        """Evaluates.

        Args:
            before_batch: called before each batch, equally often on all ranks. An exception that it raises on all of them ends
                the evaluation.
            most: evaluate so many batches of each rank at the most.
        """
        rows, queue = self._rows[:most], deque[Any]()
        self._at.zero_()
        self._total.zero_()
        was_training = self._model.training
        self._model.eval()
        try:
            with forward_only(self._model):
                for batch in islice(chain(range(len(rows)), repeat(None)), self._world.max(len(rows))):
                    before_batch()
                    if batch is not None:
                        self._windows.load(batch)
                        self._batch()
                    elif is_sharded(self._model):  # its ranks gather weights together: each makes the passes of the busiest
                        self._forward(torch.zeros(1, self._context, dtype=torch.int64, device=self._precision.device))
                    if self._precision.device.type == "cuda":
                        queue.append(torch.cuda.current_stream().record_event())
                        if len(queue) > AHEAD:
                            queue.popleft().synchronize()
        finally:
            self._model.train(was_training)
        tokens = self._world.sum(torch.tensor(sum(rows) * self._context))
        mean = self._world.sum(self._total.clone()).item() / int(tokens)
        return Validation(mean, self._split.bits_per_byte(mean))

    def warm_up(self) -> None:
        """One batch, so that a capture finds its kernels compiled."""
        self(most=1)

    @torch.no_grad()
    def capture(self, pool: Any) -> None:
        """From now on a batch is a replay of a CUDA graph in the memory of `pool`."""
        self._model.eval()
        try:
            self._batch = captured(self._add, pool)
        finally:
            self._model.train()

    def first(self) -> Tensor:
        """The inputs of the first batch, int64 [batch_size, context]."""
        self._windows.load(0)
        return self._windows.read(self._starts[0])[:, :-1]

    def _add(self) -> None:
        """Adds the loss of the next batch."""
        starts, rows = self._starts.index_select(0, self._at)[0], self._counts.index_select(0, self._at)
        self._at += 1
        windows = self._windows.read(starts)
        targets = windows[:, 1:].masked_fill(self._numbers >= rows, IGNORED)
        self._total += self._forward(windows[:, :-1].contiguous(), targets) * (rows[0] * self._context)

    def _forward(self, *inputs: Tensor) -> Tensor:
        with self._precision.autocast():
            return self._model(*inputs)
