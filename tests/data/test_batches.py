import hashlib
import itertools

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


@given(shapes, sizes, st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_a_batch_is_a_function_of_its_step_whatever_was_asked_before(shape, more, steps):
    tokens = numbered(shape["context"] + 1 + more)
    batches = Batches(tokens, **shape)
    in_order = [batches[step] for step in steps]
    for step, (inputs, targets) in reversed(list(zip(steps, in_order, strict=True))):
        for other in (batches, Batches(tokens, **shape)):
            assert torch.equal(other[step][0], inputs)
            assert torch.equal(other[step][1], targets)


@given(shapes, sizes, st.integers(0, 10**4))
def test_targets_are_the_inputs_shifted_by_one(shape, more, step):
    inputs, targets = Batches(numbered(shape["context"] + 1 + more), **shape)[step]
    assert inputs.shape == targets.shape == (shape["batch_size"], shape["context"])
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(shape["context"]))


@given(shapes, sizes, st.integers(0, 3))
def test_an_epoch_visits_each_window_once(shape, more, epoch):
    batches = Batches(numbered(shape["context"] + 1 + more), **{**shape, "batch_size": 1})
    visited = sorted(starts(batches, range(epoch * batches.windows, (epoch + 1) * batches.windows)))
    assert visited == [visited[0] + i * shape["context"] for i in range(batches.windows)]


@given(shapes, sizes)
def test_an_epoch_leaves_out_less_than_two_contexts(shape, more):
    tokens = numbered(shape["context"] + 1 + more)
    batches = Batches(tokens, **shape)
    assert len(tokens) - 1 - batches.windows * shape["context"] < 2 * shape["context"]


@given(shapes, sizes, st.integers(1, 6), st.integers(0, 10**4))
def test_the_shares_of_the_ranks_are_the_batch_of_one_rank(shape, more, ranks, step):
    tokens = numbered(shape["context"] + 1 + more)
    shape = {**shape, "batch_size": shape["batch_size"] * ranks}
    whole = Batches(tokens, **shape)[step]
    shares = [Batches(tokens, **shape, rank=rank, ranks=ranks)[step] for rank in range(ranks)]
    assert torch.equal(torch.cat([inputs for inputs, _ in shares]), whole[0])
    assert torch.equal(torch.cat([targets for _, targets in shares]), whole[1])


def test_epochs_and_seeds_differ_in_order_and_in_offset():
    orders, offsets = set(), set()
    for seed in range(5):
        batches = Batches(numbered(1000), context=10, batch_size=1, seed=seed)
        for epoch in range(5):
            visited = starts(batches, range(epoch * batches.windows, (epoch + 1) * batches.windows))
            offsets.add(min(visited))
            orders.add(tuple((start - min(visited)) // 10 for start in visited))
    assert len(orders) == 25
    assert len(offsets) > 5
    assert offsets <= set(range(10))


def test_batches_stay_the_same_from_version_to_version():
    """A resumed run must go on with the batches of the run it resumes, whatever was upgraded in between."""
    batches = Batches(numbered(100_000), context=64, batch_size=32, seed=1)
    visited = np.array(starts(batches, range(100)))
    assert hashlib.sha256(visited.astype("<i8").tobytes()).hexdigest()[:16] == "baeb24b6ea15ae4a"


def test_batches_leave_the_global_generators_alone():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = Batches(numbered(100), context=4, batch_size=4, seed=1)[7][0]
    torch.manual_seed(5)
    np.random.seed(5)
    assert torch.equal(Batches(numbered(100), context=4, batch_size=4, seed=1)[7][0], first)
    torch.set_rng_state(torch_state)
    np.random.seed(6)
    numpy_state = np.random.get_state()[1].copy()
    Batches(numbered(100), context=4, batch_size=4, seed=1)[8]
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()


def test_batches_read_only_where_a_batch_lies(tmp_path):
    path = tmp_path / "train.bin"
    with path.open("wb") as file:
        file.truncate(2**38)  # 256 GiB without a block on the disk: far more than could be read
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    inputs, _ = Batches(tokens, context=2**20, batch_size=2, seed=1)[12345]
    assert inputs.shape == (2, 2**20)


def test_a_position_names_the_tokens_of_its_batch():
    tokens = numbered(1000)
    for rank, step in itertools.product((0, 1), (0, 3, 50)):
        batches = Batches(tokens, context=10, batch_size=4, seed=3, rank=rank, ranks=2)
        position = batches.position(step)
        assert batches[step][0][:, 0].tolist() == list(position.offsets)
        assert position.epoch * position.windows + position.window == step * 4 + rank * 2
        assert f"step {step}" in str(position)
        assert str(position.offsets[0]) in str(position)


@pytest.mark.parametrize(
    ("tokens", "settings", "message"),
    [
        (4, {"context": 4}, "needs at least 5 tokens, got 4"),
        (9, {"batch_size": 3, "ranks": 2}, "batch_size=3 .* multiple of the 2 ranks"),
        (9, {"batch_size": 0}, "batch_size=0"),
        (9, {"batch_size": 2, "rank": 2, "ranks": 2}, r"rank=2 must be in \[0, 2\)"),
        (9, {"seed": -1}, "seed=-1"),
    ],
)
def test_impossible_batches_are_refused(tokens, settings, message):
    with pytest.raises(ValueError, match=message):
        Batches(numbered(tokens), **{"context": 4, "batch_size": 1, "seed": 0, **settings})


def test_a_negative_step_is_refused():
    with pytest.raises(IndexError, match="step=-1"):
        Batches(numbered(9), context=4, batch_size=1, seed=0)[-1]


@given(st.integers(1, 20), sizes, st.integers(1, 7), st.integers(1, 3))
def test_validation_windows_cover_the_split_once(context, more, batch_size, ranks):
    tokens = numbered(context + 1 + more)
    seen = []
    for rank in range(ranks):
        windows = ValidationWindows(tokens, context=context, batch_size=batch_size, rank=rank, ranks=ranks)
        batches = list(windows)
        assert len(batches) == len(windows)
        for inputs, targets in batches:
            assert inputs.dtype == targets.dtype == torch.int64
            assert inputs.shape[0] <= batch_size
            assert inputs.shape[1] == context
            assert torch.equal(targets, inputs + 1)
            seen += inputs.flatten().tolist()
    assert sorted(seen) == list(range((len(tokens) - 1) // context * context))


@given(st.integers(1, 20), sizes, st.integers(1, 7), st.integers(1, 5), st.integers(1, 3))
def test_a_part_of_the_validation_windows_is_spread_evenly(context, more, batch_size, batches, ranks):
    tokens = numbered(context + 1 + more)
    all_windows = (len(tokens) - 1) // context
    ours = [
        ValidationWindows(tokens, context=context, batch_size=batch_size, batches=batches, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    starts = sorted(int(row[0]) for windows in ours for inputs, _ in windows for row in inputs)

    assert len(starts) == min(batches * batch_size, all_windows)
    assert all(start % context == 0 for start in starts)
    gaps = {b - a for a, b in zip(starts, [*starts[1:], starts[0] + all_windows * context], strict=True)}
    assert max(gaps) - min(gaps) <= context and min(gaps) > 0


def test_validation_windows_can_be_iterated_again():
    windows = ValidationWindows(numbered(100), context=8, batch_size=3)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(windows, windows, strict=True))
