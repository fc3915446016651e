import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data.cache import cached_folder, checksums
from tests.runs import raising


def write(folder: Path) -> None:
    (folder / "tokens").write_text("complete")


def test_a_folder_is_built_once_for_its_settings_and_stays_in_the_cache_whatever_its_name(tmp_path):
    first = cached_folder(str(tmp_path), "../../a", {"x": 1}, write)
    assert cached_folder(str(tmp_path), "../../a", {"x": 1}, lambda _: pytest.fail("built again")) == first
    assert cached_folder(str(tmp_path), "../../a", {"x": 2}, write) != first
    assert first.parent == tmp_path and (first / "tokens").read_text() == "complete"


@pytest.mark.parametrize("cache_dir", ["/proc/nope", "/dev/null/x", "x" * 300])
def test_a_place_where_nothing_can_be_kept_is_named(cache_dir, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^data\.cache_dir={cache_dir}: no corpus can be kept there \([A-Z].*\)\. Use"):
        cached_folder(cache_dir, "a", {}, write)


@pytest.mark.parametrize(("file", "message"), [("/dev/full", r"data\.cache_dir=.*\(No space left"), ("/no/x", "No such file")])
def test_a_failed_build_leaves_nothing(tmp_path, file, message):
    def fail(folder: Path) -> None:
        (folder / "tokens").symlink_to(file)
        write(folder)

    with pytest.raises((ValueError, OSError), match=message):
        cached_folder(str(tmp_path), "a", {}, fail)
    assert not any(tmp_path.glob("*/"))


def test_a_killed_build_leaves_no_torn_folder_and_the_next_one_cleans_up(tmp_path):
    if (child := os.fork()) == 0:
        try:
            cached_folder(str(tmp_path), "a", {}, lambda folder: (write(folder), os.kill(os.getpid(), signal.SIGKILL)))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert [torn.name[0] for torn in tmp_path.glob("*/")] == ["."]
    assert [cached_folder(str(tmp_path), "a", {}, write)] == [*tmp_path.glob("*/")]


def test_who_comes_while_another_builds_waits_and_the_folder_appears_complete_in_one_step(tmp_path):
    built = []

    def build(folder: Path) -> None:
        time.sleep(0.2)
        write(folder)
        built.append((folder.stat().st_ino, list(tmp_path.glob("a*"))))

    with ThreadPoolExecutor(4) as pool:
        [folder] = set(pool.map(lambda _: cached_folder(str(tmp_path), "a", {}, build), range(4)))
    assert built == [(folder.stat().st_ino, [])]  # the folder that was built, renamed and not copied


def test_what_another_user_left_locks_nobody_out_and_a_finished_folder_is_as_open_as_its_cache(tmp_path, monkeypatch):
    """As another user sees them: files that this process may not open, by whatever name the first user gave them."""
    for mode, file, folder_mode in ((0o777, 0o644, 0o755), (0o750, 0o640, 0o750), (0o700, 0o600, 0o700)):
        shared = tmp_path / f"{mode:o}"
        shared.mkdir()
        shared.chmod(mode)
        umask = os.umask(0o077)
        try:
            with pytest.raises(KeyboardInterrupt):
                cached_folder(str(shared), "a", {}, raising(KeyboardInterrupt()))
            before = {path.name for path in shared.iterdir()}
            folder = cached_folder(str(shared), "a", {}, write)
        finally:
            os.umask(umask)
        assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {oct(file)}
        assert folder.stat().st_mode & 0o777 == folder_mode
        monkeypatch.setattr("data.cache.USER", 4711)
        assert cached_folder(str(shared), "a", {"x": 1}, write).is_dir()
        monkeypatch.undo()
        assert all("4711" not in name for name in before), "the names have the user in them"


def test_large_files_are_read_once_and_again_when_anything_about_them_changed(tmp_path, monkeypatch):
    monkeypatch.setattr("data.cache.LARGE", 10)
    monkeypatch.setattr("data.cache.time.time_ns", lambda: 2**62)  # long after the files were written
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("x" * 100)
    first = checksums([path], cache)
    with monkeypatch.context() as unread:
        unread.setattr("data.cache.file_digest", lambda *_: pytest.fail("read again"))
        assert checksums([path], cache) == first
    stat = path.stat()
    path.write_text("y" * 100)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert checksums([path], cache) != first, "other content of the same size and time"
    (tmp_path / "copy.txt").write_text("x" * 100)
    assert checksums([tmp_path / "copy.txt"], cache) == first, "a copy is the same content"
    for kept in cache.glob(".sums-*/*"):
        kept.write_text("no sum")
    assert checksums([tmp_path / "copy.txt"], cache) == first
