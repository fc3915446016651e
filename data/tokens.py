"""Files of token ids. They are written while the text is tokenised, so that a corpus may be larger than memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from threading import Event
from time import monotonic
from typing import TypeVar

import numpy as np

from data.split import Advance, Piece
from data.tokenizer import Tokenizer
from measure.environment import cpus

T = TypeVar("T")
R = TypeVar("R")

SPLITS = ("train", "val")  # data.split.TRAIN, VAL
MOST_THREADS = 32  # one thread reads for all of them
BATCH = 2**18  # characters tokenised by one thread at a time: `tokenizers` takes 100 bytes of memory for each


def write_tokens(
    folder: Path, pieces: Iterable[Piece], tokenizer: Tokenizer, dtype: np.dtype, advance: Advance
) -> dict[str, dict[str, int]]:
    """Writes train.bin and val.bin: each document's tokens and a separator. Returns the counts of each split.

    bytes are those of the text that the tokens stand for; lost are bytes of text that the tokenizer has no token for.
    """
    counts = {split: dict.fromkeys(("tokens", "bytes", "lost", "documents"), 0) for split in SPLITS}
    separator = np.array(tokenizer.separator, np.int64)
    bytes_of = tokenizer.bytes_of
    tokenizer.encode_batch([])  # makes what all threads share

    def encoded(batch: list[Piece], stopping: Event) -> list[tuple[int, bytes, dict[str, int]]]:
        found: list[tuple[int, bytes, dict[str, int]]] = []
        if stopping.is_set():
            return found
        for (split, text, ends), ids in zip(batch, tokenizer.encode_batch([text for _, text, _ in batch]), strict=True):
            whole = len(text.encode())
            told = min(whole, int(bytes_of[ids].sum()))  # a normaliser may make text longer
            end = separator if ends else separator[:0]
            more = {"tokens": len(ids) + len(end), "lost": whole - told, "documents": int(ends)}
            more["bytes"] = told + int(bytes_of[end].sum())
            found.append((split, np.concatenate((ids, end)).astype(dtype).tobytes(), more))
        return found

    with ExitStack() as stack:
        files = [stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS]
        batches = _batches(pieces if tokenizer.takes_pieces else _whole(pieces))
        for batch in in_threads(encoded, batches, min(cpus(), MOST_THREADS)):
            for split, ids, more in batch:
                files[split].write(ids)
                for name, count in more.items():
                    counts[SPLITS[split]][name] += count
                advance(more["bytes"] + more["lost"])
    return counts


def _whole(pieces: Iterable[Piece]) -> Iterator[Piece]:
    parts = []
    for split, text, ends in pieces:
        parts.append(text)
        if ends:
            yield split, "".join(parts), True
            parts = []


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def in_threads(
    work: Callable[[T, Event], R], items: Iterable[T], threads: int, meanwhile: Callable[[], object] = lambda: None
) -> Iterator[R]:
    """`work(item, stopping)` of each item, in order. At most threads + 1 items are taken ahead of the result that is asked for.

    A signal is heard at once, also while all threads are in a library that can't be interrupted. They are daemons, which end
    with the process. `work` ends early if it can once `stopping` is set.
    """
    stopping, ahead = Event(), deque[AsyncResult]()

    def oldest() -> R:
        while not ahead[0].ready():
            ahead[0].wait(0.5)
            meanwhile()
        return ahead.popleft().get()

    with ThreadPool(threads) as pool:
        try:
            for item in items:
                ahead.append(pool.apply_async(work, (item, stopping)))
                if len(ahead) > threads:
                    yield oldest()
            while ahead:
                yield oldest()
        finally:  # a thread that comes back from a library while the interpreter ends would abort the process
            stopping.set()
            until = monotonic() + 1
            for one in ahead:
                one.wait(max(0.0, until - monotonic()))
