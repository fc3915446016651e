"""The end of a run: results that a signal or a kill keeps from being made are made up for."""

import signal

import pytest

from model import GPT
from tests.resume.stops import AUTO, drawing, train_and_kill
from tests.runs import FakeWandb, composed, read_json, train_here
from training import storage
from training.resume import settle


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_final_sample_keeps_the_summary_and_the_same_run_makes_the_sample_up(
    tiny, tmp_path, monkeypatch, number, capsys
):
    fake, run = FakeWandb(monkeypatch), tmp_path / "run"
    overrides = [*tiny, *AUTO, "train.steps=5", "logging.wandb=offline", "logging.group=g"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(GPT, "generate", lambda *_, **__: signal.raise_signal(number))
        train_here(overrides, run)
    assert stop.value.code == fake.exit_code == 128 + number
    said, first = capsys.readouterr(), fake.arguments
    assert "step, then a checkpoint" not in said.err and "Stopping." in said.err
    assert f"all is kept but the sample; to make it up: {storage.resume_command(run)}" in said.out
    assert read_json(run / "summary.json")["final"]["loss"] > 0 and not (run / "sample.txt").exists()
    summary, _ = train_here(overrides, run)
    assert (run / "sample.txt").read_text() == summary.sample != ""
    assert fake.arguments["id"] == first["id"] and fake.arguments["group"] == first["group"] == "g"
    assert (first["resume"], fake.arguments["resume"]) == (None, "allow")


def finished(overrides, folder):
    return settle(composed(overrides), folder, [], chosen=True).finished


def test_a_run_that_auto_finds_finished_is_left_alone(tiny, tmp_path):
    overrides, run = [*tiny, *AUTO, "train.steps=5"], tmp_path / "run"
    assert not finished(overrides, run)
    train_here(overrides, run)
    assert finished(overrides, run)
    for result in ("sample.txt", "summary.json"):  # as after a kill between the last checkpoint and the results
        (run / result).rename(run / "kept")
        assert not finished(overrides, run)
        (run / "kept").rename(run / result)


def test_a_run_killed_while_its_picture_is_drawn_is_not_finished_and_has_no_half_of_one(tiny, tmp_path):
    overrides, run = [*tiny, *AUTO, "train.steps=5"], tmp_path / "run"
    assert train_and_kill(overrides, run, drawing, plot=True)
    assert not (run / "loss.png").exists()
    assert not finished(overrides, run)
    train_here(overrides, run, plot=True)
    assert finished(overrides, run)
    assert (run / "loss.png").read_bytes().endswith(b"IEND\xaeB`\x82")
