"""A run that goes on gives the bits of one that never stopped."""

import random
import signal

import numpy as np
import pytest
import torch

from model import GPT
from tests.resume.stops import AUTO, stop_with, train_until
from tests.runs import bits, train_here
from training import evaluation, storage
from training.plot import read_metrics
from training.precision import Precision


@pytest.mark.parametrize("impl", ["fused", "torch"])
def test_n_and_n_steps_give_the_same_bits_as_2n(tiny, tmp_path, monkeypatch, impl):
    monkeypatch.setattr(Precision, "scaler", lambda _: torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5))
    overrides = [*tiny, *AUTO, f"norm.impl={impl}", "model.dropout=0.1", "train.steps=24"]
    overrides += ["train.accumulation=2", "logging.every=5"]  # so that a line of metrics spans the checkpoint
    summary, _ = train_here(overrides, tmp_path / "whole")
    whole, generators = bits(tmp_path / "whole"), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    train_until(16, overrides, tmp_path / "cut")  # after 15 steps, with a checkpoint of 12
    torch.rand(7)
    rest, _ = train_here(overrides, tmp_path / "cut")
    assert bits(tmp_path / "cut") == whole and whole["state"]["scaler"]["scale"] > 4.0
    assert rest.final == summary.final and rest.best == summary.best
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert np.random.get_state()[1].tolist() == generators[2]


def test_going_on_by_path_in_the_runs_own_folder_gives_the_same_bits_too(tiny, tmp_path):
    overrides = [*tiny, "model.dropout=0.1", "logging.every=1", "checkpoint.every=6"]
    train_here(overrides, tmp_path / "whole")
    train_until(16, overrides, tmp_path / "cut")
    train_here([f"resume={tmp_path / 'cut'}"], tmp_path / "cut")
    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_between_checkpoints_and_lines_of_metrics_changes_no_bit(tiny, tmp_path, number):
    overrides = [*tiny, *AUTO, "model.dropout=0.1", "logging.every=5"]
    train_here(overrides, tmp_path / "whole")
    for step in (3, 9, 17):
        assert stop_with(number, step, overrides, tmp_path / "cut") == 128 + number
        assert storage.step_of(storage.checkpoints(tmp_path / "cut")[0]) == step
    train_here(overrides, tmp_path / "cut")
    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")


@pytest.mark.parametrize("at", [10, 30])
def test_sigterm_in_an_evaluation_cuts_it_short_and_it_is_made_up_for(tiny, tmp_path, monkeypatch, at):
    overrides = [*tiny, *AUTO, "model.dropout=0.1"]
    train_here(overrides, tmp_path / "whole")
    original, forward = evaluation.evaluate, GPT.forward

    def signalled(model, *rest, **options):
        if len(calls) == at // 10 - 1:  # eval.every=10
            monkeypatch.setattr(GPT, "forward", lambda *a, **k: (signal.raise_signal(signal.SIGTERM), forward(*a, **k))[1])
        calls.append(model)
        return original(model, *rest, **options)

    calls = []
    monkeypatch.setattr(evaluation, "evaluate", signalled)
    with pytest.raises(SystemExit) as stop:
        train_here(overrides, tmp_path / "cut")
    assert stop.value.code == 143
    with pytest.raises(SystemExit) as stop:  # and once more, in the evaluation that is made up for
        train_here(overrides, tmp_path / "cut")
    monkeypatch.setattr(evaluation, "evaluate", original)
    monkeypatch.setattr(GPT, "forward", forward)
    assert stop.value.code == 143
    assert storage.step_of(storage.checkpoints(tmp_path / "cut")[0]) == at
    assert not any(line["step"] == at and "val/loss" in line for line in read_metrics(tmp_path / "cut" / "metrics.jsonl"))
    train_here(overrides, tmp_path / "cut")
    assert compared(tmp_path / "cut", at) == compared(tmp_path / "whole", at)


def compared(folder, at):
    """`bits`; the checkpoint of a last step was made before its evaluation where that was cut short."""
    found = bits(folder)
    for key in ("owes_validation", "validation", "best", "best_step") * (at == 30):
        del found["state"][key]
    return found


def test_a_run_takes_up_one_of_the_other_operator_and_says_so(tiny, tmp_path, capsys):
    overrides = [*tiny, *AUTO, "model.dropout=0.1", "norm.dropout_masks=shared"]
    train_until(14, [*overrides, "norm.impl=fused"], tmp_path / "run")
    other, _ = train_here([*overrides, "norm.impl=torch"], tmp_path / "run")
    assert "norm.impl=torch from here on; the steps before had norm.impl=fused." in capsys.readouterr().out
    whole, _ = train_here([*overrides, "norm.impl=fused"], tmp_path / "whole")
    assert other.final.loss == pytest.approx(whole.final.loss, rel=1e-5)
