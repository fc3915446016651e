"""Files of token ids. They are written while the text is tokenised, so that a corpus may be larger than memory."""

import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data.split import Labelled
from data.tokenizer import Tokenizer

SPLITS = ("train", "val")  # data.split.TRAIN, VAL
BATCH = 256  # pieces tokenised together: up to 4 million characters


class Piece(NamedTuple):
    split: int
    text: str
    ends: bool  # it is the last one of its document


class Row(NamedTuple):
    """A tokenised piece; the last one of a document with the separator."""

    split: int
    ids: np.ndarray
    bytes: int  # of the text that the tokens stand for
    lost: int  # bytes of text that the tokenizer has no token for
    ends: bool


def write_tokens(
    folder: Path, documents: Labelled, tokenizer: Tokenizer, *, dtype: np.dtype, processes: int
) -> dict[str, dict[str, int]]:
    """Writes train.bin and val.bin: each document's tokens and a separator. Returns the counts of each split."""
    counts = {split: dict.fromkeys(("tokens", "bytes", "lost", "documents"), 0) for split in SPLITS}
    with ExitStack() as stack:
        files = [stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS]
        bar = stack.enter_context(tqdm(desc="writing tokens", unit="B", unit_scale=True, delay=3, leave=False))
        for row in _tokenised(documents, tokenizer, dtype, processes):
            files[row.split].write(row.ids.tobytes())
            count = counts[SPLITS[row.split]]
            count["tokens"] += len(row.ids)
            count["bytes"] += row.bytes
            count["lost"] += row.lost
            count["documents"] += row.ends
            bar.update(row.bytes + row.lost)
    return counts


def _tokenised(documents: Labelled, tokenizer: Tokenizer, dtype: np.dtype, processes: int) -> Iterator[Row]:
    """The rows of the documents, in their order. One process tokenises as it reads; `tokenizers` uses a thread per core."""
    pieces = (Piece(split, one, i == len(texts)) for split, texts in documents() for i, one in enumerate(texts, start=1))
    batches = iter(lambda: list(islice(pieces, BATCH)), [])
    encode = partial(_encode, tokenizer, dtype)
    if processes == 1:
        yield from chain.from_iterable(map(encode, batches))
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        pending = deque(pool.submit(encode, batch) for batch in islice(batches, 2 * processes))
        while pending:  # a bounded number, so that a corpus may be larger than memory
            yield from pending.popleft().result()
            pending.extend(pool.submit(encode, batch) for batch in islice(batches, 1))


def _encode(tokenizer: Tokenizer, dtype: np.dtype, batch: list[Piece]) -> list[Row]:
    rows, separator = [], tokenizer.separator
    for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
        whole = len(piece.text.encode())
        told = min(whole, int(tokenizer.bytes_of[ids].sum()))  # a normaliser may make text longer
        end = separator if piece.ends else []
        row = Row(piece.split, np.array(ids + end, dtype), told + int(tokenizer.bytes_of[end].sum()), whole - told, piece.ends)
        rows.append(row)
    return rows
