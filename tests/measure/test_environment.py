"""Facts about the code that a run's numbers depend on."""

import os
import subprocess

from measure.environment import git_state


def test_the_git_state_has_the_revision_and_whether_the_code_was_changed_also_of_another_users_checkout(tmp_path):
    assert git_state(tmp_path) is None
    for name in ("a", "b"):
        (tmp_path / name).write_text("1")
    for words in ("init", "add a b", "-c user.name=a -c user.email=a@b commit -m a"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    os.chown(tmp_path, 65534, 65534)
    assert subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True).returncode, (
        "git refuses it by itself"
    )
    (tmp_path / "untracked").touch()
    clean = git_state(tmp_path)
    (tmp_path / "a").write_text("2")
    assert len(clean["revision"]) == 40 and clean["dirty"] is False
    assert git_state(tmp_path) == {"revision": clean["revision"], "dirty": True} and git_state(tmp_path, ["a"]) == clean
