import hashlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import data.cache
from data.cache import cached_folder, known_checksums


def write(folder: Path) -> None:
    (folder / "tokens").write_text("complete")


def test_a_folder_is_built_once_for_its_settings_and_stays_in_the_cache_whatever_its_name(tmp_path):
    first = cached_folder(str(tmp_path), "../../a", {"x": 1}, write)
    assert cached_folder(str(tmp_path), "../../a", {"x": 1}, lambda _: pytest.fail("built again")) == first
    assert cached_folder(str(tmp_path), "../../a", {"x": 2}, write) != first
    assert first.parent == tmp_path and (first / "tokens").read_text() == "complete"


@pytest.mark.parametrize("cache_dir", ["/proc", "/dev/null/x", "x" * 300, "full"])
def test_a_place_where_nothing_can_be_kept_is_named_and_a_failed_build_leaves_nothing(cache_dir, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def fill(folder: Path) -> None:
        (folder / "tokens").symlink_to("/dev/full")
        write(folder)

    with pytest.raises(ValueError, match=rf"^data\.cache_dir={cache_dir}: no corpus can be kept there \([A-Z].*\)\. Use"):
        cached_folder(cache_dir, "a", {}, fill)
    assert not any(tmp_path.glob("full/*/"))


def test_a_killed_build_leaves_no_torn_folder_and_the_next_one_cleans_up(tmp_path):
    if (child := os.fork()) == 0:
        try:
            cached_folder(str(tmp_path), "a", {}, lambda folder: (write(folder), os.kill(os.getpid(), signal.SIGKILL)))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert [torn.name[0] for torn in tmp_path.glob("*/")] == ["."]
    assert [cached_folder(str(tmp_path), "a", {"another": 1}, write)] == [*tmp_path.glob("*/")]


def test_a_large_file_is_hashed_again_only_where_its_size_times_or_samples_differ(tmp_path, monkeypatch):
    monkeypatch.setattr("data.cache.SAMPLE", 10)
    path, read, plain = tmp_path / "x", [], data.cache.checksum
    monkeypatch.setattr(data.cache, "checksum", lambda path, *more: read.append(1) or plain(path, *more))
    path.write_bytes(bytes(range(250)) * 100)
    first, again = (known_checksums([path], tmp_path / "cache") for _ in range(2))
    assert first == again == [hashlib.sha256(path.read_bytes()).hexdigest()] and read == [1]
    for change in (lambda: os.utime(path), lambda: path.open("ab").write(b"x"), lambda: path.open("r+b").write(b"xyz")):
        times = path.stat()
        change()
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert known_checksums([path], tmp_path / "cache") == [plain(path)]
    assert len(read) == 4
    assert known_checksums([path], Path("/proc")) == [plain(path)], "where nothing can be kept it is read"


def test_who_comes_while_another_builds_says_so_and_waits_and_the_folder_appears_complete_in_one_step(tmp_path, capfd):
    built = []

    def build(folder: Path) -> None:
        time.sleep(1.2)  # who waits for a second says so
        write(folder)
        built.append((folder.stat().st_ino, list(tmp_path.glob("a*"))))

    with ThreadPoolExecutor(4) as pool:
        [folder] = set(pool.map(lambda _: cached_folder(str(tmp_path), "a", {}, build), range(4)))
    assert built == [(folder.stat().st_ino, [])]  # the folder that was built, renamed and not copied
    assert capfd.readouterr().err.count(f"data.name=a: another process prepares it in {tmp_path}") == 3


def test_large_files_are_not_read_at_every_start_but_have_to_be_there(tmp_path, monkeypatch):
    folder = cached_folder(str(tmp_path), "a", {}, write)
    (folder / "tokens").write_text("damaged ")
    with pytest.raises(ValueError, match=r"tokens: it is not as it was written\. Delete"):
        cached_folder(str(tmp_path), "a", {}, write)
    monkeypatch.setattr("data.cache.LARGE", 2)
    assert cached_folder(str(tmp_path), "a", {}, write) == folder
    (folder / "tokens").unlink()
    with pytest.raises(ValueError, match="tokens: No such file"):
        cached_folder(str(tmp_path), "a", {}, write)


def test_a_build_of_another_user_locks_nobody_out_and_the_first_folder_stays(tmp_path, monkeypatch):
    def meanwhile(folder: Path) -> None:
        write(folder)
        monkeypatch.setattr(os, "getuid", lambda: 2)  # FileLock would not let the same process wait for itself
        assert cached_folder(str(tmp_path), "a", {}, lambda other: (other / "tokens").write_text("theirs")).is_dir()

    monkeypatch.setattr(os, "getuid", lambda: 1)
    folder = cached_folder(str(tmp_path), "a", {}, meanwhile)
    assert (folder / "tokens").read_text() == "theirs"
    assert [*tmp_path.glob("*/")] == [folder]
