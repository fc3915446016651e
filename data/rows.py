"""The documents of local files: rows of .jsonl, .csv and .parquet files, and UTF-8 text.

Whatever a row has that no column takes, and whatever is no text, is an error that names the row: nothing vanishes in silence.
"""

import csv
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from data.pieces import Blocks

csv.field_size_limit(2**31 - 1)  # of a document; the default would refuse long ones

CSV = (".csv", ".tsv")
Rows = Iterator[tuple[str, Any]]  # the line where a row ends, or its number, and what its column of text holds
BLOCK = 2**20  # characters read at once


def read_documents(path: Path, field: str) -> Blocks:
    """The column `field` of each row of a file whose suffix is one of ROWS, "" for null; or another file as one document.

    Raises:
        ValueError: what is no row or no text. It names the row.
    """
    if rows := ROWS.get(path.suffix.lower()):
        yield from ((as_text(value, where, field), True) for where, value in rows(path, field))
    else:
        yield from ((text, False) for text in read_text(path))
        yield "", True


def as_text(value: Any, where: str, field: str) -> str:
    """What the column `field` of a row holds; null counts as no text. Raises ValueError: something else."""
    if not isinstance(value, str | None):
        raise ValueError(f"{where}: the column data.text_field={field} has no text, but {type(value).__name__} {value!s:.100}")
    return value or ""


def read_text(path: Path, lines: bool = False) -> Iterator[str]:
    """Blocks of a UTF-8 file, or its lines with their ends, without the byte order mark. Raises ValueError: it is no text."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for text in file if lines else iter(partial(file.read, BLOCK), ""):
                if "\0" in text:
                    raise ValueError
                yield text
    except ValueError as error:
        with path.open("rb") as file:  # again, by lines
            number, why = next(filter(lambda line: line[1], enumerate(map(_why_no_text, file), start=1)))
        raise ValueError(f"line {number}: {why}. Only UTF-8 text can be read; `iconv` converts others") from error


def _why_no_text(line: bytes) -> str | None:
    try:
        line.decode()
    except ValueError as error:
        return str(error)
    return "it has a zero byte, as UTF-16 and binary files have" if b"\0" in line else None


def json_rows(path: Path, field: str) -> Rows:
    """One JSON object a line. Blank lines are no rows."""
    for number, line in enumerate(read_text(path, lines=True), start=1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"no JSON object, but {line.strip():.100}")
            _column(field, list(row))
            if "\\" in line:
                str(row[field]).encode()  # half of a surrogate pair is no character
        except (ValueError, RecursionError) as error:  # also numbers of too many digits, and nesting that is too deep
            why = f"column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error
            hint = ". `jq -c '.[]'` makes an object a line of a list" if line.startswith("[") else ""
            raise ValueError(f"line {number}: {why}{hint}") from error
        yield f"line {number}", row[field]


def csv_rows(path: Path, field: str) -> Rows:
    """Rows below a header, quoted as `csv.writer` and pandas quote."""
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    reader = csv.reader(read_text(path, lines=True), delimiter=delimiter, strict=True)
    rows = filter(None, reader)  # a blank line is no row
    try:
        if not (columns := next(rows, [])):
            raise ValueError("it is empty, and has no header that names the columns")
        at = _column(field, columns)
        for fields in rows:
            if len(fields) != len(columns):
                raise csv.Error(
                    f"{len(fields)} fields for {len(columns)} columns ({', '.join(columns)}): {str(fields)[:100]}. "
                    f"A text that has {delimiter!r} stands in quotes"
                )
            yield f"line {reader.line_num}", fields[at]
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error


def parquet_rows(path: Path, field: str) -> Rows:
    from pyarrow import ArrowException, parquet

    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            _column(field, file.schema_arrow.names)
            values = (value for batch in file.iter_batches(batch_size=1000, columns=[field]) for value in batch[field])
            for row, value in enumerate(values, start=1):
                yield f"row {row}", value.as_py()
    except (ArrowException, UnicodeError) as error:
        raise ValueError(f"row {row + 1}: {error}" if row else str(error)) from error


def _column(field: str, columns: list[str]) -> int:
    """The place of this column. Raises ValueError: it is not there, or twice."""
    if (count := columns.count(field)) != 1:
        there = f"is there {count} times" if count else "is missing"
        raise ValueError(f"the column data.text_field={field} {there}; the columns are {', '.join(columns) or 'none'}")
    return columns.index(field)


ROWS: dict[str, Callable[[Path, str], Rows]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), json_rows),
    **dict.fromkeys(CSV, csv_rows),
    ".parquet": parquet_rows,
}
