"""Files of token ids. They are written while the text is tokenised, so that a corpus may be larger than memory."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.split import Labelled
from data.tokenizer import Tokenizer, cut

SPLITS = ("train", "val")  # data.split.TRAIN, VAL
BATCH = 256  # pieces tokenised together, on all cores: up to 4 million characters


def write_tokens(folder: Path, documents: Labelled, tokenizer: Tokenizer, dtype: np.dtype) -> dict[str, dict[str, int]]:
    """Writes train.bin and val.bin: each document's tokens and a separator. Returns the counts of each split.

    bytes are those of the text that the tokens stand for; lost are bytes of text that the tokenizer has no token for.
    """
    counts = {split: dict.fromkeys(("tokens", "bytes", "lost", "documents"), 0) for split in SPLITS}
    left = _pieces(documents, tokenizer)
    with ExitStack() as stack:
        files = [stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS]
        bar = stack.enter_context(tqdm(desc="writing tokens", unit="B", unit_scale=True, delay=3, leave=False))
        while batch := list(islice(left, BATCH)):
            for (split, text, ends), ids in zip(batch, tokenizer.encode_batch([text for _, text, _ in batch]), strict=True):
                whole = len(text.encode())
                told = min(whole, int(tokenizer.bytes_of[ids].sum()))  # a normaliser may make text longer
                end = tokenizer.separator if ends else []
                files[split].write(np.array(ids + end, dtype).tobytes())
                more = {"tokens": len(ids + end), "lost": whole - told, "documents": int(ends)}
                more["bytes"] = told + int(tokenizer.bytes_of[end].sum())
                for name, count in more.items():
                    counts[SPLITS[split]][name] += count
                bar.update(whole)
    return counts


def _pieces(documents: Labelled, tokenizer: Tokenizer) -> Iterator[tuple[int, str, bool]]:
    """The split and the text of each piece, and whether it is the last one of its document."""
    for split, document in documents():
        *parts, last = cut(document) if tokenizer.takes_pieces else [document]
        yield from ((split, part, False) for part in parts)
        yield split, last, True
