"""Windows of a file of tokens, where a device reads them.

Tokens that fit lie on the device and windows are gathered there, from their first tokens. Of a larger file the host reads the
windows, in a thread ahead of the step that needs them.
"""

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from mmap import MADV_WILLNEED, PAGESIZE, mmap

import numpy as np
import torch
from torch import Tensor

RESIDENT_BYTES = 2**30
AHEAD = 4  # steps that the thread reads ahead


class Windows:
    """`read(starts)` in a step, behind `load(step)` on the host.

    Args:
        tokens: one-dimensional, of any integers.
        starts_of: of a step, the first tokens of its windows, int64 [rows].
        context: a window has one token more.
        rows: windows of a step.
    """

    def __init__(
        self, tokens: np.ndarray, starts_of: Callable[[int], np.ndarray], context: int, rows: int, device: torch.device
    ) -> None:
        self._tokens, self._starts_of, self._device = tokens, starts_of, device
        self._offsets = torch.arange(context + 1, device=device)
        self._resident: Tensor | None = None
        if tokens.nbytes <= RESIDENT_BYTES:
            # PyTorch computes with few unsigned types; `read` takes the sign away again
            signed = tokens.view(f"i{tokens.itemsize}")
            self._bits = 2 ** (8 * tokens.itemsize - (tokens.dtype.kind == "i")) - 1
            with warnings.catch_warnings(action="ignore"):  # the array can't be written; nobody does
                self._resident = torch.from_numpy(signed).to(device)
        else:
            self._buffer = torch.zeros(rows, context + 1, dtype=torch.int64, device=device)
            self._reader = ThreadPoolExecutor(1)
            self._read: dict[int, Future[Tensor]] = {}

    def forget(self) -> None:
        """Drops what was read ahead, as of another run."""
        if self._resident is None:
            self._read.clear()

    def load(self, step: int) -> None:
        """Makes the windows of `step` those that `read` gives, where the host reads them. Does not wait for the device."""
        if self._resident is None:
            wanted = range(step, step + AHEAD)
            self._read = {number: self._read.get(number) or self._reader.submit(self._of, number) for number in wanted}
            self._buffer.copy_(self._read[step].result(), non_blocking=True)

    def read(self, starts: Tensor) -> Tensor:
        """The windows, int64 [rows, context + 1], that begin at `starts`, int64 [rows] on the device."""
        if self._resident is None:
            return self._buffer
        return self._resident[starts[:, None] + self._offsets].long() & self._bits

    def _of(self, step: int) -> Tensor:
        starts, pages, token = self._starts_of(step), self._tokens.base, self._tokens.itemsize
        if isinstance(pages, mmap):  # all at once; page faults read one after the other, and 128 KiB around each
            for first in (starts * token // PAGESIZE * PAGESIZE).tolist():
                pages.madvise(MADV_WILLNEED, first, min(PAGESIZE + token * len(self._offsets), len(pages) - first))
        return pinned(torch.from_numpy(cut(self._tokens, starts, len(self._offsets))), self._device)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor where the device can copy it from while the host goes on."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def cut(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """The windows of `length` tokens that start there, int64 [starts, length]."""
    return tokens[starts[:, None] + np.arange(length)].astype(np.int64)
