"""The split of a corpus into text to train on and text to validate on."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice

import numpy as np

from configs.schema import DataConfig
from data.pieces import Blocks, Read, in_pieces

TRAIN, VAL = 0, 1

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

    def read(documents: Read, split_of: Callable[[int], int]) -> Iterator[Piece]:
        number = 0
        for text, ends in in_pieces(documents(), most):
            yield split_of(number), text, ends
            number += ends

    def both() -> Iterable[Piece]:
        assert val is not None
        return chain(read(train, lambda number: TRAIN), read(val, lambda number: VAL))

    def stream() -> Iterator[Piece]:
        for document in islice(train(), most):  # a row, with its end
            [hashed], _ = _described([document])
            yield from ((VAL if hashed < fraction * 2**64 else TRAIN, *piece) for piece in in_pieces([document]))

    if data.streaming:
        return Labelled(stream if val is None else both)
    hashes, sizes = _described(shown(in_pieces(train(), most)))
    total = int(sizes.sum())
    if val is not None:
        return Labelled(both, total + int(_described(shown(in_pieces(val(), most)))[1].sum()), total)
    if len(np.unique(hashes)) > 1:
        held_out = hold_out(hashes, sizes, fraction)
        split_of = lambda number: int(number < len(held_out) and held_out[number])  # noqa: E731  (a file may grow)
        return Labelled(lambda: read(train, split_of), total, int(sizes[~held_out].sum()))
    size = int(sizes[:1].sum())  # of a document: all are as long as the first
    position = min(int(size * (1 - fraction)), size - 1)
    return Labelled(lambda: _cut_at(position, in_pieces(train(), most)), total, position * len(sizes))


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


def _cut_at(position: int, pieces: Blocks) -> Iterator[Piece]:
    """The first `position` bytes of a document are to train on. The piece there is cut at a line end, or between characters."""
    left = position
    for text, ends in pieces:
        if 0 <= left < len(utf8 := text.encode()):
            head = utf8[:left].decode(errors="ignore")  # drops the bytes of a character cut in two
            end = head.rfind("\n", len(head) * 9 // 10) + 1 or len(head)
            if end or left < position:
                yield TRAIN, text[:end], True
            yield VAL, text[end:], ends
        else:
            yield VAL if left < 0 else TRAIN, text, ends
        left = position if ends else left - len(utf8)
