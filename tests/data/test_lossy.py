"""Tokenizers that can't represent all of a text: what they lose is said, and bits per byte counts the rest."""

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from configs.schema import DataConfig, TokenizerConfig, TokenizerKind
from data import load_corpus
from data.tokenizer import Tokenizer, char_tokenizer, train_bpe

TEXT = "the king and the queen of the night are come\nto see what the morning brings us\n" * 30
ALIEN = "né漢字 €\n"


def made(kind):
    special = ["[UNK]", "<|endoftext|>"]
    if kind == "bpe without bytes":
        library, trainer = Library(models.BPE()), trainers.BpeTrainer
    elif kind == "bpe with byte fallback":
        library, trainer = Library(models.BPE(byte_fallback=True)), trainers.BpeTrainer
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    elif kind == "wordpiece":
        library, trainer = Library(models.WordPiece(unk_token="[UNK]")), trainers.WordPieceTrainer
    elif kind == "wordlevel":
        library, trainer = Library(models.WordLevel(unk_token="[UNK]")), trainers.WordLevelTrainer
    else:
        library = Library(models.Unigram())
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        library.train_from_iterator([TEXT], trainers.UnigramTrainer(vocab_size=60, unk_token="[UNK]", special_tokens=special))
        return library
    whole_words = kind in ("wordpiece", "wordlevel")
    library.pre_tokenizer = pre_tokenizers.Whitespace() if whole_words else pre_tokenizers.Metaspace(prepend_scheme="never")
    size = 360 if "fallback" in kind else 120
    library.train_from_iterator([TEXT], trainer(vocab_size=size, special_tokens=special, show_progress=False))
    return library


def predicted(tokenizer, text):
    return int(tokenizer.bytes_of[tokenizer.encode(text)].sum())


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("bpe without bytes", "n \n"),
        ("bpe with byte fallback", ALIEN),
        ("wordpiece", ""),  # words with an unknown character are unknown, and spaces have no tokens
        ("wordlevel", ""),
        ("unigram", "n \n"),
    ],
)
def test_the_bytes_that_tokens_stand_for_are_those_of_the_text_that_they_keep(kind, kept):
    tokenizer = Tokenizer(made(kind))
    spaces = kind in ("wordpiece", "wordlevel")
    assert predicted(tokenizer, TEXT) == len("".join(TEXT.split()) if spaces else TEXT)
    assert predicted(tokenizer, ALIEN) == len(kept.encode())


@pytest.mark.parametrize("make", [lambda: train_bpe([TEXT], 300), lambda: char_tokenizer(TEXT + ALIEN)])
def test_tokenizers_of_the_corpus_lose_nothing(make):
    tokenizer = make()
    for text in (TEXT, ALIEN, TEXT + ALIEN):
        assert predicted(tokenizer, text) == len(text.encode())


def test_bits_per_byte_counts_what_is_predicted_and_the_corpus_tells_what_is_lost(tmp_path):
    (tmp_path / "x.txt").write_text(TEXT + ALIEN * 300, encoding="utf-8")
    made("bpe without bytes").save(str(tmp_path / "lossy.json"))
    data = DataConfig(source="text", files=[str(tmp_path / "x.txt")], cache_dir=str(tmp_path / "cache"))
    config = TokenizerConfig(kind=TokenizerKind.pretrained, pretrained=str(tmp_path / "lossy.json"))
    corpus = load_corpus(data, config, context=16)
    whole = len((TEXT + ALIEN * 300).encode())
    assert sum(split.bytes + split.lost for split in (corpus.train, corpus.val)) == whole
    assert sum(split.lost for split in (corpus.train, corpus.val)) == 300 * len("é漢字€".encode())
    for split in (corpus.train, corpus.val):
        assert split.bytes == corpus.tokenizer.bytes_of[np.asarray(split.tokens)].sum()


@pytest.mark.parametrize("kind", ["wordpiece", "wordlevel"])
def test_a_tokenizer_without_a_token_that_could_end_a_document_is_refused(kind, tmp_path):
    library = made(kind)
    text = library.to_str().replace("<|endoftext|>", "[CLS]")
    with pytest.raises(ValueError, match="no token that could end a document"):
        _ = Tokenizer(Library.from_str(text)).separator
    assert Tokenizer(library).separator == [library.token_to_id("<|endoftext|>")]


def test_a_normaliser_that_makes_text_longer_predicts_no_more_than_the_text(tmp_path):
    library = Library.from_str(train_bpe([TEXT], 300).to_json())
    library.normalizer, library.decoder = normalizers.NFD(), decoders.ByteLevel()
    library.save(str(tmp_path / "nfd.json"))
    (tmp_path / "x.txt").write_text("é" * 3000, encoding="utf-8")
    data = DataConfig(source="text", files=[str(tmp_path / "x.txt")], cache_dir=str(tmp_path / "cache"))
    config = TokenizerConfig(kind=TokenizerKind.pretrained, pretrained=str(tmp_path / "nfd.json"))
    corpus = load_corpus(data, config, context=16)
    assert corpus.train.bytes + corpus.val.bytes == 6000 and not corpus.train.lost
