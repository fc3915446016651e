import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import DataConfig
from data.split import TRAIN, hold_out, split_documents
from tests.data.texts import text_of

LINES, LINE = text_of(1, 2000), "日本" * 500
DOCUMENTS = [text_of(i, 50 + i % 7) for i in range(100)]


def blocks(documents: list[str]):
    """As a file is read: a long document in blocks, whose last one is empty."""
    for document in documents:
        if len(document) < 1000:
            yield document, True
        else:
            yield from ((document[i : i + 700], False) for i in range(0, len(document), 700))
            yield "", True


def split(documents: list[str], *, val: list[str] | None = None, **settings):
    """The documents of each split."""
    labelled = split_documents(lambda: blocks(documents), val and (lambda: blocks(val)), DataConfig(**settings))
    found: tuple[list[str], list[str]] = ([], [])
    parts: list[str] = []
    for side, text, ends in labelled.read():
        parts.append(text)
        if ends:
            found[side].append("".join(parts))
            parts = []
    assert not parts
    if not settings.get("streaming"):
        train, whole = (len("".join(texts).encode()) for texts in (found[TRAIN], [*found[0], *found[1]]))
        assert labelled.bytes == whole and labelled.train_bytes == pytest.approx(train, rel=0.1)
    return found


@pytest.mark.parametrize(("streaming", "fraction"), [(False, 0.01), (False, 0.2), (False, 0.9), (True, 0.2)])
def test_whole_documents_are_held_out_by_their_content_and_copies_together(streaming, fraction):
    train, val = split(DOCUMENTS * 2, streaming=streaming, val_fraction=fraction)
    assert sorted(train + val) == sorted(DOCUMENTS * 2)
    assert not set(train) & set(val)
    assert set(split(DOCUMENTS[::-1] * 2, streaming=streaming, val_fraction=fraction)[1]) == set(val)
    # A document is 1 % of the bytes. A stream draws each: binomial, mean 20 of 100, deviation 4.
    held_out = len("".join(val).encode()) / len("".join(train + val).encode())
    assert held_out == pytest.approx(fraction, abs=0.1 if streaming else 0.01)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 1000)), min_size=2), st.floats(0.001, 0.999))
def test_holding_out_leaves_something_on_both_sides_unless_all_documents_are_equal(documents, fraction):
    hashes, sizes = np.array(documents).T
    if len(set(hashes)) > 1:
        assert 0 < hold_out(hashes.astype(np.uint64), sizes, fraction).sum() < len(documents)


@pytest.mark.parametrize(("whole", "copies"), [(LINES, 1), (LINES * 9, 3), (LINE, 1)])
def test_the_end_of_a_single_document_is_held_out_from_a_line_on_or_a_character(whole, copies):
    train, val = split([whole] * copies, val_fraction=0.1)
    assert [a + b for a, b in zip(train, val, strict=True)] == [whole] * copies
    assert len({*train}) == len({*val}) == 1, "what is held out of one copy is held out of all"
    assert train[0].endswith("\n") == (whole is not LINE)
    assert len(val[0].encode()) / len(whole.encode()) == pytest.approx(0.1, abs=0.02)


def test_empty_documents_do_not_count_and_max_documents_limits_each_split():
    train, val = split(["a", "", "b"], val_fraction=0.5)
    assert sorted(train + val) == ["a", "b"]
    assert split(["a", "b", "c"], val=["x", "y", "z"], max_documents=2) == (["a", "b"], ["x", "y"])
