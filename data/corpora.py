"""A corpus: documents → split → tokenizer → tokens on disk. A cache finds it again by content and settings."""

import json
import math
import random
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import numpy as np

from configs.schema import DataConfig, TokenizerConfig, TokenizerKind
from data.cache import cached_folder
from data.documents import Documents, find_documents
from data.pieces import in_pieces
from data.split import TRAIN, Piece, split_documents
from data.tokenizer import Tokenizer, char_tokenizer, pretrained_file, pretrained_tokenizer, train_bpe
from data.tokens import in_threads, write_tokens
from measure.progress import progress

T = TypeVar("T", bound=tuple)  # of a piece: its text, whether a document ends with it; what else there is in front
FORMAT = 2  # of the cache; another number makes every corpus anew
# Bytes of training text that BPE learns from, at least, and for each token. Of 96 MB of programs' sources 2048 tokens made from
# these bytes need 0.2 % more tokens for a text than from twice as many, 32768 tokens 0.4 % more than from all.
BPE_BYTES, BPE_BYTES_OF_TOKEN = 2**23, 2**10
SHORT = 4096  # characters given to the trainer at once; a signal waits for the next


@dataclass(frozen=True)
class Split:
    """One side of a corpus, as token ids."""

    tokens: np.ndarray  # [tokens] uint16 or uint32, a read-only memmap: pages are read when used
    bytes: int  # of the UTF-8 text that the tokens stand for; an end-of-text token has no bytes
    documents: int
    lost: int = 0  # bytes of text for which the tokenizer has no token

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / len(self.tokens)

    def bits_per_byte(self, loss: float) -> float:
        """A loss of this text, in nats per token, in bits per byte."""
        return loss / math.log(2) / self.bytes_per_token


@dataclass(frozen=True)
class Corpus:
    name: str
    tokenizer: Tokenizer
    train: Split
    val: Split
    identity: str  # hash of the documents' content and of all settings that the tokens depend on


def load_corpus(data: DataConfig, tokenizer: TokenizerConfig, *, context: int) -> Corpus:
    """The corpus of `data`, tokenised by `tokenizer`, from the cache if it is there. configs.rules has checked both.

    Raises FileNotFoundError or ValueError, with the key, for all in the data or the tokenizer that would stop a run with this
    context.
    """
    documents = find_documents(data)
    settings = _settings(data, tokenizer, documents)
    folder = cached_folder(
        data.cache_dir,
        data.called,
        settings,
        build=lambda folder: _build(folder, data, tokenizer, documents, settings),
    )
    corpus = _open(folder, data.called)
    for name, split in (("training", corpus.train), ("validation", corpus.val)):
        if len(split.tokens) <= context:
            raise ValueError(
                f"data.name={data.called}: the {name} split has {len(split.tokens)} tokens ({split.bytes} bytes, "
                f"{split.documents} documents) and model.context={context} needs at least {context + 1}. Give it more text "
                "(data.files, data.max_documents, data.val_fraction, data.val_split), or lower model.context."
            )
    return corpus


def identity(data: DataConfig, tokenizer: TokenizerConfig) -> str:
    """`Corpus.identity` of `load_corpus`, without the corpus. Raises as `load_corpus`."""
    return _hash(_settings(data, tokenizer, find_documents(data)))


def _hash(settings: dict[str, Any]) -> str:
    return sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _settings(data: DataConfig, tokenizer: TokenizerConfig, documents: Documents) -> dict[str, Any]:
    """All that the tokens depend on, as JSON."""
    settings: dict[str, Any] = {
        "format": FORMAT,
        "source": str(data.source),
        **documents.identity,
        "max_documents": data.max_documents,
        "tokenizer": str(tokenizer.kind),
    }
    if data.val_split is None:
        settings["val_fraction"] = data.val_fraction
    if tokenizer.kind == TokenizerKind.bpe:
        settings["vocab_size"] = tokenizer.vocab_size
        if documents.bytes is None or documents.bytes > _learned(tokenizer):  # else it learns from all, as it always has
            settings["learned"] = _learned(tokenizer)
    if tokenizer.kind == TokenizerKind.pretrained:
        assert tokenizer.pretrained is not None  # checked before
        path = pretrained_file(tokenizer.pretrained)
        settings["pretrained"] = tokenizer.pretrained if path is None else sha256(path.read_bytes()).hexdigest()
    return settings


