"""A run that goes on gives the bits of one that never stopped, also behind kill -9 at any moment."""

import random
import signal
import time
from functools import partial

import pytest
import torch

from data.order import Order
from tests.resume.stops import AUTO, after, in_operation, stop_with, train_and_kill, train_until
from tests.runs import bits, logged, train_here
from training import storage
from training.checkpoint import PLAIN
from training.evaluation import Evaluation
from training.precision import MixedPrecision


@pytest.mark.parametrize(("impl", "by", "optimizer"), [("fused", "auto", "adamw"), ("torch", "path", "muon")])
def test_n_and_n_steps_give_the_same_bits_as_2n(tiny, tmp_path, monkeypatch, impl, by, optimizer):
    monkeypatch.setattr(MixedPrecision, "scaler", lambda _: torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5))
    overrides = [*tiny, *AUTO, f"norm.impl={impl}", f"optim.kind={optimizer}", "model.dropout=0.1", "train.steps=24"]
    overrides += ["train.accumulation=2", "logging.every=5"]  # so that a line of metrics spans the checkpoint
    train_here(overrides, tmp_path / "whole")
    whole = bits(tmp_path / "whole")
    cut = train_until(16, overrides, tmp_path / "cut")  # after 15 steps, with a checkpoint of 12
    torch.rand(7)
    train_here(overrides if by == "auto" else [f"resume={cut}"], cut)
    assert bits(cut) == whole and whole["state"]["scaler"]["scale"] > 4.0


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The folder of a run that never stopped."""
    return train_here([*tiny, *AUTO, "model.dropout=0.1", "logging.every=5"], tmp_path_factory.mktemp("whole") / "run")[
        0
    ].folder


def test_a_signal_between_checkpoints_and_lines_of_metrics_changes_no_bit(tiny, whole, tmp_path):
    overrides = [*tiny, *AUTO, "model.dropout=0.1", "logging.every=5"]
    for step, number in ((3, signal.SIGINT), (9, signal.SIGTERM), (17, signal.SIGUSR1)):
        assert stop_with(number, step, overrides, tmp_path / "cut") == 128 + number
        assert storage.step_of(storage.checkpoints(tmp_path / "cut")[0]) == step
    train_here(overrides, tmp_path / "cut")
    assert bits(tmp_path / "cut") == bits(whole)


@pytest.mark.parametrize("at", [10, 30])
def test_sigterm_in_an_evaluation_cuts_it_short_and_it_is_made_up_for(tiny, whole, tmp_path, monkeypatch, at):
    overrides, cut = [*tiny, *AUTO, "model.dropout=0.1", "logging.every=5"], tmp_path / "cut"
    evaluate, calls = Evaluation.__call__, []

    def signalled(self, before_batch):
        calls.append(1)
        stops = len(calls) >= at // 10  # eval.every=10
        return evaluate(self, lambda: (stops and signal.raise_signal(signal.SIGTERM), before_batch()))

    monkeypatch.setattr(Evaluation, "__call__", signalled)
    for _ in range(2):  # also in the evaluation that is made up for
        with pytest.raises(SystemExit, match="143"):
            train_here(overrides, cut)
    assert storage.step_of(storage.checkpoints(cut)[0]) == at
    assert not any(line["step"] == at and "val/loss" in line for line in storage.read_metrics(cut))
    monkeypatch.setattr(Evaluation, "__call__", evaluate)
    train_here(overrides, cut)
    found, wanted = bits(cut), bits(whole)
    if at == 30:  # the last checkpoint was made before the evaluation that was cut short
        del found["state"], wanted["state"]
    assert found == wanted


def test_a_run_of_a_version_that_sorted_its_windows_goes_on_with_the_same_batches(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("data.order.SORTED", 0)  # as of a large corpus
    overrides = [*tiny, *AUTO, "train.steps=24"]
    with monkeypatch.context() as older:
        older.setattr("data.batches.Order", lambda *given: Order(*given[:3], version=1))
        older.setattr("training.checkpoint.PLAIN", tuple(name for name in PLAIN if name != "order"))
        train_here(overrides, tmp_path / "whole")
        cut = train_until(16, overrides, tmp_path / "cut")
    train_here(overrides, cut)
    train_here(overrides, tmp_path / "new")
    whole, found, new = bits(tmp_path / "whole"), bits(cut), bits(tmp_path / "new")
    assert found["state"].pop("order") == 1 and new["state"]["order"] == 2
    assert found == whole and new["model.safetensors"] != whole["model.safetensors"]


def test_a_run_killed_at_random_moments_goes_on_and_ends_with_the_same_bits(tiny, tmp_path):
    overrides = [*tiny, "model.dropout=0.1", "resume=auto", "logging.every=1", "checkpoint.every=3", "eval.every=7"]
    overrides += ["checkpoint.keep=1", "train.steps=20"]
    train_and_kill([*tiny, "train.steps=3"], tmp_path / "first")  # makes the corpus and starts the process that forks
    began = time.monotonic()
    assert not train_and_kill(overrides, tmp_path / "whole")
    whole_s = time.monotonic() - began
    wanted = bits(tmp_path / "whole")
    choose, kills, number, steps = random.Random(0), 0, 0, set()
    while kills < 10:
        folder = tmp_path / f"run_{number}"
        saving = choose.random() < 0.5
        how = partial(in_operation, choose.randrange(1, 200)) if saving else partial(after, choose.uniform(0, 0.5 * whole_s))
        if train_and_kill(overrides, folder, how):
            kills += 1
            newest, problems = storage.newest(folder)
            assert not problems, "a killed run left a damaged checkpoint"
            assert logged(folder) - (storage.step_of(newest) if newest else 0) <= 3, how
            steps.add(logged(folder))
        else:
            assert bits(folder) == wanted
            number += 1
    assert not train_and_kill(overrides, folder) and bits(folder) == wanted
    assert len(steps) > 3, f"the kills were only at the steps {steps}"
