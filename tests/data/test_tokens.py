"""Work in threads, and a signal in the middle of it."""

import os
import signal
import subprocess
import sys
import time
from threading import Event

import pytest

from data.tokens import in_threads
from tests.runs import ROOT

BUILD = """
import sys
from configs.schema import DataConfig, TokenizerConfig
from data import load_corpus
from training.interrupt import exit_on_signals
exit_on_signals()
text = "".join(f"{i * i % 1000003:x}{'' if i % 9 else ' '}" for i in range(1_000_000))
open(sys.argv[1] + "/x.txt", "w").write(text)
import data.tokenizer
train = data.tokenizer.trainers.BpeTrainer
data.tokenizer.trainers.BpeTrainer = lambda **more: print("training", flush=True) or train(**more)
load_corpus(DataConfig(source="text", files=[sys.argv[1] + "/x.txt"], cache_dir=sys.argv[1] + "/cache"),
            TokenizerConfig(vocab_size=60_000), context=8)
"""


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


def test_a_signal_stops_the_training_of_a_tokenizer_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout and process.stdout.readline() == "training\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert [folder.name for folder in tmp_path.glob("cache/*/")] == [".sums"], "no corpus, torn or whole"
