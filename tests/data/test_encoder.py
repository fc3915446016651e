"""The tokens of tiktoken are those of `tokenizers`, and where they might not be, tiktoken is not used."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from data.pieces import in_pieces
from data.tokenizer import Tokenizer
from tests.data.texts import text_of

TEXT = text_of(0, 3000) + "".join(f"{n:,} don't WE'LL {chr(n)}{chr(n + 1)}\n\n  x/\n//" for n in range(100, 4000, 3))
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def made(pattern: str | None, normalizer=None, behavior="isolated") -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), behavior, invert=behavior == "removed")
        library.pre_tokenizer = pre_tokenizers.Sequence([split, library.pre_tokenizer])
    library.decoder = decoders.ByteLevel()
    if normalizer:
        library.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([TEXT], trainer)
    return library


def changed(library: Library, **model) -> Library:
    described = json.loads(library.to_str())
    described["model"] |= model
    return Library.from_str(json.dumps(described))


def all_pairs(library: Library) -> Library:
    """With each pair that makes a token, as the tokenizer.json of Llama 3 has been made from tiktoken's file."""
    vocabulary = {t: i for t, i in json.loads(library.to_str())["model"]["vocab"].items() if i}
    pairs = [(t[:i], t[i:]) for t in sorted(vocabulary, key=vocabulary.get) for i in range(1, len(t))]
    pairs = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
    vocabulary["<|endoftext|>"] = 0
    return changed(library, merges=pairs, ignore_merges=False)


def other_ids(library: Library) -> Library:
    vocabulary = json.loads(library.to_str())["model"]["vocab"]
    return changed(library, vocab={token: i and len(vocabulary) - i for token, i in vocabulary.items()})


LIBRARIES = {
    "GPT-2": made(None),
    "Llama 3": all_pairs(made(LLAMA3)),
    "Qwen": made(LLAMA3.replace("{1,3}", ""), normalizers.NFC()),
    "GPT-4o": other_ids(made(GPT4O)),
    "GPT-4": made(LLAMA3, behavior="removed"),
}
TOKENIZERS = {name: Tokenizer(library) for name, library in LIBRARIES.items()}


PLAIN, BEHIND_A_QUOTE, BETWEEN_LINES = ("", "a "), ("'", "S"), ("\n", "1\u0301!\n/")
NEIGHBOURS = {
    "GPT-2": [PLAIN],
    "Llama 3": [BEHIND_A_QUOTE, BETWEEN_LINES],
    "GPT-4o": [PLAIN, BEHIND_A_QUOTE, BETWEEN_LINES],
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_characters_of_all_planes_have_the_same_tokens_between_all_kinds_of_neighbours(name):
    assert TOKENIZERS[name]._encoder is not None
    # all characters that have a name, of the large blocks (Han, Hangul, private use) some, and some that are unassigned
    large = range(0x3400, 0xFB00), range(0x17000, 0x18D00), range(0x20000, 0x110000)
    codes = [c for c in range(0x110000) if c % 97 == 0 or not any(c in block for block in large)]
    known = [chr(c) for c in codes if not 0xD800 <= c < 0xE000 and (c % 97 == 0 or unicodedata.category(chr(c)) != "Cn")]
    for before, after in NEIGHBOURS[name]:
        text = "".join(f"{before}{character}{after}" for character in known)
        assert TOKENIZERS[name].encode_batch([text])[0].tolist() == TOKENIZERS[name].encode(text)


@given(st.sampled_from(sorted(TOKENIZERS)), st.text("abthe'sLlſK 12\r\n\t/!\u0301é日\u00a0\u0085\x1c_") | st.text())
def test_a_text_and_its_pieces_have_the_same_tokens(name, text):
    tokenizer = TOKENIZERS[name]
    whole = tokenizer.encode(text)
    assert tokenizer.takes_pieces and tokenizer.encode_batch([text])[0].tolist() == whole
    seams = [piece for piece, _ in in_pieces([(text, True)], size=8, endless=10**6)]
    assert [i for ids in tokenizer.encode_batch(seams) for i in ids.tolist()] == whole


def test_added_tokens_that_are_matched_in_text_are_matched():
    library = Library.from_str(LIBRARIES["Llama 3"].to_str())
    library.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("ki", normalized=False)])
    tokenizer = Tokenizer(library)
    text = "the king <tool> and <|endoftext|> of night"
    assert tokenizer._encoder and tokenizer.encode_batch([text])[0].tolist() == tokenizer.encode(text)
    assert {library.token_to_id("<tool>"), library.token_to_id("ki")} < set(tokenizer.encode(text))
    assert tokenizer.bytes_of[tokenizer.encode(text)].sum() == len(text)
    library.add_tokens([AddedToken("<end>", lstrip=True)])
    assert not Tokenizer(library).takes_pieces


def tiny(merges: list[tuple[str, str]], **model) -> Tokenizer:
    library = made(None)
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *dict.fromkeys(a + b for a, b in merges)]
    return Tokenizer(changed(library, vocab={t: i for i, t in enumerate(["<|endoftext|>", *tokens])}, merges=merges, **model))


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (tiny([("b", "c"), ("a", "b"), ("ab", "c")]), "abc"),  # alone it is a, bc, which tiktoken would join
        (tiny([("a", "b"), ("ab", "c"), ("b", "c"), ("a", "bc")][1::-1]), "abc"),  # a token is made before its parts
        (tiny([("a", "b"), ("b", "c")], end_of_word_suffix="</w>"), "abc"),
        (Tokenizer(made(r"\w+|\s+|[^\w\s]+")), "abc d"),  # a pattern that may split elsewhere
        (Tokenizer(made(LLAMA3, normalizers.Lowercase())), "ABC"),
        (Tokenizer(made(LLAMA3.replace(r"|\p{N}{1,3}", ""))), "a 1 2"),  # "1" is in no part, and what is in none goes on
    ],
)
def test_where_the_tokens_might_differ_tiktoken_is_not_used(tokenizer, text):
    assert tokenizer._encoder is None and (tokenizer.takes_pieces == (text == "abc"))
    assert tokenizer.encode_batch([text])[0].tolist() == tokenizer.encode(text)
