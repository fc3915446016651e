"""Facts about the code that a run's numbers depend on."""

import os
import subprocess

from measure import environment
from measure.environment import git_state


def test_the_git_state_says_whether_the_code_was_changed(tmp_path):
    assert git_state(tmp_path) is None
    (tmp_path / "a").write_text("1")
    for arguments in (["init"], ["add", "a"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)
    clean = git_state(tmp_path)
    (tmp_path / "a").write_text("2")
    assert len(clean["revision"]) == 40 and clean["dirty"] is False
    assert git_state(tmp_path) == {"revision": clean["revision"], "dirty": True}


def test_the_revision_of_another_users_checkout_is_read(tmp_path):
    (tmp_path / "bin").mkdir()
    run = {"cwd": tmp_path, "check": True, "capture_output": True}
    for command in ("init", "-c user.name=a -c user.email=b commit --allow-empty -m x"):
        subprocess.run(["git", *command.split()], **run)
    os.chown(tmp_path, 65534, 65534)
    assert subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True).returncode, (
        "git refuses it by itself"
    )
    state = environment.git_state(tmp_path)
    assert state is not None and len(state["revision"]) == 40
