import json
import re
from dataclasses import replace
from unittest.mock import Mock

import datasets
import huggingface_hub
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import data.corpora
import data.pieces
from configs.schema import DataConfig, Source, TokenizerConfig, TokenizerKind
from data import Corpus, load_corpus
from tests.data.texts import text_of

BPE = TokenizerConfig(vocab_size=300)
CHAR = TokenizerConfig(kind=TokenizerKind.char)
TEXTS = [text_of(i, 60) for i in range(40)]


@pytest.fixture
def text_config(notes, tmp_path) -> DataConfig:
    files = [f"{notes}/*.txt"]
    return DataConfig(name="notes", source=Source.text, files=files, val_fraction=0.2, cache_dir=f"{tmp_path}/cache")


@pytest.fixture
def hub_config(tmp_path):
    """A data set in a local folder, written in one of the formats of the Hub."""

    def write(format: str, columns: dict[str, list], validation: dict[str, list] | None = None, **settings) -> DataConfig:
        folder = tmp_path / str(len([*tmp_path.iterdir()])) / "dataset"
        folder.parent.mkdir()
        given = {"train": columns} | ({"validation": validation} if validation else {})
        splits = datasets.DatasetDict({name: datasets.Dataset.from_dict(of) for name, of in given.items()})
        if format == "save_to_disk":
            (splits if validation else splits["train"]).save_to_disk(folder)
        else:
            for name, split in splits.items():
                getattr(split, f"to_{format}")(folder / f"{name}.{format}")
        config = DataConfig(name="hub", source=Source.hub, path=str(folder), val_fraction=0.2, cache_dir=f"{tmp_path}/cache")
        return replace(config, **settings)

    return write


def load(config: DataConfig, tokenizer: TokenizerConfig = CHAR, context: int = 16) -> Corpus:
    return load_corpus(config, tokenizer, context=context)


def decoded(corpus: Corpus) -> list[list[str]]:
    """The documents of both splits, as the tokens have them."""
    splits = []
    for split in (corpus.train, corpus.val):
        ends = np.flatnonzero(split.tokens == corpus.tokenizer.end_of_text)
        documents = np.split(np.asarray(split.tokens), ends + 1)
        splits.append([corpus.tokenizer.decode(document.tolist()) for document in documents if len(document)])
    return splits


def test_tokens_decode_to_the_documents_and_are_mapped(text_config, notes):
    (notes / "long.txt").write_text(text_of(99, 9000))  # tokenised in pieces
    corpus = load(text_config, BPE)
    train, val = decoded(corpus)
    assert sorted(train + val) == sorted(path.read_text() for path in notes.iterdir())
    assert (corpus.train.documents, corpus.val.documents) == (len(train), len(val))
    assert corpus.tokenizer.vocab_size <= 300 and corpus.name == "notes"
    for split in (corpus.train, corpus.val):
        assert isinstance(split.tokens, np.memmap) and split.tokens.dtype == np.uint16 and not split.tokens.flags.writeable
        assert split.bytes == len(corpus.tokenizer.decode(split.tokens.tolist()).encode())
        assert split.bytes_per_token == split.bytes / len(split.tokens)


@pytest.mark.parametrize("most", [2**25, 3000])
def test_bpe_learns_from_the_training_documents_alone_and_from_a_bounded_part_of_all_of_them(
    text_config, most, monkeypatch, tmp_path
):
    seen, train = [], data.corpora.train_bpe
    monkeypatch.setattr(data.corpora, "BPE_BYTES", most)
    monkeypatch.setattr(data.corpora, "BPE_BYTES_OF_TOKEN", 1)
    monkeypatch.setattr(data.pieces.in_pieces, "__defaults__", (None, 50, 100))
    monkeypatch.setattr(data.corpora, "train_bpe", lambda texts, size: train(seen.extend(texts) or seen, size))
    text = "".join(decoded(load(text_config, BPE))[0])
    learned = "".join(seen)
    [facts] = tmp_path.glob("cache/*/corpus.json")
    assert ("learned" in json.loads(facts.read_text())["settings"]) == (most == 3000), "part of the identity where it matters"
    if most > 3000:
        assert learned == text
    else:
        assert len(text) > 5000 and len(learned.encode()) == pytest.approx(most, rel=0.25)
        places = [text.index(piece) / len(text) for piece in seen]
        assert np.histogram(places, 5, (0, 1))[0].min() > 0.1 * len(seen), "from the beginning to the end"


def test_a_tokenizer_that_adds_a_prefix_to_each_text_gets_whole_documents(text_config, notes, tmp_path, monkeypatch):
    texts = [text_of(i, 500) for i in range(2)]
    for i, text in enumerate(texts):
        (notes / f"long{i}.txt").write_text(text)
    text_config.files = [f"{notes}/long*.txt"]
    monkeypatch.setattr(data.pieces.in_pieces, "__defaults__", (None, 100, 200))
    metaspace = tokenizers.Tokenizer(models.BPE())
    metaspace.pre_tokenizer, metaspace.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], show_progress=False)
    metaspace.train_from_iterator(texts[:1], trainer)
    metaspace.save(str(tmp_path / "metaspace.json"))
    corpus = load(text_config, TokenizerConfig(TokenizerKind.pretrained, pretrained=str(tmp_path / "metaspace.json")))
    documents = [[*metaspace.encode(text).ids, metaspace.token_to_id("</s>")] for text in texts]
    assert sorted([corpus.train.tokens.tolist(), corpus.val.tokens.tolist()]) == sorted(documents)


