"""Files of token ids. They are written while the text is tokenised, so that a corpus may be larger than memory."""

import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data.split import Piece, Pieces
from data.tokenizer import Tokenizer

SPLITS = ("train", "val")  # in the order of Piece.split
BATCH = 256  # pieces tokenised together: up to 4 million characters


@dataclass
class _Counts:
    tokens: int = 0
    bytes: int = 0  # of the text that the tokens stand for
    lost: int = 0  # of text that the tokenizer has no token for
    documents: int = 0


class Row(NamedTuple):
    """A tokenised piece."""

    split: int
    document: int
    ids: np.ndarray
    bytes: int  # of the text that the tokens stand for
    lost: int  # bytes of text that the tokenizer has no token for


def write_tokens(
    folder: Path, pieces: Pieces, tokenizer: Tokenizer, *, dtype: np.dtype, processes: int
) -> dict[str, dict[str, int]]:
    """Writes train.bin and val.bin: each document's tokens and a separator. Returns the counts of each split."""
    counts = [_Counts() for _ in SPLITS]
    last = [-1 for _ in SPLITS]  # number of the document that each split is writing
    separator = np.array(tokenizer.separator, dtype)
    separator_bytes = int(tokenizer.bytes_of[separator].sum())

    with ExitStack() as stack:
        files = [stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS]

        def end_document(split: int) -> None:
            files[split].write(separator.tobytes())
            counts[split].tokens += len(separator)
            counts[split].bytes += separator_bytes
            counts[split].documents += 1

        rows = _tokenised(pieces, tokenizer, dtype, processes)
        bar = stack.enter_context(tqdm(desc="writing tokens", unit="B", unit_scale=True, delay=3, leave=False))
        for row in rows:
            split, document, size = row.split, row.document, row.bytes
            if document != last[split]:
                if last[split] >= 0:
                    end_document(split)
                last[split] = document
            files[split].write(row.ids.tobytes())
            counts[split].tokens += len(row.ids)
            counts[split].bytes += size
            counts[split].lost += row.lost
            bar.update(size + row.lost)
        for split in range(len(SPLITS)):
            if last[split] >= 0:
                end_document(split)
    return {name: asdict(count) for name, count in zip(SPLITS, counts, strict=True)}


def _tokenised(pieces: Pieces, tokenizer: Tokenizer, dtype: np.dtype, processes: int) -> Iterator[Row]:
    """The rows of the pieces, in their order. One process tokenises as it reads; `tokenizers` uses a thread per core."""
    rest = pieces()
    batches = iter(lambda: list(islice(rest, BATCH)), [])
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
    rows = []
    for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
        whole = len(piece.text.encode())
        told = min(whole, int(tokenizer.bytes_of[ids].sum()))  # a normaliser may make text longer
        rows.append(Row(piece.split, piece.document, np.array(ids, dtype), told, whole - told))
    return rows
