"""Which text is trained on and which is held out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby, islice
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

    - With data.val_split the two are the source's own.
    - Otherwise whole documents are held out, in the order of a hash of their content, as long as that brings their share of
      the bytes closer to data.val_fraction: neither file names nor the order of reading matter, and copies of a document stay
      together.
    - A single document is cut: its end is held out.
    - A stream is to be read once, before its size is known, so there each document is held out with probability
      data.val_fraction, decided by the same hash.
    """
    train = _numbered(opened.train, data.max_documents)
    if opened.val is not None:
        val = _numbered(opened.val, data.max_documents)
        return lambda: _one_after_the_other(train, val)
    if opened.streaming:
        return lambda: _split_by_hash(train, data.val_fraction)
    survey = _survey(train)
    if len(np.unique(survey.hashes)) > 1:
        held_out = hold_out(survey.hashes, survey.bytes, data.val_fraction)
        return lambda: (piece._replace(split=VAL if held_out[piece.document] else TRAIN) for piece in train())
    position = int(survey.bytes.sum() * (1 - data.val_fraction))
    return lambda: _split_by_position(train, position)


def whole_documents(pieces: Pieces) -> Pieces:
    """The same text with one piece a document (two where its end is held out), for tokenizers that need it in one."""

    def joined() -> Iterator[Piece]:
        for (split, document), parts in groupby(pieces(), key=attrgetter("split", "document")):
            yield Piece(split, document, "".join(piece.text for piece in parts))

    return joined


def hold_out(hashes: np.ndarray, sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents are held out, bool [documents]; at least one is, and at least one is not.

    `hashes` uint64 and `sizes` int64 are [documents], with two different hashes among them.
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


def _numbered(documents: Callable[[], Iterator[Document]], limit: int | None) -> Pieces:
    """Pieces of the documents that have text, all marked TRAIN."""

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


def _one_after_the_other(train: Pieces, val: Pieces) -> Iterator[Piece]:
    yield from train()
    yield from (piece._replace(split=VAL) for piece in val())


@dataclass(frozen=True)
class _Survey:
    hashes: np.ndarray  # uint64 [documents]
    bytes: np.ndarray  # int64 [documents], of UTF-8


def _survey(pieces: Pieces) -> _Survey:
    hashes, sizes = [], []
    for _, document in groupby(pieces(), key=attrgetter("document")):
        digest, size = blake2b(digest_size=8), 0
        for piece in document:
            utf8 = piece.text.encode()
            digest.update(utf8)
            size += len(utf8)
        hashes.append(int.from_bytes(digest.digest()))
        sizes.append(size)
    return _Survey(np.array(hashes, dtype=np.uint64), np.array(sizes, dtype=np.int64))


def _split_by_hash(pieces: Pieces, fraction: float) -> Iterator[Piece]:
    for _, document in groupby(pieces(), key=attrgetter("document")):
        whole = list(document)  # a streamed document is a row, which is in memory anyway
        digest = blake2b("".join(piece.text for piece in whole).encode(), digest_size=8).digest()
        split = VAL if int.from_bytes(digest) < fraction * 2**64 else TRAIN
        yield from (piece._replace(split=split) for piece in whole)


def _split_by_position(pieces: Pieces, position: int) -> Iterator[Piece]:
    """The first `position` bytes of all the text train; the piece there is cut at a line end, or else between characters."""
    read = 0
    for piece in pieces():
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
