"""The split of a corpus into text to train on and text to validate on."""

from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import chain, islice

import numpy as np

from configs.schema import DataConfig
from data.documents import Read
from data.tokenizer import cut

TRAIN, VAL = 0, 1

Labelled = Callable[[], Iterator[tuple[int, str]]]  # TRAIN or VAL, and a document; each call reads the corpus again


def split_documents(train: Read, val: Read | None, data: DataConfig) -> Labelled:
    """All documents with text, each marked with its split.

    - With data.val_split the source has both splits.
    - Without it, whole documents are held out in the order of a hash of their content, until their bytes are closest to
      data.val_fraction. File names and the order of reading do not matter. Copies of a document stay together.
    - A single document is cut, and its end is held out. Copies of one document are each cut at the same place.
    - A stream is read once and its size is not known. Each of its documents is held out with probability data.val_fraction,
      by the same hash.
    """

    def with_text(documents: Read) -> Iterator[str]:
        return filter(None, islice(documents(), data.max_documents))

    fraction = data.val_fraction
    if val is not None:
        return lambda: chain(((TRAIN, one) for one in with_text(train)), ((VAL, one) for one in with_text(val)))
    if data.streaming:
        return lambda: ((VAL if _hash(one)[0] < fraction * 2**64 else TRAIN, one) for one in with_text(train))
    described = np.array([_hash(one) for one in with_text(train)], np.uint64).reshape(-1, 2)
    hashes, sizes = described[:, 0], described[:, 1].astype(np.int64)
    if len(np.unique(hashes)) > 1:
        held_out = hold_out(hashes, sizes, fraction)
        return lambda: ((int(held), one) for held, one in zip(held_out, with_text(train), strict=True))
    size = int(sizes[:1].sum())  # of a document: all are as long as the first
    position = min(int(size * (1 - fraction)), size - 1)
    return lambda: chain.from_iterable(_cut_at(position, one) for one in with_text(train))


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


def _hash(document: str) -> tuple[int, int]:
    """A hash of a document's UTF-8 text, and its bytes."""
    utf8 = document.encode()
    return int.from_bytes(blake2b(utf8, digest_size=8).digest()), len(utf8)


def _cut_at(position: int, document: str) -> Iterator[tuple[int, str]]:
    """The first `position` bytes are to train on. The piece there is cut at a line end, or between characters."""
    end = 0
    for piece in cut(document):
        if len(utf8 := piece.encode()) > position:
            head = utf8[:position].decode(errors="ignore")  # drops the bytes of a character cut in two
            end += head.rfind("\n", len(head) * 9 // 10) + 1 or len(head)
            break
        position -= len(utf8)
        end += len(piece)
    yield from ((split, text) for split, text in ((TRAIN, document[:end]), (VAL, document[end:])) if text)
