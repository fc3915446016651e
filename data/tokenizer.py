"""One tokenizer class for all kinds: byte-level BPE and characters from a corpus, and pretrained tokenizers.

Each kind is stored as a `tokenizer.json`, and `Tokenizer.load(path)` needs nothing else.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from configs import machine
from data.encoder import byte_alphabet, fast_encoder, split_pattern
from data.hub import go_offline_without_network

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ELSEWHERE = ("<|end_of_text|>", "<eos>", "</s>", "[SEP]")  # what some pretrained tokenizers call it


class Tokenizer:
    """Text to ids and back.

    A document that contains the characters "<|endoftext|>" gets the tokens of those characters, not the special token. Added
    tokens of a pretrained tokenizer that are not marked special are matched in text, as in its training.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.encode_special_tokens = True  # the characters of a special token stay text
        tokenizer.no_truncation()  # a pretrained tokenizer.json may cut at its model's context
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1  # ids may have holes
        names = (name for name in (END_OF_TEXT, *END_OF_TEXT_ELSEWHERE) if name in vocabulary)
        self.end_of_text: int | None = next((vocabulary[name] for name in names), None)  # None: a char tokenizer
        self._ids_of: np.ndarray | None = None  # of a char tokenizer: of each code point, or −1
        plain = isinstance(tokenizer.model, models.BPE) and tokenizer.pre_tokenizer is None and tokenizer.normalizer is None
        if plain and all(len(token) == 1 for token in vocabulary):
            self._ids_of = np.full(0x110000, -1)
            self._ids_of[[ord(character) for character in vocabulary]] = list(vocabulary.values())

    @cached_property
    def _described(self) -> dict[str, Any]:
        return json.loads(self._tokenizer.to_str())

    @property
    def takes_pieces(self) -> bool:
        """Whether the pieces of a text (data.pieces) have the tokens of the whole.

        This holds for characters and for the ways to split text that `data.encoder` knows. Other tokenizers may add a prefix to
        each text (Metaspace), merge across words or strip spaces.
        """
        return self._ids_of is not None or split_pattern(self._described) is not None

    @property
    def separator(self) -> list[int]:
        """The tokens that end a document: end-of-text, or a newline if the vocabulary has no such token.

        Raises:
            ValueError: a newline has no token either.
        """
        if self.end_of_text is not None:
            return [self.end_of_text]
        newline = self.encode("\n")
        if not self.bytes_of[newline].sum():
            names = ", ".join((END_OF_TEXT, *END_OF_TEXT_ELSEWHERE))
            raise ValueError(f"tokenizer.pretrained: it has no token that could end a document: {names}, or a newline.")
        return newline

    @cached_property
    def bytes_of(self) -> np.ndarray:
        """The bytes of UTF-8 text that each id stands for, int64 [vocab_size]; 0 for special tokens and for "unknown"."""
        model, alphabet, found = self._described["model"], byte_alphabet().keys(), np.zeros(self.vocab_size, np.int64)
        prefix, suffix = (model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix"))
        around = [self._described[name] for name in ("normalizer", "pre_tokenizer", "decoder")]
        byte_level, marks_spaces = (name in json.dumps(around, ensure_ascii=False) for name in ('"ByteLevel"', "▁"))
        added = {token["id"]: token["special"] for token in self._described["added_tokens"]}
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            text = token.removeprefix(prefix).removesuffix(suffix)
            if model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", token):
                found[i] = 1
            elif i in added:
                found[i] = 0 if added[i] else len(token.encode())
            elif token != model.get("unk_token") and i != model.get("unk_id"):
                text = text.replace("▁", " ") if marks_spaces else text  # SentencePiece's mark
                found[i] = len(token) if byte_level and alphabet >= set(token) else len(text.encode())
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens. ValueError for a character that a char tokenizer has not seen."""
        if self._ids_of is not None:
            return self._characters(text).tolist()
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, int64. It may be called in many threads at once."""
        if (encode := self._encoder) is not None:
            return [encode(text) for text in texts]
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in found]

    @cached_property
    def _encoder(self) -> Callable[[str], np.ndarray] | None:
        return fast_encoder(self._tokenizer, self._described) if self._ids_of is None else self._characters

    def _characters(self, text: str) -> np.ndarray:
        assert self._ids_of is not None
        ids = self._ids_of[np.frombuffer(text.encode("utf-32-le"), np.uint32)]
        if (ids < 0).any():
            unseen = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in sorted({c for c in text if self._ids_of[ord(c)] < 0})[:5])
            raise ValueError(
                f"tokenizer.kind=char has no token for {unseen}: the corpus does not have it. Leave the character out, or use "
                "tokenizer.kind=bpe, which encodes any text."
            )
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids. Bytes that are not valid UTF-8 (a character cut in two) become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def to_json(self) -> str:
        """The text of the tokenizer.json."""
        return self._tokenizer.to_str(pretty=True)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a tokenizer.json. Raises FileNotFoundError or ValueError if `path` is no such file."""
        text = Path(path).read_text(encoding="utf-8")
        try:
            return cls(tokenizers.Tokenizer.from_str(text))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer.json of the library `tokenizers`: {error}") from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of `vocab_size` tokens, with end-of-text and all 256 bytes. It has fewer tokens if no pair repeats.

    It encodes any text and decodes it exactly.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair seen once says nothing about the language
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Tokenizer(tokenizer)


def char_tokenizer(alphabet: Iterable[str]) -> Tokenizer:
    """One token per character, ids in code-point order. A newline, which ends documents, always has a token."""
    vocabulary = {character: i for i, character in enumerate(sorted({*alphabet, "\n"}))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))  # BPE without merges: fast, needs no splitting
    tokenizer.decoder = decoders.Fuse()
    return Tokenizer(tokenizer)


def pretrained_tokenizer(name: str) -> Tokenizer:
    """A tokenizer.json by its path, or by the name of its repository on the Hub."""
    if path := pretrained_file(name):
        return Tokenizer.load(path)
    go_offline_without_network()
    try:
        return Tokenizer(tokenizers.Tokenizer.from_pretrained(name))
    except Exception as error:  # the library raises bare Exception, offline and for an unknown name alike
        raise FileNotFoundError(
            f"tokenizer.pretrained={name}: is no file, and the Hugging Face Hub gives no tokenizer.json: "
            f"{str(error).rstrip('.')}. Check the name and the network, or download its tokenizer.json and give the path."
        ) from error


def pretrained_file(name: str) -> Path | None:
    """The local tokenizer.json that `tokenizer.pretrained` names; None for a name on the Hub."""
    path = machine.expanded(name)
    path = path / "tokenizer.json" if isdir(path) else path
    if isfile(path):  # False where Path's raises, as for a name that is too long
        return path
    if name.endswith(".json") or name.startswith(("/", ".", "~")):
        raise FileNotFoundError(f"tokenizer.pretrained={name}: no such file. Give a tokenizer.json, or owner/name on the Hub.")
    return None
