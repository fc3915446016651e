"""What the help of programs has, and where torchrun is refused."""

import pytest

import ablate
import compare
from training.distributed import ALONE


@pytest.mark.parametrize("program", [ablate, compare])
def test_help_does_no_work_and_torchrun_is_refused(program, monkeypatch, capsys, here):
    name = program.__name__
    assert program.main(["--help", "seed=1"]) == 0
    said = capsys.readouterr().out
    assert f"  {name}." in said and said.startswith(program.__doc__) and "  optim.lr" not in said
    monkeypatch.setattr("training.command.join", lambda: ALONE)
    for variable in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK"):
        monkeypatch.setenv(variable, "0")
    assert program.main([]) == 2
    assert f"{name}.py is one process on one device" in capsys.readouterr().err and not list(here.iterdir())
