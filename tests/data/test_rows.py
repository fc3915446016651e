"""Files whose rows are documents, a byte order mark, and keys of another source."""

import json

import pytest

from configs import ConfigError, load
from configs.schema import DataConfig
from data.documents import find_documents, read_pieces
from tests.runs import CPU

TEXTS = ["a\nb", "", 'c, "d"\n', "é" * 40_000]


def documents(path, **keys):
    data = DataConfig(source="text", files=[str(path)], cache_dir=str(path.parent / "cache"), **keys)
    return ["".join(document) for document in find_documents(data).open(path.parent).train()]


@pytest.mark.parametrize("field", ["text", "body"])
def test_rows_of_jsonl_and_csv_are_documents(tmp_path, field):
    lines = [json.dumps({"id": 1, field: text}) for text in TEXTS]
    (tmp_path / "x.jsonl").write_text("\ufeff" + "\n".join([*lines, "", json.dumps({field: None})]), encoding="utf-8")
    quoted = ['"' + text.replace('"', '""') + '"' for text in TEXTS]
    (tmp_path / "x.csv").write_text("\ufeff" + "\n".join([f"id,{field}", *(f"1,{text}" for text in quoted)]), encoding="utf-8")
    assert documents(tmp_path / "x.jsonl", text_field=field) == [*TEXTS, ""]
    assert documents(tmp_path / "x.csv", text_field=field) == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"body": "a"}\n', "row 1 has no text in the column text, but body. Use another data.text_field"),
        ("x.jsonl", '{"text": "a"}\n[1]\n', "row 2 has no text in the column text, but a list"),
        ("x.jsonl", '{"text": 3}\n', "row 1 has no text in the column text"),
        ("x.jsonl", "{torn\n", "Expecting property name"),
        ("x.csv", "a,b\n1,2\n", "row 1 has no text in the column text, but a, b"),
        ("x.csv", b"text\n\xff\xfe\n", "can't decode"),
    ],
)
def test_rows_without_the_column_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"data\.files: \S+{name}: .*{message}"):
        documents(tmp_path / name)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfthe king")
    assert "".join(read_pieces(tmp_path / "x.txt")) == "the king"


@pytest.mark.parametrize(
    "key", ["streaming=true", "subset=en", "revision=main", "val_split=test", "train_split=a", "document_start=a", "path=a"]
)
def test_a_key_of_another_source_is_refused(key):
    name = key.partition("=")[0]
    with pytest.raises(
        ConfigError, match=rf"data\.{name} is read only with data\.source=hub; here data\.source=text\. Use data\.source=hub"
    ):
        load(["data=text", "data.files=[a.txt]", f"data.{key}"], on=CPU)
