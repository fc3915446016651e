"""Batches as a pure function of (seed, step, rank), and windows that cover a validation split.

`batches[step]` gives the same tensors in any order, any number of times and in any process. It has no state that a restart or
an evaluation could change. Another number of ranks cuts the same batch into other parts.

An epoch is a permutation of non-overlapping windows of `context` tokens. The windows of each epoch start at another random
offset, so that over the epochs a model sees a sentence at every position of its context. The sequence of all epochs is cut into
global batches of `batch_size` windows. Each rank takes a contiguous part of a batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

EPOCHS_KEPT = 2  # a batch may span two epochs
MOST_EPOCHS = 100  # in a batch: more are a mistake, and drawing them all would take hours


@dataclass(frozen=True)
class Position:
    """Where the windows of one rank lie in the training tokens."""

    step: int
    epoch: int  # of the first window
    window: int  # of the first window, in the order of its epoch
    windows: int  # in an epoch
    offsets: tuple[int, ...]  # each window's first token

    def __str__(self) -> str:
        offsets = ", ".join(map(str, self.offsets))
        return f"step {self.step}: epoch {self.epoch}, window {self.window} of {self.windows}, token offsets {offsets}"


class Batches:
    """Training batches: `inputs, targets = batches[step]`, two int64 CPU tensors of shape [batch_size // ranks, context].

    `tokens` is a one-dimensional array of integers. Of a memmap, only the windows of a batch are read. Targets are the inputs
    shifted by one token. Raises ValueError if there are fewer than context + 1 tokens, or if the ranks do not divide the batch.
    """

    def __init__(self, tokens: np.ndarray, *, context: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1) -> None:
        targets = len(tokens) - 1  # the last token has no successor
        if context < 1 or targets < context:
            raise ValueError(f"Batches: context={context} needs at least {max(context, 1) + 1} tokens, got {len(tokens)}")
        if batch_size < 1 or batch_size % ranks:
            raise ValueError(f"Batches: batch_size={batch_size} must be a positive multiple of the {ranks} ranks")
        if not 0 <= rank < ranks:
            raise ValueError(f"Batches: rank={rank} must be in [0, {ranks})")
        if seed < 0:
            raise ValueError(f"Batches: seed={seed} must not be negative")
        self.tokens = tokens
        self.context = context
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.ranks = ranks
        # Every epoch has the same number of windows, so that the epoch of a step is a division. One context is left for
        # the offset, if the corpus is long enough.
        self.windows = max(1, (targets - context + 1) // context)
        if batch_size > MOST_EPOCHS * self.windows:
            raise ValueError(
                f"train.batch_size={batch_size}: a step reads the training text {batch_size // self.windows} times: it has "
                f"{self.windows} windows of model.context={context} tokens. Lower train.batch_size."
            )
        self.room = min(context, targets - self.windows * context + 1)  # offsets are in [0, room)
        self._starts: dict[int, np.ndarray] = {}

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = self._rank_starts(step)
        window = self.tokens[starts[:, None] + np.arange(self.context + 1)].astype(np.int64)  # [rows, context + 1]
        return torch.from_numpy(window[:, :-1].copy()), torch.from_numpy(window[:, 1:].copy())

    def position(self, step: int) -> Position:
        """Where `batches[step]` comes from, for a message about that batch."""
        epoch, window = divmod(self._first(step), self.windows)
        offsets = tuple(int(start) for start in self._rank_starts(step))
        return Position(step, epoch, window, self.windows, offsets)

    def _first(self, step: int) -> int:
        """This rank's first window of a step, counted over all epochs."""
        if step < 0:
            raise IndexError(f"Batches: step={step} must not be negative")
        return step * self.batch_size + self.rank * (self.batch_size // self.ranks)

    def _rank_starts(self, step: int) -> np.ndarray:
        """First token of each of this rank's windows, int64 [batch_size // ranks]."""
        first = self._first(step)
        count = first + np.arange(self.batch_size // self.ranks)
        epochs, windows = count // self.windows, count % self.windows
        return np.concatenate([self._epoch_starts(int(epoch))[windows[epochs == epoch]] for epoch in np.unique(epochs)])

    def _epoch_starts(self, epoch: int) -> np.ndarray:
        """First tokens of an epoch's windows in the order of training, int64 [windows]."""
        if epoch not in self._starts:
            # Random bits instead of Generator methods: NumPy promises the same bits in every version, and a resumed run may
            # have a newer version.
            bits = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(self.windows + 1)
            offset = int(bits[0]) % self.room
            while len(self._starts) >= EPOCHS_KEPT:
                del self._starts[next(iter(self._starts))]
            self._starts[epoch] = offset + self.context * np.argsort(bits[1:], kind="stable").astype(np.int64)
        return self._starts[epoch]


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
        if self.windows < 1:
            raise ValueError(f"ValidationWindows: context={context} needs at least {context + 1} tokens, got {len(tokens)}")
        if batch_size < 1 or not 0 <= rank < ranks:
            raise ValueError(f"ValidationWindows: got batch_size={batch_size}, rank={rank}, ranks={ranks}")
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
            starts = self.starts[first : first + self.batch_size]
            window = self.tokens[starts[:, None] + np.arange(self.context + 1)].astype(np.int64)  # [rows, context + 1]
            yield torch.from_numpy(window[:, :-1].copy()), torch.from_numpy(window[:, 1:].copy())
