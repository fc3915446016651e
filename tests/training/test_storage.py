"""A run's checkpoints are whole or not there, whatever happens while they are written, and damage is seen."""

import subprocess
from itertools import count
from pathlib import Path

import pytest

from configs import ConfigError
from measure.files import StorageError
from tests.resume.stops import in_operation
from tests.runs import no_space
from training import storage

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


def test_a_folder_with_other_files_is_never_used_and_one_that_a_program_has_gets_a_number(tmp_path, monkeypatch):
    """Of every name that a run, an ablation or a study writes; whoever asks for it, and also to resume."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for folder, taken in (("../new", "../new"), ("../new", "../new_2"), (".", "."), (".", "../empty_2")):
        with storage.claim(Path(folder), "train.py") as found:
            assert found.samefile(taken)
            (found / storage.METRICS).touch()
    names = ("tokenizer.json", "loss.png", "config.yaml", "run.json", "runs.jsonl", ".hidden", "a/b.txt", "run/config.yaml")
    for place, *asks in ((f"theirs {at}", name) for at, name in enumerate(names)):
        file = tmp_path / place / asks[0]
        file.parent.mkdir(parents=True)
        file.write_text("mine")
    storage.commit(tmp_path / "old", 1, PARTS)  # of a version that made no mark
    for folder, resumes, message in (
        *((folder, resumes, "it has other files") for folder in sorted(tmp_path.glob("theirs*")) for resumes in (False, True)),
        (tmp_path / "empty", True, r"it has files of train\.py\. Name a new folder"),
    ):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ConfigError, match=message), storage.claim(folder, "compare.py", resumes=resumes):
            pass
        assert sorted(tmp_path.rglob("*")) == before
    with storage.claim(tmp_path / "old", "train.py", resumes=True) as found:
        assert found == tmp_path / "old"
        with pytest.raises(ConfigError, match="another process is at work"), storage.claim(found, "train.py", resumes=True):
            pass


def test_a_folder_of_a_program_that_was_killed_as_it_took_it_is_resumed(tmp_path):
    (tmp_path / storage.MARK).touch()
    with storage.claim(tmp_path, "train.py", resumes=True) as found:
        assert found == tmp_path


def test_the_folder_of_a_run_that_was_killed_before_its_first_step_is_used_again_but_not_while_the_run_lives(tmp_path):
    with storage.claim(tmp_path / "run", "train.py") as run:
        (run / "config.yaml").touch()
        with storage.claim(run, "train.py") as other:
            assert other == tmp_path / "run_2"
    with storage.claim(run, "train.py") as again:
        assert again == run
