"""Batches as a pure function of (seed, step, rank), and windows that cover a validation split.

`batches[step]` gives the same tensors in any order, any number of times and in any process. It has no state that a restart or
an evaluation could change. Another number of ranks cuts the same batch into other parts.

An epoch is a permutation of non-overlapping windows of `context` tokens. The windows of each epoch start at another random
offset, so that over the epochs a model sees a sentence at every position of its context. The sequence of all epochs is cut into
global batches of `batch_size` windows. Each rank takes a contiguous part of a batch.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch

from data.order import VERSION, Order
from data.windows import cut

MOST_EPOCHS = 100  # in a batch: more are a mistake, and drawing them all would take hours


class Batches:
    """Training batches: `inputs, targets = batches[step]`, two int64 CPU tensors of shape [batch_size // ranks, context].

    `tokens` is a one-dimensional array of more than `context` integers. Of a memmap, only the windows of a batch are read.
    Targets are the inputs shifted by one token. `order` is the version of `data.order` that a run has begun with.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        context: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        order: int = VERSION,
    ) -> None:
        targets = len(tokens) - 1  # the last token has no successor
        assert targets >= context and batch_size % ranks == 0  # load_corpus and configs.rules
        self.tokens = tokens
        self.context = context
        self.batch_size = batch_size
        self.rows = batch_size // ranks
        self.rank = rank
        # Every epoch has the same number of windows, so that the epoch of a step is a division. One context is left for
        # the offset, if the corpus is long enough.
        self.windows = max(1, (targets - context + 1) // context)
        if batch_size > MOST_EPOCHS * self.windows:
            raise ValueError(
                f"train.batch_size={batch_size}: the training text has {self.windows} windows. Use a smaller batch."
            )
        room = min(context, targets - self.windows * context + 1)  # offsets are in [0, room)

        @lru_cache(maxsize=2)  # a batch may span two epochs
        def epoch_order(epoch: int) -> tuple[int, Order]:
            windows = Order(self.windows, seed, epoch, order)
            return windows.random % room, windows

        self._epoch_order = epoch_order

    def starts(self, step: int) -> np.ndarray:
        """The first token of each of this rank's windows, int64 [batch_size // ranks]."""
        first = step * self.batch_size + self.rank * self.rows  # this rank's first window, counted over all epochs
        epochs, windows = np.divmod(first + np.arange(self.rows), self.windows)
        starts = np.empty_like(windows)
        for epoch in np.unique(epochs):
            offset, order = self._epoch_order(int(epoch))
            starts[epochs == epoch] = offset + self.context * order[windows[epochs == epoch]]
        return starts

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return _pair(cut(self.tokens, self.starts(step), self.context + 1))


class ValidationWindows:
    """Windows that cover a split once, in order, in batches of `batch_size` rows (the last may have fewer).

    Iteration gives `(inputs, targets)`, int64 CPU tensors of shape [rows, context]. Only an end shorter than a context is left
    out. With several ranks, each rank takes every ranks-th batch and may have none. `batches` limits the number of batches;
    their windows are spread evenly over the split, as its beginning may be one author or one subject.
    """

    def __init__(
        self, tokens: np.ndarray, *, context: int, batch_size: int, batches: int | None = None, rank: int = 0, ranks: int = 1
    ) -> None:
        self.windows = (len(tokens) - 1) // context
        assert self.windows  # load_corpus
        self.tokens = tokens
        self.context = context
        self.batch_size = batch_size
        taken = self.windows if batches is None else min(batches * batch_size, self.windows)
        self.starts = context * (np.arange(taken, dtype=np.int64) * self.windows // taken)  # each window's first token
        self.firsts = range(0, taken, batch_size)[rank::ranks]

    def __len__(self) -> int:
        """Batches of this rank."""
        return len(self.firsts)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for first in self.firsts:
            yield _pair(cut(self.tokens, self.starts[first : first + self.batch_size], self.context + 1))


def _pair(windows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, each int64 [rows, context], of windows [rows, context + 1]."""
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())
