"""How programs end, what their own help has, and where torchrun is refused."""

import pytest

import ablate
import compare
from configs import Config, ConfigError
from measure.files import StorageError
from tests.runs import raising
from training.command import start
from training.distributed import ALONE
from training.interrupt import Stopped
from training.metrics import NonFiniteError


@pytest.mark.parametrize(
    ("task", "code", "said"),
    [
        (lambda: None, 0, ""),
        (raising(ConfigError("seed=x: no")), 2, "error: seed=x: no"),
        (raising(StorageError("report.md can't be written")), 1, "stopped: report.md"),
        (raising(NonFiniteError("the loss is NaN", 4)), 1, "stopped: the loss is NaN"),
        (raising(KeyboardInterrupt()), 130, ""),
        (raising(Stopped(143)), 143, ""),
    ],
)
def test_the_exit_code_tells_how_it_ended(task, code, said, capsys):
    assert start(task, Config, str, []) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("program", [ablate, compare])
def test_help_does_no_work_and_torchrun_is_refused(program, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    name = program.__name__
    assert program.main(["--help", "seed=1"]) == 0
    said = capsys.readouterr().out
    assert f"  {name}." in said and said.startswith(program.__doc__) and "  optim.lr" not in said
    monkeypatch.setattr("training.command.join", lambda: ALONE)
    for variable in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK"):
        monkeypatch.setenv(variable, "0")
    assert program.main([]) == 2
    assert f"{name}.py is one process on one device" in capsys.readouterr().err and not list(tmp_path.iterdir())
