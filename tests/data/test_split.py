import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import DataConfig
from data.documents import Opened
from data.split import TRAIN, VAL, hold_out, split_documents
from tests.data.texts import text_of


def split(documents: list[list[str]], *, streaming: bool = False, val: list[list[str]] | None = None, **settings):
    """The texts of the documents of each split."""
    opened = Opened(lambda: iter(documents), (lambda: iter(val)) if val is not None else None, streaming)
    texts: dict[tuple[int, int], str] = {}
    for piece in split_documents(opened, DataConfig(**settings))():
        key = piece.split, piece.document
        texts[key] = texts.get(key, "") + piece.text
    return tuple([text for (of, _), text in texts.items() if of == side] for side in (TRAIN, VAL))


DOCUMENTS = [[text_of(i, 50 + i % 7)] for i in range(100)]


@pytest.mark.parametrize("streaming", [False, True])
def test_documents_are_held_out_whole_and_the_choice_ignores_their_order(streaming):
    train, val = split(DOCUMENTS, streaming=streaming, val_fraction=0.2)
    assert sorted(train + val) == sorted(text for [text] in DOCUMENTS)
    again = split(DOCUMENTS[::-1], streaming=streaming, val_fraction=0.2)
    assert set(again[1]) == set(val)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.9])
def test_the_held_out_share_of_bytes_is_the_one_asked_for(fraction):
    train, val = ("".join(texts).encode() for texts in split(DOCUMENTS, val_fraction=fraction))
    assert len(val) / (len(train) + len(val)) == pytest.approx(fraction, abs=0.01)  # a document is 1 % of the bytes


def test_a_stream_holds_out_about_the_share_asked_for():
    _, val = split(DOCUMENTS, streaming=True, val_fraction=0.2)
    assert 10 <= len(val) <= 30  # binomial, mean 20, deviation 4


def test_copies_of_a_document_stay_on_one_side():
    for streaming in (False, True):
        train, val = split(DOCUMENTS[:20] * 2, streaming=streaming, val_fraction=0.3)
        assert train
        assert val
        assert not set(train) & set(val)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 1000)), min_size=2), st.floats(0.001, 0.999))
def test_holding_out_leaves_something_on_both_sides_unless_all_documents_are_equal(documents, fraction):
    hashes = np.array([hash_ for hash_, _ in documents], dtype=np.uint64)
    sizes = np.array([size for _, size in documents])
    if len(set(hashes.tolist())) > 1:
        held_out = hold_out(hashes, sizes, fraction)
        assert 0 < held_out.sum() < len(documents)


def test_a_document_larger_than_the_share_is_not_held_out_for_want_of_another():
    sizes = np.array([900, 50, 50])
    for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0]):
        assert not hold_out(np.array(order, dtype=np.uint64), sizes, 0.1)[0]


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("pieces", [1, 10])
def test_the_end_of_a_single_document_is_held_out(copies, pieces):
    whole = text_of(1, 2000)
    size = len(whole) // pieces + 1
    document = [whole[i : i + size] for i in range(0, len(whole), size)]
    train, val = ("".join(texts) for texts in split([document] * copies, val_fraction=0.1))
    assert train + val == whole * copies
    assert train.endswith("\n")  # cut at a line end
    assert len(val.encode()) / len(whole * copies) == pytest.approx(0.1, abs=0.02)


def test_a_single_line_is_cut_between_characters():
    train, val = ("".join(texts) for texts in split([["日本" * 500]], val_fraction=0.3335))
    assert train + val == "日本" * 500
    assert len(val) / 1000 == pytest.approx(0.3335, abs=0.002)


def test_empty_documents_do_not_count():
    train, val = split([["a", ""], [], [""], ["b"]], val_fraction=0.5)
    assert sorted(train + val) == ["a", "b"]


def test_max_documents_limits_what_is_read_from_each_split():
    train, val = split([["a"], ["b"], ["c"]], val=[["x"], ["y"], ["z"]], max_documents=2)
    assert (train, val) == (["a", "b"], ["x", "y"])
