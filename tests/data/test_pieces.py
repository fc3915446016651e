from hypothesis import given
from hypothesis import strategies as st

from data.pieces import ENDLESS, PIECE, in_pieces
from tests.data.texts import text_of

texts = st.text(alphabet="ab \n\t日'/", max_size=200)


@given(st.lists(st.tuples(texts, st.integers(1, 80))), st.integers(1, 50))
def test_pieces_join_to_the_documents_whatever_the_blocks_that_they_are_read_in(documents, size):
    blocks: list[tuple[str, bool]] = []
    for text, step in documents:
        blocks += [(text[i : i + step], False) for i in range(0, len(text), step)] + [("", True)]
    pieces = list(in_pieces(blocks, size=size, endless=3 * size))
    assert pieces == list(in_pieces([(text, True) for text, _ in documents], size=size, endless=3 * size))
    assert "".join(text + "\0" * ends for text, ends in pieces) == "".join(text + "\0" for text, _ in documents if text)
    assert all(0 < len(text) <= 3 * size for text, _ in pieces)


def test_a_piece_is_short_where_there_are_seams_and_a_document_without_one_is_cut_all_the_same():
    assert max(len(text) for text, _ in in_pieces([(text_of(3, 50_000), True)])) <= PIECE
    assert [len(text) for text, _ in in_pieces([("a" * (ENDLESS + 5), True)])] == [ENDLESS, 5]
    word = "a" * (2 * PIECE)
    assert [text for text, _ in in_pieces([(f"{word} b {word}", True)])] == [word, " b", f" {word}"]
    assert list(in_pieces([("a", True), ("", True), ("b", True), ("c", True)], most=3)) == [("a", True), ("b", True)]
