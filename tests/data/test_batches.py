import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import Batches, validation_starts

shapes = st.fixed_dictionaries({"context": st.integers(1, 20), "batch_size": st.integers(1, 12), "seed": st.integers(0, 2**63)})
sizes = st.integers(0, 300)  # tokens beyond the shortest corpus


def numbered(count: int) -> np.ndarray:
    """Tokens that are their own offsets."""
    return np.arange(count, dtype=np.uint32)


def starts(batches: Batches, steps: range) -> list[int]:
    return [int(start) for step in steps for start in batches.starts(step)]


def starts_of_epoch(batches: Batches, epoch: int) -> list[int]:
    return starts(batches, range(epoch * batches.windows, (epoch + 1) * batches.windows))


@given(shapes, sizes, st.integers(1, 4), st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_a_batch_is_a_function_of_its_step_and_is_cut_among_the_ranks(shape, more, ranks, steps):
    tokens, shape = numbered(shape["context"] + 1 + more), {**shape, "batch_size": shape["batch_size"] * ranks}
    batches, parts = Batches(tokens, **shape), [Batches(tokens, **shape, rank=rank, ranks=ranks) for rank in range(ranks)]
    in_order = [batches.starts(step) for step in steps]
    for step, found in reversed(list(zip(steps, in_order, strict=True))):
        assert found.shape == (shape["batch_size"],) and found.dtype == np.int64
        assert found.min() >= 0 and found.max() + shape["context"] < len(tokens)
        for again in (batches.starts(step), np.concatenate([part.starts(step) for part in parts])):
            assert (again == found).all()


@given(shapes, sizes, st.integers(0, 3))
def test_an_epoch_visits_each_window_once_and_leaves_out_less_than_two_contexts(shape, more, epoch):
    tokens = numbered(shape["context"] + 1 + more)
    batches = Batches(tokens, **{**shape, "batch_size": 1})
    visited = sorted(starts_of_epoch(batches, epoch))
    assert visited == [visited[0] + i * shape["context"] for i in range(batches.windows)]
    assert len(tokens) - 1 - batches.windows * shape["context"] < 2 * shape["context"]


def test_batches_stay_the_same_from_version_to_version_as_a_resumed_run_goes_on_with_them():
    visited = np.array(starts(Batches(numbered(100_000), context=64, batch_size=32, seed=1), range(100)))
    assert hashlib.sha256(visited.astype("<i8").tobytes()).hexdigest()[:16] == "baeb24b6ea15ae4a"


def test_more_epochs_in_a_batch_than_anyone_wants_are_refused():
    with pytest.raises(ValueError, match="the training text has 2 windows"):
        Batches(numbered(121), context=40, batch_size=400, seed=0)


@given(st.integers(1, 20), sizes, st.integers(1, 7), st.integers(1, 5) | st.none(), st.integers(1, 3))
def test_validation_windows_cover_the_split_once_or_are_spread_evenly(context, more, batch_size, batches, ranks):
    tokens, found = context + 1 + more, []
    for rank in range(ranks):
        options = {"batch_size": batch_size, "batches": batches, "rank": rank, "ranks": ranks}
        found += validation_starts(tokens, context=context, **options)
    assert all(0 < len(batch) <= batch_size for batch in found)
    all_windows = (tokens - 1) // context
    wanted = all_windows if batches is None else min(batches * batch_size, all_windows)
    first = sorted(np.concatenate(found).tolist())
    assert len(first) == wanted and len(found) == -(-wanted // batch_size)
    assert all(start % context == 0 for start in first) and first[-1] + context < tokens
    gaps = {b - a for a, b in zip(first, [*first[1:], first[0] + all_windows * context], strict=True)}
    assert max(gaps) - min(gaps) <= context and min(gaps) > 0
