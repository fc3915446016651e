"""Files of token ids. They are written while the text is tokenised, so that a corpus may be larger than memory."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

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


def write_tokens(
    folder: Path, pieces: Pieces, tokenizer: Tokenizer, *, dtype: np.dtype, processes: int, scratch: Path
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

        rows = _tokenised(pieces, tokenizer, dtype, processes, scratch)
        bar = stack.enter_context(tqdm(desc="writing tokens", unit="B", unit_scale=True, delay=3, leave=False))
        for row in rows:
            split, document, size, lost = (int(row[name]) for name in ("split", "document", "bytes", "lost"))
            if document != last[split]:
                if last[split] >= 0:
                    end_document(split)
                last[split] = document
            ids = np.asarray(row["ids"], dtype)
            files[split].write(ids.tobytes())
            counts[split].tokens += len(ids)
            counts[split].bytes += size
            counts[split].lost += lost
            bar.update(size + lost)
        for split in range(len(SPLITS)):
            if last[split] >= 0:
                end_document(split)
    return {name: asdict(count) for name, count in zip(SPLITS, counts, strict=True)}


def _tokenised(
    pieces: Pieces, tokenizer: Tokenizer, dtype: np.dtype, processes: int, scratch: Path
) -> Iterable[dict[str, Any]]:
    """Rows of split, document, bytes, lost bytes and ids, in the order of the pieces.

    One process tokenises the rows as it reads them; `tokenizers` uses a thread per core. Several processes share the text as
    Arrow files in `scratch`.
    """

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        ids = [np.array(row, dtype) for row in tokenizer.encode_batch(batch["text"])]
        text = [len(text.encode()) for text in batch["text"]]
        # a normaliser may make text longer
        told = [min(whole, int(tokenizer.bytes_of[row].sum())) for whole, row in zip(text, ids, strict=True)]
        return {"ids": ids, "bytes": told, "lost": [whole - part for whole, part in zip(text, told, strict=True)]}

    if processes == 1:
        return _in_this_process(pieces(), encode)
    if next(pieces(), None) is None:
        return ()  # `datasets` refuses to store nothing; load_corpus has the message
    import datasets

    def rows() -> Iterator[dict[str, Any]]:
        return (piece._asdict() for piece in pieces())

    ids = datasets.List(datasets.Value(dtype.name))
    columns = {"split": datasets.Value("int8"), "document": datasets.Value("int64")}
    stored = datasets.Dataset.from_generator(
        rows,
        features=datasets.Features({**columns, "text": datasets.Value("string")}),
        cache_dir=str(scratch / "text"),
        fingerprint="text",  # the folder is new; the default would hash all that the generator holds
    )
    return stored.map(
        encode,
        batched=True,
        batch_size=BATCH,
        num_proc=processes,
        remove_columns=["text"],
        features=datasets.Features({**columns, "ids": ids, "bytes": datasets.Value("int64"), "lost": datasets.Value("int64")}),
        cache_file_name=str(scratch / "tokens.arrow"),
        new_fingerprint="tokens",
        desc="tokenising",
    ).with_format("numpy")


def _in_this_process(
    pieces: Iterator[Piece], encode: Callable[[dict[str, list[Any]]], dict[str, list[Any]]]
) -> Iterator[dict[str, Any]]:
    while batch := list(islice(pieces, BATCH)):
        found = encode({"text": [piece.text for piece in batch]})
        for at, piece in enumerate(batch):
            yield piece._asdict() | {name: values[at] for name, values in found.items()}
