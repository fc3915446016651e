import os
import signal
import threading
import time
from pathlib import Path

import pytest

from data.cache import cached_folder


def write(folder: Path) -> None:
    (folder / "tokens").write_text("complete")


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_a_folder_is_built_once_for_its_settings_and_stays_in_the_cache_whatever_its_name(tmp_path):
    first = cached_folder(str(tmp_path), "../../a", {"x": 1}, write)
    assert cached_folder(str(tmp_path), "../../a", {"x": 1}, lambda _: pytest.fail("built again")) == first
    assert cached_folder(str(tmp_path), "../../a", {"x": 2}, write) != first
    assert first.parent == tmp_path and (first / "tokens").read_text() == "complete"


@pytest.mark.parametrize("cache_dir", ["/proc/nope", "/dev/null", "/dev/null/x", "x" * 300])
def test_a_place_where_nothing_can_be_kept_is_named(cache_dir, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^data\.cache_dir={cache_dir}: no corpus can be kept there \([A-Z].*\)\. Use"):
        cached_folder(cache_dir, "a", {}, write)


def test_a_folder_appears_complete_in_one_step(tmp_path):
    seen = []

    def build(folder: Path) -> None:
        write(folder)
        seen.append((folder.stat().st_ino, list(tmp_path.glob("a*"))))

    folder = cached_folder(str(tmp_path), "a", {}, build)
    assert seen == [(folder.stat().st_ino, [])]  # the folder that was built, renamed and not copied


@pytest.mark.parametrize(
    ("file", "message"), [("/dev/full", r"data\.cache_dir=.*: .* \(No space left on device\)"), ("/no/x", "No such file")]
)
def test_a_failed_build_leaves_nothing(tmp_path, file, message):
    def fail(folder: Path) -> None:
        (folder / "tokens").symlink_to(file)
        write(folder)

    with pytest.raises((ValueError, OSError), match=message):
        cached_folder(str(tmp_path), "a", {}, fail)
    assert not folders(tmp_path)


def test_a_killed_build_leaves_no_torn_folder_and_the_next_one_cleans_up(tmp_path):
    if (child := os.fork()) == 0:
        try:
            cached_folder(str(tmp_path), "a", {}, lambda folder: (write(folder), os.kill(os.getpid(), signal.SIGKILL)))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    [torn] = folders(tmp_path)
    assert torn.name.startswith(".")
    folder = cached_folder(str(tmp_path), "a", {}, write)
    assert folders(tmp_path) == [folder]


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
    assert len(built) == 1 and found == ["complete"] * 4
