"""Documents as a stream of pieces, so that a document may be larger than memory."""

import re
from collections.abc import Callable, Iterable, Iterator

Blocks = Iterable[tuple[str, bool]]  # text of any length, and whether a document ends with it
Read = Callable[[], Blocks]  # each call reads the documents from the start

PIECE = 16_384  # characters; long enough to make calls into an encoder cheap, short enough for all cores to have some
ENDLESS = 64 * PIECE  # a word of a language ends before
# A seam is the place before a space between words, or after a line end between words. `data.encoder` knows the ways to
# split text that split there, so that the pieces of a text have the tokens of the whole.
_SEAM = r"(?:\S(?= \S)|\S\n(?=[^\s/]))"
_NEXT, _LAST = re.compile(_SEAM), re.compile(f"(?s:.*){_SEAM}")


def in_pieces(blocks: Blocks, most: int | None = None, size: int = PIECE, endless: int = ENDLESS) -> Iterator[tuple[str, bool]]:
    """The first `most` documents in pieces that end at seams, of at most `size` characters where there are seams and of at most
    `endless` elsewhere. Documents without text are left out. The pieces depend on a document's text, and not on its blocks.
    """
    text, count = "", 0
    for block, ends in blocks:
        text, begin = text + block, 0
        while end := _end(text, begin, size, endless, ends):
            yield text[begin:end], ends and end == len(text)
            begin = end
        text, count = text[begin:], count + ends
        if count == most:
            return


def _end(text: str, begin: int, size: int, endless: int, whole: bool) -> int:
    """Where the piece that begins at `begin` ends; 0: nothing is left, or only more text can tell."""
    last = begin + size
    if len(text) <= last:
        return len(text) if whole and len(text) > begin else 0
    if match := _LAST.match(text, begin, last + 1) or _NEXT.search(text, last - 1, begin + endless + 1):
        return match.end()
    if len(text) > begin + endless:
        return begin + endless
    return len(text) if whole else 0
