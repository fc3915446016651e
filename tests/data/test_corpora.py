import json
import os
import re
import threading

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

import configs
import data.corpora
from configs.machine import Machine
from configs.schema import DataConfig, Source, TokenizerConfig, TokenizerKind
from data import Batches, Corpus, Tokenizer, load_corpus
from tests.data.texts import text_of

BPE = TokenizerConfig(vocab_size=300)
CHAR = TokenizerConfig(kind=TokenizerKind.char)
TEXTS = [text_of(i, 60) for i in range(40)]


@pytest.fixture
def text_config(notes, tmp_path) -> DataConfig:
    return DataConfig(
        name="notes", source=Source.text, files=[f"{notes}/*.txt"], val_fraction=0.2, cache_dir=f"{tmp_path}/cache"
    )


@pytest.fixture
def hub_config(tmp_path):
    """A data set in a local folder, written in one of the formats of the Hub."""

    def write(format: str, **columns_of_split: dict[str, list]) -> DataConfig:
        folder = tmp_path / "dataset"
        splits = datasets.DatasetDict({name: datasets.Dataset.from_dict(columns) for name, columns in columns_of_split.items()})
        if format == "save_to_disk":
            splits.save_to_disk(folder)
        for name, split in splits.items():
            if format == "parquet":
                split.to_parquet(folder / f"{name}-00000-of-00001.parquet")
            if format == "jsonl":
                split.to_json(folder / f"{name}.jsonl")
        return DataConfig(name="hub", source=Source.hub, path=str(folder), val_fraction=0.2, cache_dir=f"{tmp_path}/cache")

    return write


def decoded(corpus: Corpus) -> list[list[str]]:
    """The documents of both splits, as the tokens have them."""
    splits = []
    for split in (corpus.train, corpus.val):
        ends = np.flatnonzero(split.tokens == corpus.tokenizer.end_of_text)
        documents = np.split(np.asarray(split.tokens), ends + 1)
        splits.append([corpus.tokenizer.decode(document.tolist()) for document in documents if len(document)])
    return splits


def no_build(*args):
    pytest.fail("made again what was in the cache")


@pytest.mark.parametrize("processes", [1, 2])
def test_tokens_decode_to_the_documents(text_config, notes, processes):
    text_config.processes = processes
    corpus = load_corpus(text_config, BPE, context=16)
    train, val = decoded(corpus)
    assert sorted(train + val) == sorted(path.read_text() for path in notes.iterdir())
    assert (corpus.train.documents, corpus.val.documents) == (len(train), len(val))
    assert corpus.tokenizer.vocab_size <= 300
    assert corpus.name == "notes"


@pytest.mark.parametrize("tokenizer", [BPE, CHAR], ids=["bpe", "char"])
def test_bytes_are_those_of_the_decoded_tokens(text_config, tokenizer):
    corpus = load_corpus(text_config, tokenizer, context=16)
    for split in (corpus.train, corpus.val):
        assert split.bytes == len(corpus.tokenizer.decode(split.tokens.tolist()).encode())
        assert split.bytes_per_token == split.bytes / len(split.tokens)


def test_characters_join_documents_with_a_newline(text_config, notes):
    corpus = load_corpus(text_config, CHAR, context=16)
    text = corpus.tokenizer.decode(corpus.train.tokens.tolist())
    inside = [path.read_text() for path in notes.iterdir() if path.read_text() + "\n" in text]
    assert sum(len(document) + 1 for document in inside) == len(text) == len(corpus.train.tokens)


def test_bpe_learns_from_the_training_documents_alone(text_config, tmp_path):
    learned_from = []
    train = data.corpora.train_bpe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.corpora, "train_bpe", lambda texts, size: train(learned_from.extend(texts) or learned_from, size))
        corpus = load_corpus(text_config, BPE, context=16)
    assert "".join(learned_from) == "".join(decoded(corpus)[0])


def test_bpe_learns_from_a_bounded_share_of_a_large_corpus(text_config, monkeypatch):
    monkeypatch.setattr(data.corpora, "BPE_CHARACTERS", 500)
    seen = []
    train = data.corpora.train_bpe
    monkeypatch.setattr(data.corpora, "train_bpe", lambda texts, size: train(seen.extend(texts) or seen, size))
    load_corpus(text_config, BPE, context=16)
    assert 500 <= len("".join(seen)) < 2000


