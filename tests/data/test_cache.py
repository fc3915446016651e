import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from data.cache import cached_folder


def write(folder: Path) -> None:
    (folder / "tokens").write_text("complete")


def test_a_folder_is_built_once_for_its_settings(tmp_path):
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        write(folder)

    first = cached_folder(str(tmp_path), "a", {"x": 1}, build)
    assert cached_folder(str(tmp_path), "a", {"x": 1}, build) == first
    assert len(built) == 1
    assert cached_folder(str(tmp_path), "a", {"x": 2}, build) != first
    assert (first / "tokens").read_text() == "complete"


@pytest.mark.parametrize("cache_dir", ["/proc/nope", "/proc", "/dev/null", "/dev/null/x", "x" * 300])
def test_a_place_where_nothing_can_be_kept_is_named(cache_dir, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=rf"^data\.cache_dir={cache_dir}: no corpus can be kept there \([A-Z].*\)\. Use another"
    ):
        cached_folder(cache_dir, "a", {}, write)


def test_a_folder_appears_complete_in_one_step(tmp_path):
    seen = []

    def build(folder: Path) -> None:
        write(folder)
        seen.append((folder.stat().st_ino, list(tmp_path.glob("a*"))))

    folder = cached_folder(str(tmp_path), "a", {}, build)
    assert seen == [(folder.stat().st_ino, [])]  # the folder that was built, renamed and not copied


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        write(folder)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached_folder(str(tmp_path), "a", {}, fail)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert (cached_folder(str(tmp_path), "a", {}, write) / "tokens").exists()


def test_a_disk_that_fills_while_a_folder_is_built_is_named(tmp_path):
    def fill(folder: Path) -> None:
        (folder / "tokens").symlink_to("/dev/full")
        write(folder)

    with pytest.raises(ValueError, match=r"data\.cache_dir=.*: no corpus can be kept there \(No space left on device\)"):
        cached_folder(str(tmp_path), "a", {}, fill)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_killed_build_leaves_no_torn_folder_and_the_next_one_cleans_up(tmp_path):
    code = f"""
import os, signal
from data.cache import cached_folder
def build(folder):
    (folder / "tokens").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
cached_folder({str(tmp_path)!r}, "a", {{}}, build)
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == -9
    folder = cached_folder(str(tmp_path), "a", {}, write)
    assert (folder / "tokens").read_text() == "complete"
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]


def test_who_comes_while_another_builds_waits_for_it(tmp_path):
    built, found = [], []

    def build(folder: Path) -> None:
        built.append(folder)
        time.sleep(0.2)
        write(folder)

    def load() -> None:
        found.append((cached_folder(str(tmp_path), "a", {}, build) / "tokens").read_text())

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert found == ["complete"] * 4


def test_a_name_cannot_leave_the_cache(tmp_path):
    assert cached_folder(str(tmp_path), "../../x/y", {}, write).parent == tmp_path
