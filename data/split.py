"""The split of a corpus into text to train on and text to validate on."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice, repeat

import numpy as np

from configs.schema import DataConfig
from data.pieces import Blocks, Read, in_pieces

TRAIN, VAL = 0, 1
ALL = 2**63  # bytes of a document

Piece = tuple[int, str, bool]  # TRAIN or VAL, text, and whether its document ends with it


@dataclass(frozen=True)
class Labelled:
    """All documents with text in pieces, each marked with its split."""

    read: Callable[[], Iterable[Piece]]  # each call reads the corpus again
    bytes: int | None = None  # of the text; None: of a stream, which is not known
    train_bytes: int | None = None


def split_documents(
    train: Read, val: Read | None, data: DataConfig, shown: Callable[[Blocks], Blocks] = lambda blocks: blocks
) -> Labelled:
    """Splits the documents. What is read for that goes through `shown`.

    - With data.val_split the source has both splits.
    - Without it, whole documents are held out in the order of a hash of their content, until their bytes are closest to
      data.val_fraction. File names and the order of reading do not matter. Copies of a document stay together.
    - A single document is cut, and its end is held out. Copies of one document are each cut at the same place.
    - A stream is read once and its size is not known. Each of its documents is held out with probability data.val_fraction,
      by the same hash.
    """
    fraction, most = data.val_fraction, data.max_documents
    trained = np.zeros(0, np.int64)  # bytes of each document of `train` to train on; of those behind them ALL

    def read() -> Iterator[Piece]:
        yield from _cut(in_pieces(train(), most), chain(map(int, trained), repeat(ALL)))
        if val is not None:
            yield from _cut(in_pieces(val(), most), repeat(0))

    def stream() -> Iterator[Piece]:
        for document in islice(train(), most):  # a row, with its end
            [hashed], _ = _described([document])
            yield from _cut(in_pieces([document]), repeat(0 if hashed < fraction * 2**64 else ALL))

    if data.streaming:
        return Labelled(stream if val is None else read)
    hashes, sizes = _described(shown(in_pieces(train(), most)))
    total = int(sizes.sum())
    if val is not None:
        return Labelled(read, total + int(_described(shown(in_pieces(val(), most)))[1].sum()), total)
    if len(np.unique(hashes)) > 1:
        trained = np.where(hold_out(hashes, sizes, fraction), 0, sizes)
    else:  # all are as long as the first
        trained = np.minimum((sizes * (1 - fraction)).astype(np.int64), sizes - 1)
    return Labelled(read, total, int(trained.sum()))


def hold_out(hashes: np.ndarray, sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents are held out, bool [documents]. At least one is held out and at least one is not.

    `hashes` uint64 and `sizes` int64 are [documents]. At least two hashes differ.
    """
    order, group = np.unique(hashes, return_inverse=True)  # equal documents form a group
    group_sizes = np.bincount(group, weights=sizes).astype(np.int64)
    target = fraction * sizes.sum()
    chosen = np.zeros(len(order), dtype=bool)
    held = 0
    for i, size in enumerate(group_sizes[:-1]):  # never all of them
        if abs(held + size - target) < abs(held - target):  # skips a document that is much larger than the share
            chosen[i] = True
            held += int(size)
        if held >= target:
            break
    if not chosen.any():
        chosen[np.argmin(group_sizes)] = True
    return chosen[group]


def _described(documents: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """A hash of each document's UTF-8 text, uint64, and its bytes, int64."""
    hashes, sizes = array("Q"), array("q")
    hashed, size = blake2b(digest_size=8), 0
    for text, ends in documents:
        hashed.update(utf8 := text.encode())
        size += len(utf8)
        if ends:
            hashes.append(int.from_bytes(hashed.digest()))
            sizes.append(size)
            hashed, size = blake2b(digest_size=8), 0
    return np.array(hashes, np.uint64), np.array(sizes, np.int64)


def _cut(pieces: Blocks, trained: Iterator[int]) -> Iterator[Piece]:
    """The first bytes of each document, as many as `trained` gives, are to train on. A piece that has more of them is cut at a
    line end, or between characters."""
    left = position = next(trained)
    for text, ends in pieces:
        utf8 = text.encode()
        if 0 <= left < len(utf8):
            head = utf8[:left].decode(errors="ignore")  # drops the bytes of a character cut in two
            end = head.rfind("\n", len(head) * 9 // 10) + 1 or len(head)
            if end or left < position:
                yield TRAIN, text[:end], True
            yield VAL, text[end:], ends
        else:
            yield VAL if left < 0 else TRAIN, text, ends
        left -= len(utf8)
        if ends:
            left = position = next(trained)
