import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from data import Tokenizer
from data.tokenizer import END_OF_TEXT, char_tokenizer, pretrained_tokenizer, train_bpe
from tests.data.texts import text_of

CORPUS = text_of(0, 3000)
BPE = train_bpe([CORPUS], 320)
CHAR = char_tokenizer(CORPUS)


@pytest.fixture
def published(tmp_path):
    """A tokenizer.json with all that a published one may bring along."""
    tokenizer = tokenizers.Tokenizer.from_str(BPE.to_json())
    tokenizer.add_special_tokens(["<cls>"])
    special = [("<cls>", tokenizer.token_to_id("<cls>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<cls> $A", special_tokens=special)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


@given(st.text(), st.text(alphabet=sorted({*CORPUS, "\n"})))
def test_bpe_decodes_any_text_exactly_and_characters_those_they_know_with_one_token_each(text, known):
    assert BPE.decode(ids := BPE.encode(text)) == text and BPE.bytes_of[ids].sum() == len(text.encode())
    assert CHAR.decode(CHAR.encode(known)) == known and len(CHAR.encode(known)) == len(known)


@pytest.mark.parametrize("kind", ["bpe", "char", "pretrained"])
def test_a_saved_tokenizer_loads_as_it_was(kind, tmp_path, published):
    tokenizer = {"bpe": BPE, "char": CHAR}.get(kind) or pretrained_tokenizer(published)
    (tmp_path / "saved.json").write_text(tokenizer.to_json())
    text = "the king\n" if kind == "char" else "the king\n<|endoftext|>"
    other = Tokenizer.load(tmp_path / "saved.json")
    assert other.encode(text) == tokenizer.encode(text) and other.decode(other.encode(text)) == text
    assert (other.vocab_size, other.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    if kind == "char":
        assert tokenizer.decode(tokenizer.separator) == "\n"
        with pytest.raises(ValueError, match=r"tokenizer\.kind=char has no token for 'ж' \(U\+0436\).*tokenizer\.kind=bpe"):
            other.encode("queen ж")


def test_the_characters_of_a_special_token_are_text(published):
    for tokenizer in (BPE, pretrained_tokenizer(published.removesuffix("/tokenizer.json"))):  # found in its folder
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.end_of_text is not None and tokenizer.end_of_text not in ids
        assert tokenizer.decode(ids) == "a<|endoftext|>b" and tokenizer.decode([tokenizer.end_of_text]) == ""
        assert tokenizer.decode([tokenizer.end_of_text], skip_special=False) == END_OF_TEXT
        assert tokenizer.decode(tokenizer.encode(CORPUS), skip_special=False) == CORPUS, "nothing is added, cut or padded"


def test_bpe_has_bytes_and_end_of_text_and_a_pair_that_repeats():
    assert BPE.vocab_size == 320 and train_bpe(["a"], 320).vocab_size == 257


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/tokenizer.json", r"tokenizer\.pretrained=nowhere/tokenizer\.json: no such file"),
        ("owner/name", r"tokenizer\.pretrained=owner/name: .*download its tokenizer\.json"),
        (__file__, r"test_tokenizer\.py is not a tokenizer\.json"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_named_with_what_to_do(name, message):
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        pretrained_tokenizer(name)
