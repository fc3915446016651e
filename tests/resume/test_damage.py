"""What is damaged, lost or copied is named, and what is whole is used and kept."""

import os
import shutil
from pathlib import Path

import pytest

from configs import ConfigError
from tests.resume.stops import AUTO, train_until
from tests.runs import train_here
from training import checkpoint, storage
from training.plot import read_metrics


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("part", "harm"), [("training.safetensors", flip), ("state.json", lambda path: os.truncate(path, path.stat().st_size - 1))]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tiny, tmp_path, capsys, part, harm):
    overrides = [*tiny, *AUTO, "train.steps=20", "eval.every=0"]
    train_until(16, overrides, tmp_path / "run")
    harm(tmp_path / "run" / "last" / part)
    capsys.readouterr()
    train_here(overrides, tmp_path / "run")
    said = capsys.readouterr().out
    assert "step_00000012" in said and "damaged" in said and "the one before it is used" in said
    assert "resumed from 6" in said
    lines = [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line]
    assert lines == list(range(1, 21))


def test_a_run_without_any_whole_checkpoint_is_refused_and_left_as_it_is(tiny, tmp_path):
    train_until(8, [*tiny, *AUTO], tmp_path / "run")
    flip(tmp_path / "run" / "last" / "model.safetensors")
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for choice in ("auto", tmp_path / "run"):
        with pytest.raises(ConfigError, match=r"model\.safetensors is damaged(.|\n)*no checkpoint in .*run is whole"):
            train_here([*tiny, f"resume={choice}"], tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_a_run_that_was_copied_with_its_links_followed_goes_on(tiny, tmp_path):
    train_until(8, [*tiny, *AUTO], tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # as scp -r
    assert not (tmp_path / "copy" / "last").is_symlink()
    train_here([*tiny, *AUTO], tmp_path / "copy")
    assert checkpoint.read(tmp_path / "copy" / "last").step == 30
    assert checkpoint.read(tmp_path / "copy" / "copied_last").step == 6


def test_checkpoints_that_were_copied_alone_are_the_runs_and_never_anothers(tiny, tmp_path):
    train_until(8, [*tiny, *AUTO], tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "copy" / "checkpoints")
    with pytest.raises(ConfigError, match="seed=2: the checkpoint was made with seed=1"):
        train_here([*tiny, *AUTO, "seed=2"], tmp_path / "copy")
    summary, _ = train_here([*tiny, "seed=2", "train.steps=3"], tmp_path / "copy")
    assert summary.folder.name == "copy_2"
    _, metrics = train_here([*tiny, *AUTO], tmp_path / "copy")
    assert metrics[0]["step"] == 7


def test_a_run_whose_checkpoints_were_deleted_is_not_started_anew_over_its_record(tiny, tmp_path):
    train_until(8, [*tiny, *AUTO], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="a run whose checkpoints are gone"):
        train_here([*tiny, *AUTO], tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_a_checkpoint_that_may_not_be_read_is_refused_and_not_passed_over(tiny, tmp_path, monkeypatch):
    train_until(14, [*tiny, *AUTO], tmp_path / "run")
    original = Path.open

    def denied(path, mode="r", *rest, **options):
        if path.name == "model.safetensors" and mode == "rb":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ConfigError, match=r"a checkpoint can't be read: .*Permission denied"):
        train_here([*tiny, *AUTO], tmp_path / "run")
    monkeypatch.setattr(Path, "open", original)
    assert storage.step_of(storage.newest(tmp_path / "run")[0]) == 12