def test_the_second_load_makes_nothing_even_if_the_files_have_moved_and_notices_damage(
    text_config, notes, monkeypatch, tmp_path
):
    first = load(text_config)
    [folder] = tmp_path.glob("cache/*/")
    text_config.files = [f"{notes.rename(notes.parent / 'moved')}/*.txt"]
    monkeypatch.setattr(data.corpora, "_build", lambda *_: pytest.fail("made again what was in the cache"))
    second = load(text_config)
    assert (first.train.tokens == second.train.tokens).all()
    assert (first.identity, first.train.documents) == (second.identity, second.train.documents)
    for name in ("train.bin", "corpus.json", "SHA256SUMS"):
        content = (folder / name).read_bytes()
        for damaged in (content[:20], b"", None):
            (folder / name).unlink()
            if damaged is not None:
                (folder / name).write_bytes(damaged)
            with pytest.raises(ValueError, match=r"the cached corpus can't be read: .*Delete .*; the next start remakes"):
                load(text_config)
        (folder / name).write_bytes(content)


def test_settings_that_change_tokens_have_caches_of_their_own(text_config, tmp_path):
    no_size = TokenizerConfig(kind=TokenizerKind.char, vocab_size=0)  # characters have no use for it
    for tokenizer in (BPE, CHAR, no_size, TokenizerConfig(vocab_size=290)):
        load(text_config, tokenizer)
    load(replace(text_config, val_fraction=0.4))
    load(text_config, context=32)  # changes nothing about the tokens
    facts = [json.loads(path.read_text()) for path in tmp_path.glob("cache/*/corpus.json")]
    assert sorted(fact["settings"]["tokenizer"] for fact in facts) == ["bpe", "bpe", "char", "char"]


@pytest.mark.parametrize(("format", "streaming"), [("parquet", False), ("json", True), ("save_to_disk", False)])
def test_a_split_of_its_own_is_the_validation_split_or_else_some_documents_are_held_out(hub_config, format, streaming):
    config = hub_config(format, {"text": TEXTS[:30]}, {"text": TEXTS[30:]}, val_split="validation", streaming=streaming)
    assert decoded(load(config, BPE)) == [TEXTS[:30], TEXTS[30:]]
    columns = {"id": list(range(40)), "content": TEXTS}
    config = hub_config(format, columns, text_field="content", streaming=streaming)
    train, val = decoded(load(config, BPE))
    assert sorted(train + val) == sorted(TEXTS)
    assert 2 <= len(val) <= 16  # 20 % of 40


def test_what_is_asked_of_the_hub_is_the_revision_and_its_lines_become_articles(text_config, monkeypatch):
    lines = [line for i in range(6) for line in ("", f" = Title {i} = \n", "", " text , " * 20, " = = Part = = \n")]
    asked, given = {}, datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": lines}))
    monkeypatch.setattr(datasets, "load_dataset", lambda path, subset, **how: asked.update(how, path=path) or given)
    settings = {"path": "owner/name", "revision": "refs/x", "document_start": "^ = [^=].* = $"}
    train, val = decoded(load(replace(text_config, source=Source.hub, **settings), BPE))
    assert (asked["path"], asked["revision"]) == ("owner/name", "refs/x")
    # blank lines before the first title belong to the first article
    assert len(train + val) == 6
    assert all(re.match(r"\n? = Title \d = \n\n( text , )+\n = = Part = = \n\n?$", article) for article in train + val)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text_field": "body"}, r"dataset, data.subset=null, data.text_field=body can't be read: Column name \['body'\]"),
        ({"text_field": "body", "streaming": True}, r"dataset, .*, data.text_field=body can't be read: .*'?body"),
        (
            {"text_field": "id"},
            "dataset, .* can't be read: row 1 of train: the column data.text_field=id has no text, but int 0",
        ),
        ({"val_split": "valid"}, "data.val_split=valid is not a split of .*dataset, which has: train"),
        (
            {"subset": "french"},
            "data.subset=french, .* can't be read: BuilderConfig 'french' not found. .*use data.subset=null",
        ),
        ({"document_start": "("}, r"data.document_start=\( is not a regular expression"),
        ({"path": "owner/name"}, "data.path=owner/name.* can't be read: .* Without a network use"),
    ],
)
def test_what_the_data_set_lacks_is_named(hub_config, settings, message):
    config = hub_config("json", {"id": list(range(40)), "text": TEXTS}, **settings)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        load(config)


def test_without_a_network_the_hub_is_not_tried_for_half_a_minute(text_config, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("socket.create_connection", Mock(side_effect=OSError))
    monkeypatch.setattr("data.hub.getproxies", dict)
    with pytest.raises(ValueError, match=r"Couldn't reach 'owner/name'.*OfflineMode.* Without a network use"):
        load(replace(text_config, source=Source.hub, path="owner/name"))
    assert huggingface_hub.constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
    monkeypatch.delenv("HF_HUB_OFFLINE")  # which it has set for what is imported later


def test_a_split_shorter_than_a_context_is_refused_with_its_length(text_config, notes):
    corpus = load(text_config)
    shorter, longer = len(corpus.val.tokens), len(corpus.train.tokens)
    load(text_config, context=shorter - 1)
    for name, tokens, context in (("validation", shorter, shorter), ("training", longer, longer)):
        with pytest.raises(ValueError, match=rf"{name} split has {tokens} tokens .* model\.context={context} needs at least"):
            load(text_config, context=context)
    for path in notes.iterdir():
        path.write_text("")
    with pytest.raises(ValueError, match=r"data\.name=notes: the training split has 0 tokens"):
        load(text_config, BPE)
