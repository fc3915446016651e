"""Several ranks are one run: the losses of one process, one folder, and one end."""

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import train_together
from tests.runs import read_json, train_here
from training import storage
from training.plot import read_metrics

SHORT = ["train.steps=12", "eval.every=6", "logging.every=1", "train.accumulation=2", "optim.clip_norm=0.5", "sample.tokens=0"]


@pytest.fixture(scope="module")
def tiny(tiny, tmp_path_factory):
    overrides = [*tiny, *SHORT]
    train_here([*overrides, "train.steps=3"], tmp_path_factory.mktemp("first") / "run")  # makes the corpus
    return overrides


def losses(folder):
    names = ("train/loss", "train/grad_norm", "val/loss")
    return torch.tensor([line[name] for line in read_metrics(folder / "metrics.jsonl") for name in names if name in line])


def test_the_same_global_batch_gives_the_same_losses_whatever_the_number_of_ranks(tiny, tmp_path):
    train_here(tiny, tmp_path / "alone")
    expected = load_file(tmp_path / "alone" / "last" / "model.safetensors")
    for ranks in (2, 4):
        folder = tmp_path / f"of_{ranks}"
        told = train_together(ranks, tiny, folder)
        assert [one["ended"] for one in told] == [None] * ranks
        torch.testing.assert_close(losses(folder), losses(tmp_path / "alone"), rtol=1e-5, atol=0)
        found = load_file(folder / "last" / "model.safetensors")
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-5, msg=name)
        rows = [row for one in told for row in one["rows"]]
        assert len(rows) == 12 * 8 and all(len(one["rows"]) == 12 * 8 // ranks for one in told)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["alone", "of_2", "of_4"]


def test_ranks_drop_different_elements_and_reduce_gradients_once_a_step(tiny, tmp_path):
    told = train_together(2, [*tiny, "model.dropout=0.1"], tmp_path / "run", count=[1])
    seeds = [seed for one in told for seed in one["seeds"]]
    assert len(set(seeds)) == len(seeds) == 2 * 12 * 2 * 5, "ranks × steps × micro-batches × norm sites"
    assert [one["reduced"] for one in told] == [12, 12], "one bucket, twelve steps of two micro-batches"


def test_a_signal_to_one_rank_stops_all_after_the_same_step_with_a_checkpoint(tiny, tmp_path):
    told = train_together(2, tiny, tmp_path / "run", signal=[1, 4])
    assert [(one["ended"], one["steps"]) for one in told] == [(143, 4), (143, 4)]
    assert storage.step_of(storage.checkpoints(tmp_path / "run")[0]) == 4
    train_together(2, [*tiny, "resume=auto"], tmp_path / "run")
    train_together(2, tiny, tmp_path / "whole")
    assert torch.equal(losses(tmp_path / "run"), losses(tmp_path / "whole")), "on as many ranks, the same bits"


def test_a_signal_to_one_rank_cuts_the_evaluation_of_all_short_and_it_is_made_up_for(tiny, tmp_path):
    whole = train_together(2, tiny, tmp_path / "whole")
    told = train_together(2, tiny, tmp_path / "run", look=[1, 2])
    assert whole[0]["looked"] == whole[1]["looked"] >= 6, "two evaluations of several batches, as many on each rank"
    assert [(one["ended"], one["steps"], one["looked"]) for one in told] == [(143, 6, 2), (143, 6, 2)]
    assert read_json(tmp_path / "run" / "last" / "state.json")["owes_validation"]
    train_together(2, [*tiny, "resume=auto"], tmp_path / "run")
    assert torch.equal(losses(tmp_path / "run"), losses(tmp_path / "whole"))


def test_a_loss_that_is_no_number_on_one_rank_stops_all_with_the_same_error(tiny, tmp_path):
    told = train_together(2, tiny, tmp_path / "run", nan=[1, 3])
    assert told[0]["ended"].startswith("NonFiniteError: the loss or the gradient is NaN or infinite at step 3")
    assert told[1]["ended"].partition(". Batch")[0] == told[0]["ended"].partition(". Batch")[0]


def test_a_last_checkpoint_that_a_thread_can_not_write_stops_all_with_the_same_error(tiny, tmp_path):
    told = train_together(2, [*tiny, "checkpoint.background=true"], tmp_path / "run", full=[0, 12])
    assert told[0]["ended"] == told[1]["ended"]
    assert told[0]["ended"].startswith("StorageError") and "step_00000012 can't be written" in told[0]["ended"]
    assert [storage.step_of(path) for path in storage.checkpoints(tmp_path / "run")] == [6]


def test_a_run_of_one_process_goes_on_with_two_ranks(tiny, tmp_path):
    train_here([*tiny, "optim.schedule=constant", "train.steps=6"], tmp_path / "run")
    train_together(2, [*tiny, "optim.schedule=constant", "resume=auto"], tmp_path / "run")
    train_here([*tiny, "optim.schedule=constant"], tmp_path / "whole")
    torch.testing.assert_close(losses(tmp_path / "run"), losses(tmp_path / "whole"), rtol=1e-5, atol=0)
    assert read_json(tmp_path / "run" / "last" / "state.json")["step"] == 12
