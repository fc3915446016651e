"""Files of token ids. They are written while the text is tokenised, so that a corpus may be larger than memory."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from threading import Event
from time import monotonic
from typing import TypeVar

import numpy as np

from data.split import Piece
from data.tokenizer import Tokenizer
from measure.environment import cpus

T = TypeVar("T")
R = TypeVar("R")

SPLITS = ("train", "val")  # data.split.TRAIN, VAL
MOST_THREADS = 32  # one thread reads for all of them
BATCH = 2**18  # characters tokenised by one thread at a time: `tokenizers` takes 100 bytes of memory for each


def write_tokens(folder: Path, pieces: Iterable[Piece], tokenizer: Tokenizer, dtype: np.dtype) -> dict[str, Counter[str]]:
    """Writes train.bin and val.bin: each document's tokens and a separator. Returns the counts of each split.

    bytes are those of the text that the tokens stand for; lost are bytes of text that the tokenizer has no token for.
    """
    counts = {split: Counter[str]() for split in SPLITS}
    separator, bytes_of = np.array(tokenizer.separator, np.int64), tokenizer.bytes_of
    tokenizer.encode_batch([])  # makes what all threads share

    def encoded(batch: tuple[int, list[tuple[str, bool]]], stopping: Event) -> tuple[int, bytes, dict[str, int]]:
        split, pieces = batch
        texts = [] if stopping.is_set() else [text for text, _ in pieces]
        parts = [separator[:0]]
        for (_, ends), ids in zip(pieces, tokenizer.encode_batch(texts), strict=False):
            parts += [ids, separator] if ends else [ids]
        found = np.concatenate(parts)
        documents, whole = sum(ends for _, ends in pieces), sum(len(text.encode()) for text in texts)
        separators = documents * int(bytes_of[separator].sum())
        told = min(whole, int(bytes_of[found].sum()) - separators)  # a normaliser may make text longer
        more = {"tokens": len(found), "bytes": told + separators, "lost": whole - told, "documents": documents}
        return split, found.astype(dtype).tobytes(), more

    with ExitStack() as stack:
        files = [stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS]
        batches = _batches(pieces if tokenizer.takes_pieces else _whole(pieces))
        for split, ids, more in in_threads(encoded, batches, min(cpus(), MOST_THREADS)):
            files[split].write(ids)
            counts[SPLITS[split]].update(more)
    return counts


def _whole(pieces: Iterable[Piece]) -> Iterator[Piece]:
    parts = []
    for split, text, ends in pieces:
        parts.append(text)
        if ends:
            yield split, "".join(parts), True
            parts = []


def _batches(pieces: Iterable[Piece]) -> Iterator[tuple[int, list[tuple[str, bool]]]]:
    """Pieces of one split each."""
    batches: list[list[tuple[str, bool]]] = [[] for _ in SPLITS]
    sizes = [0 for _ in SPLITS]
    for split, text, ends in pieces:
        batches[split].append((text, ends))
        sizes[split] += len(text)
        if sizes[split] >= BATCH:
            yield split, batches[split]
            batches[split], sizes[split] = [], 0
    yield from enumerate(batches)


def in_threads(work: Callable[[T, Event], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """`work(item, stopping)` of each item, in order. At most threads + 1 items are taken ahead of the result that is asked for.

    A signal is heard at once, also while all threads are in a library that can't be interrupted. They are daemons, which end
    with the process. `work` ends early if it can once `stopping` is set.
    """
    stopping, ahead = Event(), deque[AsyncResult]()
    with ThreadPool(threads) as pool:
        try:
            for item in items:
                ahead.append(pool.apply_async(work, (item, stopping)))
                if len(ahead) > threads:
                    yield ahead[0].get()
                    ahead.popleft()
            for one in ahead:
                yield one.get()
        finally:  # a thread that comes back from a library while the interpreter ends would abort the process
            stopping.set()
            until = monotonic() + 1
            for one in ahead:
                one.wait(max(0.0, until - monotonic()))
