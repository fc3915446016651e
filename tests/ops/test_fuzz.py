"""Calls made at random; `python -m tests.ops.fuzz` makes more."""

import pytest
import torch

from ops import kernels

from . import fuzz


@pytest.mark.parametrize("by", ["reference", "kernels"])
def test_calls_at_random_are_accurate(by, device, monkeypatch):
    calls = 30 if kernels.INTERPRET else 10  # of which a GPU compiles each
    if by == "reference":
        monkeypatch.setattr(kernels, "INTERPRET", False)
        device, calls = torch.device("cpu"), 100
    wrong = [problem for number in range(calls) if (problem := fuzz.attempt(0, number, device))]
    assert not wrong, "\n".join(wrong[:5])


def test_a_call_that_goes_wrong_is_shown_and_fails_the_fuzz(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "INTERPRET", False)
    for found, code in (("y: error 1", 1), (None, 0)):
        monkeypatch.setattr(fuzz, "inaccuracy", lambda *_, found=found: found)
        with pytest.raises(SystemExit) as end:
            fuzz.main(["--only", "8", "--seed", "7"])
        assert end.value.code == code and ("#8 Case(" in capsys.readouterr().out) == bool(code)
