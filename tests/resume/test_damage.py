"""What is damaged, lost or copied is named, and what is whole is used and kept."""

import shutil
from pathlib import Path

import pytest

from configs import ConfigError
from tests.resume.stops import AUTO, refused, train_until
from tests.runs import train_here
from training import checkpoint, storage


def damage(path):
    path.write_bytes(path.read_bytes()[:-1] + b"?")  # every kind of it: training/test_storage.py


@pytest.mark.parametrize("part", ["training.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(cut, capsys, part):
    folder, command = cut
    damage(folder / "last" / part)
    capsys.readouterr()
    _, metrics = train_here(command, folder)
    said = capsys.readouterr().out
    assert "step_00000012" in said and "damaged" in said and "the one before it is used" in said
    assert "resumed from 10" in said
    assert [line["step"] for line in metrics if "train/loss" in line] == list(range(1, 31))


def test_a_run_without_any_whole_checkpoint_is_refused_and_left_as_it_is(cut):
    folder, command = cut
    for saved in storage.checkpoints(folder):
        damage(saved / "model.safetensors")
    metrics = (folder / "metrics.jsonl").read_bytes()
    for choice in ("auto", folder):
        refused([*command, f"resume={choice}"], folder, r"model\.safetensors is damaged(.|\n)*no checkpoint in .*run is whole")
    shutil.rmtree(folder / "checkpoints")
    refused(command, folder, "a run whose checkpoints are gone")
    assert (folder / "metrics.jsonl").read_bytes() == metrics


def test_a_run_that_was_copied_with_its_links_followed_goes_on(cut, tmp_path):
    folder, command = cut
    shutil.copytree(folder, tmp_path / "copy")  # as scp -r
    assert not (tmp_path / "copy" / "last").is_symlink()
    train_here(command, tmp_path / "copy")
    assert checkpoint.read(tmp_path / "copy" / "last").step == 30
    assert checkpoint.read(tmp_path / "copy" / "copied_last").step == 12


def test_checkpoints_that_were_copied_alone_are_the_runs_and_never_anothers(cut, tiny, tmp_path, capsys):
    folder, command = cut
    shutil.copytree(folder / "checkpoints", tmp_path / "copy" / "checkpoints")
    refused([*command, "seed=2"], tmp_path / "copy", "seed=2: the checkpoint was made with seed=1")
    summary, _ = train_here([*tiny, "seed=2", "train.steps=3"], tmp_path / "copy")
    said = f"{tmp_path}/copy has another run already, so this one is kept in {tmp_path}/copy_2.\n"
    assert summary.folder == tmp_path / "copy_2" and said in capsys.readouterr().out
    _, metrics = train_here(command, tmp_path / "copy")
    assert metrics[0]["step"] == 13


def test_a_checkpoint_that_may_not_be_read_is_refused_and_not_passed_over(cut, monkeypatch):
    folder, command = cut
    original = Path.open

    def denied(path, mode="r", *rest, **options):
        if path.name == "model.safetensors" and mode == "rb":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", denied)
    refused(command, folder, r"a checkpoint can't be read: .*Permission denied")
    monkeypatch.undo()
    assert storage.step_of(storage.newest(folder)[0]) == 12


def test_a_link_to_a_checkpoint_that_was_deleted_is_explained_and_goes_when_the_run_goes_on(cut, capsys):
    folder, command = cut
    shutil.rmtree(folder / "checkpoints" / storage.name(10))
    with pytest.raises(ConfigError, match=r"best points to checkpoints/step_00000010, which is gone. Give the run"):
        checkpoint.read(folder / "best")
    train_until(18, command, folder)
    assert "best pointed to a checkpoint that is gone, and is deleted" in capsys.readouterr().err
    assert not (folder / "best").is_symlink() and checkpoint.read(folder / "last").step == 12


def test_what_is_no_checkpoint_of_this_program_is_named(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    folder = train_until(8, [*tiny, *AUTO], tmp_path / "run")
    monkeypatch.undo()
    (tmp_path / "old.pt").write_bytes(b"")
    for path, message in ((folder, "not a checkpoint of this program"), (tmp_path / "old.pt", "is a file. A checkpoint is a")):
        with pytest.raises(ConfigError, match=message):
            checkpoint.read(path)
