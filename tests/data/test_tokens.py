"""Work in threads, and a signal in the middle of it."""

import os
import signal
import time
from threading import Event

import pytest

import data.tokenizer
from configs.schema import DataConfig, TokenizerConfig
from data import load_corpus
from data.tokens import in_threads
from tests.forks import processes
from training.interrupt import exit_on_signals


def test_results_are_in_order_and_only_a_few_items_are_taken_ahead():
    taken = []
    items = (taken.append(i) or i for i in range(50))
    for expected, found in enumerate(in_threads(lambda item, _: time.sleep(0.001 * (item % 3)) or item, items, 4)):
        assert found == expected and len(taken) <= found + 6
    with pytest.raises(ZeroDivisionError):
        list(in_threads(lambda item, _: 1 // item, [1, 0, 1], 2))


def test_work_is_told_to_stop_and_nobody_waits_for_it_for_long():
    told = Event()
    with pytest.raises(KeyError):
        for _ in in_threads(lambda item, stopping: item and (stopping.wait(9), told.set()), [0, 1, 1], 1):
            raise KeyError
    assert told.is_set()


def _learn_tokens(folder):
    exit_on_signals()
    (folder / "x.txt").write_text("".join(f"{i * i % 1000003:x}{'' if i % 9 else ' '}" for i in range(500_000)))
    trainer = data.tokenizer.trainers.BpeTrainer
    data.tokenizer.trainers.BpeTrainer = lambda **more: (folder / "begun").touch() or trainer(**more)
    text = DataConfig(source="text", files=[str(folder / "x.txt")], cache_dir=str(folder / "cache"))
    load_corpus(text, TokenizerConfig(vocab_size=60_000), context=8)


def test_a_signal_stops_the_training_of_a_tokenizer_and_leaves_nothing(tmp_path):
    process = processes.Process(target=_learn_tokens, args=(tmp_path,), daemon=True)
    process.start()
    while not (tmp_path / "begun").exists() and process.is_alive():
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 143
    assert [folder.name for folder in tmp_path.glob("cache/*/")] == [".sums"], "no corpus, torn or whole"