def test_the_characters_of_the_end_of_text_token_in_a_document_are_text(text_config, notes):
    for path in notes.iterdir():
        path.write_text("a <|endoftext|> b " * 20 + path.name)
    corpus = load_corpus(text_config, BPE, context=16)
    for split in (corpus.train, corpus.val):
        assert np.count_nonzero(split.tokens == corpus.tokenizer.end_of_text) == split.documents


def test_tokens_are_mapped_and_not_read(text_config):
    corpus = load_corpus(text_config, BPE, context=16)
    for split in (corpus.train, corpus.val):
        assert isinstance(split.tokens, np.memmap)
        assert split.tokens.dtype == np.uint16
        assert not split.tokens.flags.writeable


def test_a_vocabulary_above_65536_needs_four_bytes_a_token(text_config, tmp_path):
    import tokenizers

    characters = [chr(c) for c in (*range(1, 0xD800), *range(0xE000, 0x16000))]
    vocabulary = {c: i for i, c in enumerate(characters)}
    Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))).save(tmp_path / "big.json")
    pretrained = TokenizerConfig(kind=TokenizerKind.pretrained, pretrained=str(tmp_path / "big.json"))
    corpus = load_corpus(text_config, pretrained, context=16)
    assert corpus.tokenizer.vocab_size > 2**16
    assert corpus.train.tokens.dtype == np.uint32


def test_a_tokenizer_that_adds_a_prefix_to_each_text_gets_whole_documents(text_config, notes, tmp_path, monkeypatch):
    for path in notes.iterdir():
        path.unlink()
    for i in range(2):
        (notes / f"{i}.txt").write_text(text_of(i, 500))
    monkeypatch.setattr("data.documents.PIECE", 100)
    monkeypatch.setattr("data.documents.cut.__defaults__", (100,))
    metaspace = HuggingFaceTokenizer(models.BPE())
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], show_progress=False)
    metaspace.train_from_iterator([text_of(0, 500)], trainer)
    metaspace.save(str(tmp_path / "metaspace.json"))
    pretrained = TokenizerConfig(kind=TokenizerKind.pretrained, pretrained=str(tmp_path / "metaspace.json"))

    corpus = load_corpus(text_config, pretrained, context=16)

    documents = [[*metaspace.encode(text_of(i, 500)).ids, metaspace.token_to_id("</s>")] for i in range(2)]
    assert sorted([corpus.train.tokens.tolist(), corpus.val.tokens.tolist()]) == sorted(documents)


def test_the_revision_is_what_is_asked_of_the_hub(text_config, monkeypatch):
    asked = {}

    def load_dataset(path, subset, **options):
        asked.update(options, path=path)
        return datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": TEXTS}))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    openwebtext = configs.load(["data=openwebtext"], on=Machine("cpu")).data
    openwebtext.cache_dir, openwebtext.val_fraction = text_config.cache_dir, 0.2

    load_corpus(openwebtext, BPE, context=16)

    assert (asked["path"], asked["revision"]) == ("Skylion007/openwebtext", "refs/convert/parquet")


# ---- the cache ---------------------------------------------------------------------------------------------------------------


def test_the_second_load_makes_nothing(text_config, monkeypatch):
    first = load_corpus(text_config, BPE, context=16)
    monkeypatch.setattr(data.corpora, "_build", no_build)
    second = load_corpus(text_config, BPE, context=16)
    assert (first.train.tokens == second.train.tokens).all()
    assert first.train.documents == second.train.documents
    assert first.tokenizer.encode("the king") == second.tokenizer.encode("the king")


def test_two_caches_of_one_corpus_have_the_same_bytes(text_config, tmp_path, monkeypatch):
    files = []
    for cache in ("one", "two"):
        text_config.cache_dir = str(tmp_path / cache)
        load_corpus(text_config, BPE, context=16)
        [folder] = [path for path in (tmp_path / cache).iterdir() if path.is_dir()]
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert files[0] == files[1]
    assert set(files[0]) == {"tokenizer.json", "train.bin", "val.bin", "corpus.json"}  # nothing temporary


def test_a_changed_file_makes_the_corpus_anew_even_with_its_old_time(text_config, notes):
    before = load_corpus(text_config, BPE, context=16)
    path = notes / "3.txt"
    times = path.stat()
    path.write_text(path.read_text()[:-1] + "?")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = load_corpus(text_config, BPE, context=16)
    assert not any("?" in document for split in decoded(before) for document in split)
    assert any("?" in document for split in decoded(after) for document in split)


