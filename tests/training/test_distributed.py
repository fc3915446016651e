"""Several ranks are one run: the losses of one process, one folder, and one end."""

import re

import pytest
import torch

from tests.ranks import train_together
from tests.runs import assert_same_run, curves, read_json, train_here
from training import storage

SHORT = ["train.steps=12", "eval.every=6", "logging.every=1", "train.accumulation=2", "optim.clip_norm=0.5", "sample.tokens=0"]


@pytest.fixture(scope="module")
def tiny(tiny):
    return [*tiny, *SHORT]


@pytest.fixture(scope="module")
def whole(tiny, alone, tmp_path_factory):
    """The folder of the run on two ranks, and what they tell."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, train_together(2, tiny, folder)


def test_the_same_global_batch_gives_the_same_losses_whatever_the_number_of_ranks(tiny, whole, tmp_path):
    alone = train_here(tiny, tmp_path / "alone" / "run")[0].folder
    for folder, told in (whole, (tmp_path / "of_4" / "run", train_together(4, tiny, tmp_path / "of_4" / "run"))):
        assert [one["ended"] for one in told] == [None] * len(told)
        assert [len(one["rows"]) for one in told] == [12 * 8 // len(told)] * len(told)
        assert_same_run(folder, alone)
        assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]


def test_ranks_drop_different_elements_and_reduce_gradients_once_a_step(tiny, tmp_path):
    told = train_together(2, [*tiny, "model.dropout=0.1"], tmp_path / "run", count=[1])
    seeds = [seed for one in told for seed in one["seeds"]]
    assert len(set(seeds)) == len(seeds) == 2 * 12 * 2 * 5, "ranks × steps × micro-batches × norm sites"
    assert [one["reduced"] for one in told] == [12, 12], "one bucket, twelve steps of two micro-batches"


@pytest.mark.parametrize(
    ("act", "steps", "looked"),
    [({"signal": [1, 4]}, 4, 0), ({"look": [1, 2]}, 6, 2)],
    ids=["in a step", "in an evaluation, which is made up for"],
)
def test_a_signal_to_one_rank_stops_all_at_the_same_point_with_a_checkpoint(tiny, whole, tmp_path, act, steps, looked):
    assert whole[1][0]["looked"] == whole[1][1]["looked"] >= 6, "two evaluations of several batches, as many on each rank"
    told = train_together(2, tiny, tmp_path / "run", **act)
    assert [(one["ended"], one["steps"], one["looked"]) for one in told] == [(143, steps, looked)] * 2
    state = read_json(tmp_path / "run" / "last" / "state.json")
    assert (state["step"], state["owes_validation"]) == (steps, looked > 0)
    train_together(2, [*tiny, "resume=auto"], tmp_path / "run")
    assert torch.equal(curves(tmp_path / "run"), curves(whole[0])), "on as many ranks, the same bits"


@pytest.mark.parametrize(
    ("act", "error"),
    [
        ({"nan": [1, 3]}, "NonFiniteError: the loss or the gradient is NaN or infinite at step 3"),
        ({"full": [0, 12]}, "StorageError: .*step_00000012 can't be written"),  # the last checkpoint, by a thread
    ],
)
def test_what_one_rank_can_not_go_on_with_stops_all_with_the_same_error(tiny, tmp_path, act, error):
    told = train_together(2, [*tiny, "checkpoint.background=true"], tmp_path / "run", **act)
    assert told[0]["ended"].partition(". Batch")[0] == told[1]["ended"].partition(". Batch")[0]
    assert re.match(error, told[0]["ended"])
    assert [storage.step_of(path) for path in storage.checkpoints(tmp_path / "run")] == [6] * ("full" in act)