def _build(folder: Path, data: DataConfig, config: TokenizerConfig, documents: Documents, settings: dict[str, Any]) -> None:
    """Writes tokenizer.json, train.bin, val.bin and corpus.json into a cache folder."""
    scratch = folder / "scratch"
    scratch.mkdir()
    # A pretrained tokenizer is loaded first, so that its absence is known before the documents are read.
    tokenizer = pretrained_tokenizer(str(config.pretrained)) if config.kind == TokenizerKind.pretrained else None
    shown = partial(_shown, data.called)
    labelled = split_documents(*documents.open(scratch), data, partial(shown, "reading", documents.bytes))
    if config.kind == TokenizerKind.char:  # of both splits, as the validation text must have tokens too
        pieces = shown("characters", labelled.bytes, labelled.read())
        tokenizer = char_tokenizer(chain.from_iterable(text for _, text, _ in pieces))
    if config.kind == TokenizerKind.bpe:

        def train(vocab_size: int, stopping: Event) -> Tokenizer:
            pieces = shown("training the tokenizer", labelled.bytes, labelled.read())
            return train_bpe(_sample(pieces, _learned(config), labelled.train_bytes, stopping), vocab_size)

        [tokenizer] = in_threads(train, [config.vocab_size], threads=1)
    assert tokenizer
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    counts = write_tokens(folder, shown("writing tokens", labelled.bytes, labelled.read()), tokenizer, dtype)
    shutil.rmtree(scratch)
    if find_documents(data).identity != documents.identity:
        raise ValueError(f"data.name={data.called}: the text has changed while it was read. Start again.")
    facts = {"settings": settings, "vocab_size": tokenizer.vocab_size, "dtype": dtype.name, "splits": counts}
    (folder / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _shown(name: str, what: str, total: int | None, pieces: Iterable[T]) -> Iterator[T]:
    """The pieces, and a bar of the bytes of their texts."""
    with progress(total, f"{name}: {what}", "B", unit_scale=True, delay=1, leave=False, miniters=0) as bar:
        for piece in pieces:
            yield piece
            bar.update(len(piece[-2].encode()))


def _learned(config: TokenizerConfig) -> int:
    return max(BPE_BYTES, config.vocab_size * BPE_BYTES_OF_TOKEN)


def _sample(pieces: Iterable[Piece], most: int, train_bytes: int | None, stopping: Event) -> Iterator[str]:
    """Training text of about `most` bytes, from all parts of a corpus; of a stream, which is read once, its first."""
    choose = random.Random(0)  # a step of equal size would find the same source again and again where sources take turns
    left = most
    for split, text, _ in pieces:
        if split == TRAIN and (train_bytes is None or choose.random() * train_bytes < most):
            for piece, _ in in_pieces([(text, True)], size=SHORT):
                if stopping.is_set():
                    raise InterruptedError
                yield piece
            left -= len(text.encode())
            if left <= 0 and train_bytes is None:
                return


def _open(folder: Path, name: str) -> Corpus:
    facts = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))

    def split(key: str) -> Split:
        counts, dtype = facts["splits"][key], facts["dtype"]
        tokens = np.zeros(0, dtype)
        if counts["tokens"]:  # an empty file can't be mapped
            tokens = np.memmap(folder / f"{key}.bin", dtype, mode="r", shape=(counts["tokens"],))
        return Split(tokens, counts["bytes"], counts["documents"], counts["lost"])

    return Corpus(name, Tokenizer.load(folder / "tokenizer.json"), split("train"), split("val"), _hash(facts["settings"]))
