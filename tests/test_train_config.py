"""The loop, in this process: keys of the config reach what uses them, and each thing happens at its step."""

from contextlib import contextmanager

import pytest
import torch

import train
from model import GPT
from tests.runs import FakeWandb, losses, train_here
from training import evaluation
from training.checkpoint import Saver
from training.clock import StepClock
from training.distributed import ALONE
from training.evaluation import Validation


def test_settings_metrics_summary_and_picture_reach_wandb(tiny, tmp_path, monkeypatch, capsys):
    fake = FakeWandb(monkeypatch)
    monkeypatch.setenv("WANDB_PROJECT", "p")
    monkeypatch.setenv("WANDB_RUN_GROUP", "theirs")
    overrides = ["train.steps=10", "logging.wandb=offline", "logging.group=g", "logging.name=n", "logging.tags=[a,b]"]
    summary, metrics = train_here([*tiny, *overrides], tmp_path / "run", plot=True)
    settings = {"project": "p", "group": "g", "name": "n", "tags": ["a", "b", "fused", "layernorm"], "mode": "offline"}
    assert settings.items() <= fake.arguments.items()
    assert "offline (WANDB_PROJECT=p; logging.group=g, not WANDB_RUN_GROUP=theirs)\n" in capsys.readouterr().out
    assert "  project: p\n" in (summary.folder / "config.yaml").read_text(), "the run goes on there"
    assert fake.arguments["config"]["optim"]["lr"] == 3e-3
    assert "parameters" in fake.arguments["config"]["facts"]["model"]
    *values, picture = fake.logged
    assert [{"step": step} | line for step, line in values] == metrics
    assert picture == (10, {"loss": f"image {summary.folder / 'loss.png'}"})
    assert fake.summary["final"] == {"loss": summary.final.loss, "bits_per_byte": summary.final.bits_per_byte}
    assert fake.summary["best"]["loss"] == summary.best.loss and fake.summary["sample"] == summary.sample
    assert fake.exit_code == 0


def test_keys_of_evaluation_and_of_the_sample_reach_them(tiny, tmp_path, monkeypatch):
    read, drawn, generate = [], [], GPT.generate
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, before_batch, **how: read.append(how) or Validation(1.0, 1.0))
    monkeypatch.setattr(GPT, "generate", lambda self, *a, **k: drawn.append(a[1:]) or generate(self, *a, **k))
    sample = ["sample.temperature=0.25", "sample.top_k=3", "sample.tokens=4"]
    train_here([*tiny, "train.steps=5", "eval.batches=3", "train.accumulation=2", *sample], tmp_path / "run")
    summary, _ = train_here([*tiny, "train.steps=3", "sample.tokens=0"], tmp_path / "none")
    assert read[0] == {"context": 32, "batch_size": 4, "batches": 3, "world": ALONE}
    assert drawn == [(4, 0.25, 3)] and summary.sample == "" and not (summary.folder / "sample.txt").exists()


def test_the_rate_is_that_of_the_step_it_is_logged_for_and_the_seed_decides_the_initial_weights(tiny, tmp_path, monkeypatch):
    first, used, original = [], [], train.training_step

    def step(forward, state, *rest):
        first.append(state.model.blocks[0].mlp.down.weight.detach().clone())
        result = original(forward, state, *rest)
        used.append(state.optimizer.param_groups[0]["lr"])
        return result

    monkeypatch.setattr(train, "training_step", step)
    for seed in (1, 1, 2):
        _, metrics = train_here([*tiny, "train.steps=8", "logging.every=1", f"seed={seed}"], tmp_path / "run")
    assert losses(metrics, "train/lr") == used[-8:] and len(set(used)) == 8
    assert torch.equal(first[0], first[8]) and not torch.equal(first[0], first[16])


def test_the_training_loss_is_the_mean_of_the_steps_since_the_last_line(tiny, tmp_path):
    one, some = (
        losses(train_here([*tiny, "train.steps=13", f"logging.every={every}"], tmp_path / "run")[1]) for every in (1, 5)
    )
    assert some == pytest.approx([sum(part) / len(part) for part in (one[:5], one[5:10], one[10:])])


def test_evaluation_and_checkpoints_stand_in_a_pause(tiny, tmp_path, monkeypatch):
    paused, during = [], []

    @contextmanager
    def pause(clock):
        paused.append(True)
        yield
        paused.pop()

    def watched(name, original):
        return lambda *given, **named: during.append((name, len(paused))) or original(*given, **named)

    monkeypatch.setattr(StepClock, "paused", pause)
    monkeypatch.setattr(evaluation, "evaluate", watched("evaluate", evaluation.evaluate))
    monkeypatch.setattr(Saver, "save", watched("save", Saver.save))
    train_here([*tiny, "train.steps=6", "checkpoint.every=4", "eval.every=0"], tmp_path / "run")
    assert during == [("save", 1), ("evaluate", 1), ("save", 1)]
