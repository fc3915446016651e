"""How ablate.py and compare.py end."""

import pytest

from configs import ConfigError
from measure.files import StorageError
from tests.runs import raising
from training.command import own_keys, program
from training.distributed import ALONE
from training.interrupt import Stopped


@pytest.mark.parametrize(
    ("work", "code", "said"),
    [
        (lambda overrides: len(overrides), 1, ""),
        (raising(ConfigError("seed=x: no")), 2, "error: seed=x: no"),
        (raising(StorageError("report.md can't be written")), 1, "stopped: report.md"),
        (raising(KeyboardInterrupt()), 130, "to go on"),
        (raising(Stopped(143)), 143, "to go on"),
    ],
)
def test_the_exit_code_tells_how_it_ended(work, code, said, capsys):
    assert program("ablate", work, str, lambda: "stopped; to go on: …", ["seed=1,2"]) == code
    assert said in capsys.readouterr().err


def test_help_does_no_work_and_torchrun_is_refused(monkeypatch, capsys):
    never = raising(AssertionError("worked"))
    assert program("ablate", never, lambda: f"$ {own_keys('ablate')}", never, ["--help", "seed=1"]) == 0
    assert "ablate.cycles=12" in (said := capsys.readouterr().out) and said[:2] == "$ " and "train." not in said
    monkeypatch.setattr("training.command.join", lambda: ALONE)
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    assert program("ablate", never, str, never, []) == 2
    assert "ablate.py is one process on one device" in capsys.readouterr().err
