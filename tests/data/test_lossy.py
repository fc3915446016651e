"""Tokenizers that can't represent all of a text: what they lose is said, and bits per byte counts the rest."""

from functools import partial

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from configs.schema import DataConfig, TokenizerConfig, TokenizerKind
from data import load_corpus
from data.tokenizer import Tokenizer, char_tokenizer, train_bpe

TEXT = "the king and the queen of the night are come\nto see what the morning brings us\n" * 30
ALIEN = "né漢字 €\n"


def made(kind):
    special = ["[UNK]", "<|endoftext|>"]
    models_of = {
        "bpe without bytes": (models.BPE(), trainers.BpeTrainer),
        "bpe with byte fallback": (models.BPE(byte_fallback=True), trainers.BpeTrainer),
        "wordpiece": (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer),
        "unigram": (models.Unigram(), partial(trainers.UnigramTrainer, unk_token="[UNK]")),
    }
    model, trainer = models_of[kind]
    library = Library(model)
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    if kind == "wordpiece":
        library.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "bpe with byte fallback":
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    library.train_from_iterator([TEXT], trainer(vocab_size=100 + len(special), special_tokens=special, show_progress=False))
    return library


def predicted(tokenizer, text):
    return int(tokenizer.bytes_of[tokenizer.encode(text)].sum())


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("bpe without bytes", "n \n"),
        ("bpe with byte fallback", ALIEN),
        ("wordpiece", ""),  # words with an unknown character are unknown, and spaces have no tokens
        ("unigram", "n \n"),
    ],
)
def test_the_bytes_that_tokens_stand_for_are_those_of_the_text_that_they_keep(kind, kept):
    tokenizer = Tokenizer(made(kind))
    assert predicted(tokenizer, TEXT) == len("".join(TEXT.split()) if kind == "wordpiece" else TEXT)
    assert predicted(tokenizer, ALIEN) == len(kept.encode())


def test_a_corpus_counts_the_bytes_that_its_tokens_stand_for_and_those_that_are_lost(tmp_path):
    made("bpe without bytes").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.txt").write_text(text := TEXT + ALIEN * 300, encoding="utf-8")
    data = DataConfig(source="text", files=[str(tmp_path / "x.txt")], cache_dir=str(tmp_path / "cache"))
    config = TokenizerConfig(kind=TokenizerKind.pretrained, pretrained=str(tmp_path / "tokenizer.json"))
    corpus = load_corpus(data, config, context=16)
    splits = (corpus.train, corpus.val)
    assert sum(split.bytes + split.lost for split in splits) == len(text.encode())
    assert sum(split.lost for split in splits) == 300 * len("é漢字€".encode())
    assert all(split.bytes == corpus.tokenizer.bytes_of[np.asarray(split.tokens)].sum() for split in splits)


def test_the_mark_of_spaces_is_one_only_where_a_tokenizer_has_it_as_that():
    """In a text of another tokenizer "▁" is a character of three bytes, as "Ġ" is one of two."""
    text = "▁a Ġé"
    assert predicted(char_tokenizer(text), text) == len(text.encode()) == 9
    byte_level = Library.from_str(train_bpe([text], 257).to_json())
    byte_level.add_tokens(["Ġé", "▁"])  # matched in text as they are
    assert predicted(Tokenizer(byte_level), text) == 9


def test_a_tokenizer_without_a_token_that_could_end_a_document_is_refused():
    library = made("wordpiece")
    text = library.to_str().replace("<|endoftext|>", "[CLS]")
    with pytest.raises(ValueError, match="no token that could end a document"):
        _ = Tokenizer(Library.from_str(text)).separator
    assert Tokenizer(library).separator == [library.token_to_id("<|endoftext|>")]
