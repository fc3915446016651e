import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data import Batches, ValidationWindows

shapes = st.fixed_dictionaries({"context": st.integers(1, 20), "batch_size": st.integers(1, 12), "seed": st.integers(0, 2**63)})
sizes = st.integers(0, 300)  # tokens beyond the shortest corpus


def numbered(count: int) -> np.ndarray:
    """Tokens that are their own offsets."""
    return np.arange(count, dtype=np.uint32)


def starts(batches: Batches, steps: range) -> list[int]:
    return [int(start) for step in steps for start in batches[step][0][:, 0]]


def starts_of_epoch(batches: Batches, epoch: int) -> list[int]:
    return starts(batches, range(epoch * batches.windows, (epoch + 1) * batches.windows))


@given(shapes, sizes, st.integers(1, 4), st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_a_batch_is_a_function_of_its_step_and_is_cut_among_the_ranks(shape, more, ranks, steps):
    tokens, shape = numbered(shape["context"] + 1 + more), {**shape, "batch_size": shape["batch_size"] * ranks}
    batches, parts = Batches(tokens, **shape), [Batches(tokens, **shape, rank=rank, ranks=ranks) for rank in range(ranks)]
    in_order = [batches[step] for step in steps]
    for step, (inputs, targets) in reversed(list(zip(steps, in_order, strict=True))):
        assert inputs.shape == (shape["batch_size"], shape["context"]) and inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(shape["context"])) and torch.equal(targets, inputs + 1)
        for again in (batches[step], [torch.cat(sides) for sides in zip(*(part[step] for part in parts), strict=True)]):
            assert torch.equal(again[0], inputs) and torch.equal(again[1], targets)


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


def test_batches_read_only_where_a_batch_lies(tmp_path):
    tokens = np.memmap(tmp_path / "train.bin", np.uint16, "w+", shape=2**37)  # 256 GiB without a block on the disk
    inputs, _ = Batches(tokens, context=2**20, batch_size=2, seed=1)[12345]
    assert inputs.shape == (2, 2**20)
    with pytest.raises(ValueError, match="the training text has 2 windows"):
        Batches(numbered(121), context=40, batch_size=400, seed=0)


@given(st.integers(1, 20), sizes, st.integers(1, 7), st.integers(1, 5) | st.none(), st.integers(1, 3))
def test_validation_windows_cover_the_split_once_or_are_spread_evenly(context, more, batch_size, batches, ranks):
    tokens, read, count = numbered(context + 1 + more), [], 0
    for rank in range(ranks):
        options = {"batch_size": batch_size, "batches": batches, "rank": rank, "ranks": ranks}
        windows = ValidationWindows(tokens, context=context, **options)
        count += len(windows)
        for (inputs, targets), (again, _) in zip(windows, windows, strict=True):
            assert inputs.dtype == torch.int64 and inputs.shape[0] <= batch_size and inputs.shape[1] == context
            assert torch.equal(targets, inputs + 1) and torch.equal(again, inputs)
            read += inputs.tolist()
    all_windows = (len(tokens) - 1) // context
    wanted = all_windows if batches is None else min(batches * batch_size, all_windows)
    first = sorted(row[0] for row in read)
    assert len(read) == wanted and count == -(-wanted // batch_size)
    assert all(start % context == 0 for start in first)
    gaps = {b - a for a, b in zip(first, [*first[1:], first[0] + all_windows * context], strict=True)}
    assert max(gaps) - min(gaps) <= context and min(gaps) > 0
