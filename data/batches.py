"""Batches as a pure function of (seed, step, rank), and windows that cover a validation split.

`batches.starts(step)` is the same in any order, any number of times and in any process. It has no state that a restart or an
evaluation could change. Another number of ranks cuts the same batch into other parts. `data.windows` reads the windows.

An epoch is a permutation of non-overlapping windows of `context` tokens. The windows of each epoch start at another random
offset, so that over the epochs a model sees a sentence at every position of its context. The sequence of all epochs is cut into
global batches of `batch_size` windows. Each rank takes a contiguous part of a batch.
"""

from functools import lru_cache

import numpy as np

from data.order import VERSION, Order

MOST_EPOCHS = 100  # in a batch: more are a mistake, and drawing them all would take hours


class Batches:
    """Training batches: a window of a batch has `context` tokens and the one behind them.

    `tokens` is a one-dimensional array of more than `context` integers. `order` is the version of `data.order` that a run has
    begun with.
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
        self._room = min(context, targets - self.windows * context + 1)  # offsets are in [0, room)
        self._order = lru_cache(maxsize=2)(lambda epoch: Order(self.windows, seed, epoch, order))  # a batch may span two epochs

    def starts(self, step: int) -> np.ndarray:
        """The first token of each of this rank's windows, int64 [batch_size // ranks]."""
        first = step * self.batch_size + self.rank * self.rows  # this rank's first window, counted over all epochs
        epochs, windows = np.divmod(first + np.arange(self.rows), self.windows)
        starts = np.empty_like(windows)
        for epoch in np.unique(epochs):
            order, there = self._order(int(epoch)), epochs == epoch
            starts[there] = order.random % self._room + self.context * order[windows[there]]
        return starts


def validation_starts(
    tokens: int, *, context: int, batch_size: int, batches: int | None = None, rank: int = 0, ranks: int = 1
) -> list[np.ndarray]:
    """The first tokens of windows that cover a split once, in order, in batches of `batch_size` (the last may have fewer).

    Each batch is int64 [rows]. Only an end shorter than a context is left out. With several ranks, each rank takes every
    ranks-th batch and may have none. `batches` limits the number of batches; their windows are spread evenly over the split, as
    its beginning may be one author or one subject.
    """
    windows = (tokens - 1) // context
    taken = windows if batches is None else min(batches * batch_size, windows)
    assert taken  # load_corpus
    starts = context * (np.arange(taken, dtype=np.int64) * windows // taken)
    return np.split(starts, range(batch_size, taken, batch_size))[rank::ranks]
