import json
import pickle

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from data import Tokenizer
from data.tokenizer import char_tokenizer, pretrained_tokenizer, train_bpe
from tests.data.texts import text_of

CORPUS = text_of(0, 3000)
BPE = train_bpe([CORPUS], 320)
CHAR = char_tokenizer(CORPUS)


@pytest.fixture
def pretrained_json(tmp_path):
    """A tokenizer.json with everything that a published one may bring along."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<cls>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<cls> $A", special_tokens=[("<cls>", 1)])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=64)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@given(st.text())
def test_bpe_decodes_any_text_exactly(text):
    assert BPE.decode(BPE.encode(text)) == text


@given(st.text(alphabet=sorted({*CORPUS, "\n"})))
def test_characters_decode_exactly_with_one_token_each(text):
    ids = CHAR.encode(text)
    assert len(ids) == len(text)
    assert CHAR.decode(ids) == text


def test_an_unseen_character_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"tokenizer\.kind=char has no token for 'ж' \(U\+0436\).*tokenizer\.kind=bpe"):
        CHAR.encode("queen ж")


def test_a_newline_always_has_a_character_token():
    tokenizer = char_tokenizer("ab")
    assert tokenizer.decode(tokenizer.separator) == "\n"


@pytest.mark.parametrize("kind", ["bpe", "char", "pretrained"])
def test_a_saved_tokenizer_loads_as_it_was(kind, tmp_path, pretrained_json):
    tokenizer = {"bpe": BPE, "char": CHAR}.get(kind) or pretrained_tokenizer(str(pretrained_json))
    tokenizer.save(tmp_path / "saved.json")
    text = "the king\n<|endoftext|>" if kind != "char" else "the king\n"
    for other in (Tokenizer.load(tmp_path / "saved.json"), pickle.loads(pickle.dumps(tokenizer))):
        assert other.encode(text) == tokenizer.encode(text)
        assert other.decode(other.encode(text)) == text
        assert other.vocab_size == tokenizer.vocab_size
        assert other.end_of_text == tokenizer.end_of_text
        if kind == "char":
            with pytest.raises(ValueError, match="U\\+0436"):
                other.encode("ж")


@pytest.mark.parametrize("kind", ["bpe", "pretrained"])
def test_the_characters_of_a_special_token_are_text(kind, pretrained_json):
    tokenizer = BPE if kind == "bpe" else pretrained_tokenizer(str(pretrained_json))
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end_of_text is not None
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"
    assert tokenizer.decode([tokenizer.end_of_text]) == ""
    assert tokenizer.decode([tokenizer.end_of_text], skip_special=False) == "<|endoftext|>"


def test_a_pretrained_tokenizer_neither_adds_nor_cuts_nor_pads(pretrained_json):
    tokenizer = pretrained_tokenizer(str(pretrained_json))
    assert tokenizer.decode(tokenizer.encode(CORPUS), skip_special=False) == CORPUS


def test_a_pretrained_tokenizer_is_found_in_its_folder(pretrained_json):
    assert pretrained_tokenizer(str(pretrained_json.parent)).vocab_size == pretrained_tokenizer(str(pretrained_json)).vocab_size


def test_vocab_size_is_above_every_id_where_ids_have_holes():
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 700}, unk_token="a"))
    assert Tokenizer(tokenizer).vocab_size == 701


def test_training_bpe_twice_gives_the_same_tokenizer(tmp_path):
    for name in ("one", "two"):
        train_bpe([CORPUS], 320).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_bpe_has_the_vocabulary_asked_for_if_the_text_allows():
    assert BPE.vocab_size == 320
    assert train_bpe(["a"], 320).vocab_size == 257  # no pair to merge


def test_the_smallest_vocabulary_is_bytes_and_end_of_text():
    tokenizer = train_bpe([CORPUS], 257)
    assert tokenizer.vocab_size == 257
    assert len(tokenizer.encode("日")) == 3


@pytest.mark.parametrize("name", ["nowhere/tokenizer.json", "./nowhere", "~/nowhere-at-all"])
def test_a_missing_tokenizer_file_is_named(name):
    with pytest.raises(FileNotFoundError, match=rf"tokenizer\.pretrained={name}: no such file"):
        pretrained_tokenizer(name)


def test_a_hub_tokenizer_offline_says_what_to_do():
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.pretrained=owner/name .*download its tokenizer\.json"):
        pretrained_tokenizer("owner/name")


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match=r"config\.json is not a tokenizer\.json"):
        Tokenizer.load(tmp_path / "config.json")
