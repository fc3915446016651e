"""One tokenizer class for all kinds: byte-level BPE and characters from a corpus, and pretrained tokenizers.

Each kind is stored as a `tokenizer.json`, and `Tokenizer.load(path)` needs nothing else.
"""

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from configs import machine

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ELSEWHERE = ("<|end_of_text|>", "<eos>", "</s>", "[SEP]")  # what some pretrained tokenizers call it
PIECE = 16_384  # characters; long enough to make the calls into `tokenizers` cheap, short enough for many in a batch
# A seam is the place before a space between words, or after a line end between words. Byte-level BPE splits its text there, so
# that the pieces of a text have the tokens of the whole. Other tokenizers get whole documents (Tokenizer.takes_pieces).
_SEAM = re.compile(r"\S(?= \S)|\S\n(?=\S)")


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
        self._alphabet: set[str] | None = None
        if tokenizer.pre_tokenizer is None and all(len(token) == 1 for token in vocabulary):
            self._alphabet = set(vocabulary)  # one token a character

    @property
    def takes_pieces(self) -> bool:
        """Whether a text that `cut` has cut has the tokens of the whole.

        This holds for characters and for byte-level BPE with GPT-2's splitting. Other tokenizers may add a prefix to each text
        (Metaspace), merge across words or strip spaces.
        """
        if self._alphabet is not None:
            return True
        splits = self._tokenizer.pre_tokenizer
        byte_level = isinstance(splits, pre_tokenizers.ByteLevel) and splits.use_regex and not splits.add_prefix_space
        return byte_level and self._tokenizer.normalizer is None

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
        described = json.loads(self._tokenizer.to_str())
        model, alphabet = described["model"], set(pre_tokenizers.ByteLevel.alphabet())
        prefix, suffix = (model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix"))
        byte_level = '"ByteLevel"' in json.dumps([described["pre_tokenizer"], described["decoder"]])
        special = {token["content"] for token in described["added_tokens"] if token["special"]} | {model.get("unk_token")}
        found = np.zeros(self.vocab_size, np.int64)
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            text = token.removeprefix(prefix).removesuffix(suffix).replace("▁", " ")  # SentencePiece's mark of a space
            if model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", token):
                found[i] = 1
            elif token not in special and i != model.get("unk_id"):
                found[i] = len(token) if byte_level and alphabet.issuperset(token) else len(text.encode())
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens. ValueError for a character that a char tokenizer has not seen."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        if self._alphabet is not None and any(len(ids) != len(text) for text, ids in zip(texts, rows, strict=True)):
            unseen = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in sorted(set().union(*texts) - self._alphabet)[:5])
            raise ValueError(
                f"tokenizer.kind=char has no token for {unseen}: the corpus does not have it. Leave the character out, or use "
                "tokenizer.kind=bpe, which encodes any text."
            )
        return rows

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
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.is_file():
        return path
    if name.endswith(".json") or name.startswith(("/", ".", "~")):
        raise FileNotFoundError(f"tokenizer.pretrained={name}: no such file. Give a tokenizer.json, or owner/name on the Hub.")
    return None


def cut(text: str, size: int = PIECE) -> list[str]:
    """A text in pieces of at most `size` characters that join to the text, cut at seams where there are some."""
    pieces, begin = [], 0
    while len(text) - begin > size:
        last = begin + size
        seams = [match.end() for match in _SEAM.finditer(text, begin + size - min(size // 2, 512), last + 1)]
        end = max((seam for seam in seams if seam <= last), default=last)
        pieces.append(text[begin:end])
        begin = end
    return [*pieces, text[begin:]]
