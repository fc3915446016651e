"""What is damaged, lost or copied is named, and what is whole is used and kept."""

import os
import shutil

import pytest

from configs import ConfigError
from tests.resume.stops import AUTO, train_until
from tests.runs import train_here
from training import checkpoint
from training.plot import read_metrics


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("part", ["model.safetensors", "training.safetensors", "state.json", "tokenizer.json"])
@pytest.mark.parametrize("harm", [flip, lambda path: os.truncate(path, path.stat().st_size - 1)], ids=["flipped", "truncated"])
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


def test_a_checkpoint_can_be_moved_and_read_alone(tiny, tmp_path):
    summary, _ = train_here([*tiny, "train.steps=5"], tmp_path / "run")
    shutil.copytree(summary.folder / "last", tmp_path / "elsewhere")

    assert checkpoint.read(tmp_path / "elsewhere").step == 5
