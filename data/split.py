"""The split of a corpus into text to train on and text to validate on."""

from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from configs.schema import DataConfig
from data.documents import Document, Opened

TRAIN, VAL = 0, 1


class Piece(NamedTuple):
    split: int  # TRAIN or VAL
    document: int  # counted over all documents with text
    text: str  # never empty


Pieces = Callable[[], Iterator[Piece]]  # each call reads the corpus from the start


def split_documents(opened: Opened, data: DataConfig) -> Pieces:
    """The pieces of all documents, each marked with its split.

    - With data.val_split the source has both splits.
    - Without it, whole documents are held out in the order of a hash of their content, until their bytes are closest to
      data.val_fraction. File names and the order of reading do not matter. Copies of a document stay together.
    - A single document is cut, and its end is held out. Copies of one document are each cut at the same place.
    - A stream is read once and its size is not known. Each of its documents is held out with probability data.val_fraction,
      by the same hash.
    """
    train = _pieces(opened.train, data.max_documents)
    if opened.val is not None:
        val = _pieces(opened.val, data.max_documents)
        return lambda: chain(train(), (piece._replace(split=VAL) for piece in val()))
    if opened.streaming:
        return lambda: _split_by_hash(train, data.val_fraction)
    hashes, sizes = _hashes_and_sizes(train)
    if len(np.unique(hashes)) > 1:
        held_out = hold_out(hashes, sizes, data.val_fraction)
        return lambda: (piece._replace(split=VAL if held_out[piece.document] else TRAIN) for piece in train())
    position = int(sizes[:1].sum() * (1 - data.val_fraction))  # of a document: all are as long as the first
    return lambda: _split_by_position(train, position)


def whole_documents(pieces: Pieces) -> Pieces:
    """The same text with one piece per document and split, for tokenizers that need whole documents."""

    def joined() -> Iterator[Piece]:
        for (split, document), parts in groupby(pieces(), key=attrgetter("split", "document")):
            yield Piece(split, document, "".join(piece.text for piece in parts))

    return joined


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


def _pieces(documents: Callable[[], Iterator[Document]], limit: int | None) -> Pieces:
    """The pieces of documents that have text, all marked TRAIN."""

    def pieces() -> Iterator[Piece]:
        number = 0
        for document in islice(documents(), limit):
            empty = True
            for text in document:
                if text:
                    yield Piece(TRAIN, number, text)
                    empty = False
            number += not empty

    return pieces


def _hashes_and_sizes(pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """Of each document's UTF-8 text: uint64 and int64 [documents]."""
    hashes, sizes = [], []
    for _, document in groupby(pieces(), key=attrgetter("document")):
        digest, size = blake2b(digest_size=8), 0
        for piece in document:
            utf8 = piece.text.encode()
            digest.update(utf8)
            size += len(utf8)
        hashes.append(int.from_bytes(digest.digest()))
        sizes.append(size)
    return np.array(hashes, dtype=np.uint64), np.array(sizes, dtype=np.int64)


def _split_by_hash(pieces: Pieces, fraction: float) -> Iterator[Piece]:
    for _, document in groupby(pieces(), key=attrgetter("document")):
        whole = list(document)  # a row of the stream, which is in memory
        digest = blake2b("".join(piece.text for piece in whole).encode(), digest_size=8).digest()
        split = VAL if int.from_bytes(digest) < fraction * 2**64 else TRAIN
        yield from (piece._replace(split=split) for piece in whole)


def _split_by_position(pieces: Pieces, position: int) -> Iterator[Piece]:
    """The first `position` bytes of a document are to train on. The piece there is cut at a line end, or between characters."""
    read, before = 0, 0
    for piece in pieces():
        if piece.document != before:
            read, before = 0, piece.document
        utf8 = piece.text.encode()
        if read + len(utf8) <= position:
            yield piece
        elif read >= position:
            yield piece._replace(split=VAL)
        else:
            head = utf8[: position - read].decode(errors="ignore")  # drops the bytes of a character cut in two
            head = head[: head.rfind("\n", len(head) * 9 // 10) + 1] or head
            if head:
                yield piece._replace(text=head)
            yield piece._replace(split=VAL, text=piece.text[len(head) :])
        read += len(utf8)
