"""How programs begin and end, and the names of run folders."""

import sys

import pytest

import configs
from configs import ConfigError
from tests.runs import raising
from training import command
from training.interrupt import Stopped
from training.storage import StorageError


@pytest.mark.parametrize(
    ("task", "code", "said"),
    [
        (lambda: command.end(1), 1, ""),
        (raising(ConfigError("seed=x: no")), 2, "error: seed=x: no"),
        (raising(StorageError("report.md can't be written")), 1, "stopped: report.md"),
        (raising(KeyboardInterrupt()), 130, "to go on"),
        (raising(Stopped(143)), 143, "to go on"),
        (raising(command.Failed(1)), 1, ""),
    ],
)
def test_the_exit_code_tells_how_it_ended(task, code, said, capsys):
    assert command.start(task, [], lambda: "stopped; to go on: …") == code
    assert said in capsys.readouterr().err


def test_torchrun_is_refused_by_a_program_of_one_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ablate.py"])
    monkeypatch.setattr(command, "world", command.cache(command.World))
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    assert command.start(raising(AssertionError("worked")), [], str) == 2
    assert "ablate.py is one process on one device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "resume", "folder"),
    [
        (None, "auto", "tinystories_gpt2_torch"),
        ("a/b c", "runs/2026-01-02_03-04-05_mine", "a-b-c"),
        (None, "runs/2026-01-02_03-04-05_resumed_mine/best", "resumed_mine"),
        (None, "runs/2026-01-02_03-04-05_mine/checkpoints/step_00000200", "resumed_mine"),
    ],
)
def test_a_run_is_named_by_what_it_trains(name, resume, folder):
    cfg = configs.from_dict({"data": {"name": "tinystories"}, "norm": {"impl": "torch"}})
    cfg.logging.name, cfg.resume = name, resume
    assert command.run_name(cfg, "gpt2") == folder
