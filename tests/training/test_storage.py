"""A run's checkpoints are whole or not there, whatever happens while they are written, and damage is seen."""

import subprocess
from itertools import count
from pathlib import Path

import pytest

from configs import ConfigError
from tests.resume.stops import in_operation
from tests.runs import no_space
from training import storage
from training.storage import StorageError

PARTS = {"a.bin": lambda: bytes(10_000), "b.txt": lambda: b"hello\n"}
DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 16]) + path.read_bytes()[1:]),
}


def steps(run):
    return [storage.step_of(checkpoint) for checkpoint in storage.checkpoints(run)]


def test_a_checkpoint_has_its_files_and_sums_that_other_programs_can_check(tmp_path):
    checkpoint = storage.commit(tmp_path, 7, PARTS)
    assert (checkpoint / "a.bin").read_bytes() == bytes(10_000)
    done = subprocess.run(["sha256sum", "--check", storage.SUMS], cwd=checkpoint, capture_output=True, text=True)
    assert done.stdout == "a.bin: OK\nb.txt: OK\n"


def test_a_failure_in_any_operation_leaves_the_checkpoint_before_and_nothing_else(tmp_path):
    failed = 0
    for number in count(1):
        run = tmp_path / str(number)
        storage.commit(run, 1, PARTS)
        with pytest.MonkeyPatch.context() as patch:
            in_operation(number, no_space, patch.setattr)
            try:
                storage.commit(run, 2, PARTS)
            except StorageError as error:
                failed += "step_00000002 can't be written: No space left on device" in str(error)
        # the last operations flush the new name, when the checkpoint is there
        assert steps(run) in ([1], [2, 1])
        assert {path.name[:5] for path in (run / storage.FOLDER).iterdir()} == {"step_"}
        for kept in storage.checkpoints(run):
            storage.verify(kept)
        if failed < number:
            break
    assert failed > 10 and steps(run) == [2, 1]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("part", ["a.bin", storage.SUMS])
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, part, damage):
    before = storage.commit(tmp_path, 1, PARTS)
    newest = storage.commit(tmp_path, 2, PARTS)
    damage(newest / part)
    found, [problem] = storage.newest(tmp_path)
    assert found == before and "step_00000002" in problem


def test_what_killed_processes_left_is_no_checkpoint_and_goes_away(tmp_path):
    for step in (1, 2):  # a step that is never reached again, and one that is
        left = tmp_path / storage.FOLDER / f".{storage.name(step)}.tmp"
        left.mkdir(parents=True)
        (left / "a.bin").write_bytes(b"torn")
    assert steps(tmp_path) == []
    storage.commit(tmp_path, 2, PARTS, keep=1)
    assert [path.name for path in (tmp_path / storage.FOLDER).iterdir()] == [storage.name(2)]


def test_a_run_is_not_scattered_among_the_users_files_or_other_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here" / "below").mkdir(parents=True)
    storage.claim(tmp_path / "runs" / "a")
    monkeypatch.chdir(tmp_path / "here" / "below")
    for folder in (".", "..", tmp_path, tmp_path / "here", tmp_path / "home", tmp_path / "runs"):
        with pytest.raises(ConfigError, match=r"would lie among others there\. Name a new one: folder=runs/NAME"):
            storage.claim(Path(folder))
    assert sorted(path.name for path in tmp_path.rglob("config.yaml")) == ["config.yaml"]
    assert storage.claim(Path("new")) == Path("new")
