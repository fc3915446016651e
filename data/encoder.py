"""tiktoken in place of `tokenizers`, where it makes the same tokens: in a sixth of the time and little memory.

Byte-level BPE joins, again and again, the leftmost pair of the lowest rank. tiktoken knows tokens and their ranks, `tokenizers`
pairs: two tokens whose bytes are a third one are joined only if this pair is in its list. Both join the same pairs if each
token is made, from its own bytes and by tokens of lower rank, of a pair in the list, and these pairs are in the order of their
tokens. Then, by induction over the joins, no other two tokens are ever neighbours whose bytes are a token t: until t is joined,
its bytes have been joined as they are alone, as no lower rank crossed its ends. `fast_encoder` checks each token.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers

# The alternatives of the patterns that GPT-2, GPT-4, GPT-4o, Llama 3, Qwen and others split text by. None of them goes on
# behind a seam (data.pieces), or depends on what is there.
_WORD, _TITLE, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ALTERNATIVES = (
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _ENDINGS, r" ?\p{L}+", r" ?\p{N}+", r"\p{N}", r"\p{N}+", r"\p{N}{1,2}"),
    *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+"),
    *(r"\s*[\r\n]", r"\s+(?!\S)", r"\s+", rf"{_WORD}\p{{L}}+", rf"{_WORD}[\p{{L}}\p{{M}}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
    *(
        f"{_WORD}{words}{endings}"
        for words in (f"{_TITLE}*{_LOWER}+", f"{_TITLE}+{_LOWER}*")
        for endings in ("", f"{_ENDINGS}?")
    ),
)
_OF_EACH_CLASS = "aAǅʰ日\u03011!/'\x01"
_KNOWN = "|".join(map(re.escape, _ALTERNATIVES))


def split_pattern(described: dict[str, Any]) -> str | None:
    """The pattern by which a byte-level tokenizer.json splits text, if it splits at seams; None: it may not."""
    before = described["pre_tokenizer"] or {}
    *first, last = before.get("pretokenizers") or [before]
    if (described["normalizer"] or {}).get("type") not in (None, "NFC"):  # which sees no further than a letter and its marks
        return None
    if last.get("type") != "ByteLevel" or last["add_prefix_space"] or last["use_regex"] == bool(first) or len(first) > 1:
        return None
    if any(re.search(r"\s", token["content"]) or token["lstrip"] or token["rstrip"] for token in _matched(described)):
        return None
    if not first:
        return GPT2
    way = (first[0].get("behavior"), first[0].get("invert"))
    pattern = first[0].get("pattern", {}).get("Regex", "") if way in (("Isolated", False), ("Removed", True)) else ""
    if not re.fullmatch(rf"(?:(?:{_KNOWN})\|)*\\s\+", pattern):
        return None
    # tiktoken drops what a pattern does not match, and such a part could go on behind a seam
    matched = pre_tokenizers.Split(tokenizers.Regex(pattern), "removed", invert=True)
    return pattern if all(matched.pre_tokenize_str(character) for character in _OF_EACH_CLASS) else None


def fast_encoder(library: tokenizers.Tokenizer, described: dict[str, Any]) -> Callable[[str], np.ndarray] | None:
    """A function that gives the ids of a text, int64, or None where tiktoken may make other tokens than `tokenizers`.

    `described` is the tokenizer.json of `library`.
    """
    model, pattern = described["model"], split_pattern(described)
    added = [token["content"] for token in described["added_tokens"]]
    affixes = [model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")]
    if pattern is None or model["type"] != "BPE" or any(affixes):
        return None
    if model.get("ignore_merges") and not model["vocab"].keys().isdisjoint(added):
        return None
    ids = {token: i for token, i in model["vocab"].items() if token not in added}
    if not (alphabet := byte_alphabet()).keys() >= set().union(*ids) or not ids.keys() >= alphabet.keys():
        return None
    raw = lambda token: bytes(map(alphabet.__getitem__, token))  # noqa: E731
    of_bytes = {raw(token): i for token, i in ids.items()}
    pairs = [tuple(map(raw, merge.split(" ") if isinstance(merge, str) else merge)) for merge in model["merges"]]
    ranks = {bytes([byte]): byte for byte in range(256)}
    for left, right in pairs:
        ranks.setdefault(left + right, len(ranks))
    if ranks.keys() != of_bytes.keys() or not _joins_alike(ranks, pairs):
        return None

    import tiktoken  # where it is needed: a start from the cache does without

    # The regex engine tries alternatives one by one, each by a search of its own, where one of them looks ahead. Those in front
    # of it become one alternative, which takes half the time. The match is the same, as it is of the first that matches.
    pattern = re.sub(r"^(.+?)(?=\|\\s\+\(\?!)", r"(?:\1)", pattern)
    # without a special token tiktoken would look for an empty one at each byte, which takes as long as the rest
    special = {"<|endoftext|>": len(ranks)}
    encoding = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    ids_of, unlike = np.array([of_bytes[token] for token in ranks]), [token["content"] for token in _matched(described)]

    def encode(text: str) -> np.ndarray:
        if any(token in text for token in unlike):
            return np.array(library.encode(text, add_special_tokens=False).ids, np.int64)
        if not text.isascii() and (change := library.normalizer) is not None:
            text = change.normalize_str(text)
        return ids_of[encoding.encode_to_numpy(text, disallowed_special=())]

    return encode


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for, as GPT-2 has numbered them."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _matched(described: dict[str, Any]) -> list[dict[str, Any]]:
    """The added tokens that are matched in text."""
    return [token for token in described["added_tokens"] if not token["special"]]


def _joins_alike(ranks: dict[bytes, int], pairs: list[tuple[bytes, ...]]) -> bool:
    places, before = {pair: place for place, pair in reversed([*enumerate(pairs)])}, -1
    for token, rank in ranks.items():
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            joined = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            if (lowest := min(joined)) >= rank:
                return False
            at = joined.index(lowest)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            if (place := places.get(tuple(parts), -1)) <= before:
                return False
            before = place
    return True