def test_settings_have_caches_of_their_own(text_config, tmp_path):
    load_corpus(text_config, BPE, context=16)
    load_corpus(text_config, CHAR, context=16)
    load_corpus(text_config, TokenizerConfig(vocab_size=290), context=16)
    text_config.val_fraction = 0.4
    load_corpus(text_config, BPE, context=16)
    text_config.processes = 2  # changes nothing about the tokens
    load_corpus(text_config, BPE, context=32)
    folders = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(folders) == 4
    facts = [json.loads((folder / "corpus.json").read_text()) for folder in folders]
    assert {fact["settings"]["tokenizer"] for fact in facts} == {"bpe", "char"}


def test_a_moved_corpus_is_found_again(text_config, notes, monkeypatch):
    built = load_corpus(text_config, BPE, context=16)
    text_config.files = [f"{notes.rename(notes.parent / 'moved')}/*.txt"]
    monkeypatch.setattr(data.corpora, "_build", no_build)
    found = load_corpus(text_config, BPE, context=16)
    assert found.train.tokens.tolist() == built.train.tokens.tolist()


def test_processes_that_load_at_once_get_the_same_corpus(text_config):
    corpora = []
    threads = [threading.Thread(target=lambda: corpora.append(load_corpus(text_config, BPE, context=16))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(corpora) == 4
    assert len({corpus.train.tokens.tobytes() for corpus in corpora}) == 1


def test_a_damaged_cache_is_noticed(text_config, tmp_path):
    load_corpus(text_config, BPE, context=16)
    [path] = tmp_path.glob("cache/*/train.bin")
    with path.open("r+b") as file:
        file.truncate(20)
    with pytest.raises(ValueError, match=r"train\.bin has 10 tokens, expected \d+: delete the folder"):
        load_corpus(text_config, BPE, context=16)


# ---- data sets as on the Hub -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_split_of_its_own_is_the_validation_split(hub_config, format, streaming):
    config = hub_config(format, train={"text": TEXTS[:30]}, validation={"text": TEXTS[30:]})
    config.val_split, config.streaming = "validation", streaming
    assert decoded(load_corpus(config, BPE, context=16)) == [TEXTS[:30], TEXTS[30:]]


@pytest.mark.parametrize(
    ("format", "streaming", "processes"),
    [("parquet", False, 1), ("parquet", False, 2), ("parquet", True, 1), ("jsonl", True, 1), ("save_to_disk", False, 1)],
)
def test_documents_are_held_out_where_there_is_no_validation_split(hub_config, format, streaming, processes):
    config = hub_config(format, train={"id": list(range(40)), "content": TEXTS})
    config.text_field, config.streaming, config.processes = "content", streaming, processes
    train, val = decoded(load_corpus(config, BPE, context=16))
    assert sorted(train + val) == sorted(TEXTS)
    assert 2 <= len(val) <= 16  # 20 % of 40


def test_null_and_empty_rows_are_no_documents(hub_config):
    config = hub_config("parquet", train={"text": [None, *TEXTS[:20], "", None]})
    corpus = load_corpus(config, BPE, context=16)
    assert corpus.train.documents + corpus.val.documents == 20


def test_max_documents_bounds_what_a_stream_reads(hub_config):
    config = hub_config("jsonl", train={"text": TEXTS})
    config.streaming, config.max_documents = True, 25
    corpus = load_corpus(config, BPE, context=16)
    assert corpus.train.documents + corpus.val.documents == 25


def test_rows_that_are_lines_become_articles(hub_config):
    lines = [
        line
        for i in range(6)
        for line in (f" = Title {i} = \n", "", f" {text_of(i, 30)[:100]} \n".replace("\n", " "), " = = Part = = \n")
    ]
    config = hub_config("parquet", train={"text": lines})
    config.document_start = "^ = [^=].* = $"
    train, val = decoded(load_corpus(config, BPE, context=16))
    assert len(train + val) == 6
    assert all(re.match(r" = Title \d = \n\n .* \n = = Part = = \n$", article) for article in train + val)


def test_a_changed_local_data_set_makes_the_corpus_anew(hub_config, monkeypatch):
    first = load_corpus(hub_config("jsonl", train={"text": TEXTS[:20]}), BPE, context=16)
    config = hub_config("jsonl", train={"text": TEXTS[:30]})
    second = load_corpus(config, BPE, context=16)
    assert second.train.documents > first.train.documents
    monkeypatch.setattr(data.corpora, "_build", no_build)
    load_corpus(config, BPE, context=16)


# ---- what a run should learn before it trains --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"text_field": "body"}, ValueError, "data.text_field=body is not a column of .*dataset, which has: id, text"),
        ({"text_field": "id"}, ValueError, "data.text_field=id .* holds int, expected text; columns of text: text"),
        ({"train_split": "test"}, ValueError, "data.train_split=test is not a split of .*dataset, which has: train"),
        ({"val_split": "valid"}, ValueError, "data.val_split=valid is not a split of .*dataset, which has: train"),
        ({"subset": "french"}, ValueError, "data.subset=french: BuilderConfig 'french' not found. Available: .*default"),
        ({"document_start": "("}, ValueError, r"data.document_start=\( is not a regular expression"),
        ({"streaming": True, "processes": 2}, ValueError, "data.streaming=true reads with one process.* Use data.processes=1"),
        ({"path": None}, ValueError, "data.source=hub needs data.path"),
        ({"path": "./nowhere"}, FileNotFoundError, "data.path=./nowhere is no folder"),
        ({"path": "owner/name"}, FileNotFoundError, "data.path=owner/name could not be read: .* Without a network use"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_the_data_set_lacks_is_named(hub_config, settings, error, message, streaming):
    config = hub_config("jsonl", train={"id": list(range(40)), "text": TEXTS})
    for key, value in {"streaming": streaming, **settings}.items():
        setattr(config, key, value)
    with pytest.raises(error, match=message):
        load_corpus(config, BPE, context=16)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_empty_corpus_is_refused_and_not_cached(text_config, notes, tmp_path, processes):
    text_config.processes = processes
    for path in notes.iterdir():
        path.write_text("")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"data.name=notes has no text: data\.files="):
            load_corpus(text_config, BPE, context=16)
    assert not list(tmp_path.glob("cache/notes*"))


def test_a_split_shorter_than_a_context_is_refused_with_its_length(text_config):
    corpus = load_corpus(text_config, BPE, context=16)
    shorter, longer = len(corpus.val.tokens), len(corpus.train.tokens)
    with pytest.raises(
        ValueError, match=rf"validation split has {shorter} tokens .* model\.context={shorter} needs at least.*val_fraction=0.2"
    ):
        load_corpus(text_config, BPE, context=shorter)
    with pytest.raises(ValueError, match=rf"training split has {longer} tokens .* model\.context={longer} needs at least"):
        load_corpus(text_config, BPE, context=longer)
    Batches(load_corpus(text_config, BPE, context=shorter - 1).val.tokens, context=shorter - 1, batch_size=1, seed=0)


def test_a_missing_tokenizer_is_known_before_documents_are_read(text_config, monkeypatch):
    monkeypatch.setattr(data.corpora, "split_documents", lambda *args: pytest.fail("read the documents first"))
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.pretrained=owner/name"):
        load_corpus(text_config, TokenizerConfig(kind=TokenizerKind.pretrained, pretrained="owner/name"), context=16)


@pytest.mark.parametrize(
    ("settings", "tokenizer", "message"),
    [
        ({"max_documents": 0}, BPE, "data.max_documents=0: must be at least 1"),
        ({"processes": 0}, BPE, "data.processes=0: must be at least 1"),
        ({"val_fraction": 0.0}, BPE, r"data.val_fraction=0.0: must be in \(0, 1\)"),
        ({"val_fraction": 1.0}, BPE, r"data.val_fraction=1.0: must be in \(0, 1\)"),
        ({"files": []}, BPE, "data.source=text needs data.files"),
        ({}, TokenizerConfig(vocab_size=256), "tokenizer.vocab_size=256: .* at least 257"),
        ({}, TokenizerConfig(kind=TokenizerKind.pretrained), "needs tokenizer.pretrained"),
    ],
)
def test_the_rules_hold_without_a_command_line(text_config, settings, tokenizer, message):
    for key, value in settings.items():
        setattr(text_config, key, value)
    with pytest.raises(ValueError, match=message):
        load_corpus(text_config, tokenizer, context=16)


def test_a_char_tokenizer_has_no_use_for_a_vocabulary_size(text_config):
    sizes = {
        load_corpus(text_config, TokenizerConfig(kind=TokenizerKind.char, vocab_size=size), context=16).tokenizer.vocab_size
        for size in (0, 1024)
    }
    assert len(sizes) == 1 and sizes.pop() > 0


def test_a_vocabulary_out_of_range_is_refused_before_files_are_sought(text_config):
    text_config.files = ["missing.txt"]
    with pytest.raises(ValueError, match=r"tokenizer\.vocab_size=100"):
        load_corpus(text_config, TokenizerConfig(vocab_size=100), context=16)
