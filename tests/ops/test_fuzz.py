"""Calls made at random; `python -m tests.ops.fuzz` makes more."""

import pytest
import torch

from ops import kernels

from . import fuzz


@pytest.mark.parametrize("by", ["reference", "kernels"])
def test_wrong_calls_are_refused_by_name_and_right_ones_are_accurate(by, device, monkeypatch):
    calls = 250 if kernels.INTERPRET else 10_000
    if by == "reference":
        monkeypatch.setattr(kernels, "INTERPRET", False)
        device, calls = torch.device("cpu"), 1000
    found = [fuzz.attempt(0, number, device) for number in range(calls)]
    outcomes, wrong = [outcome for outcome, _ in found], [what for outcome, what in found if outcome is fuzz.Outcome.wrong]
    assert not wrong, "\n".join(wrong[:5])
    assert all(0.2 < outcomes.count(outcome) / len(outcomes) < 0.8 for outcome in (fuzz.Outcome.worked, fuzz.Outcome.refused))


def test_calls_that_go_wrong_are_counted_shown_and_fail_the_fuzz(monkeypatch, capsys):
    def broken(x):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "INTERPRET", False)
    for functions, code in ((fuzz.FUNCTIONS, 0), ((broken,), 1)):
        monkeypatch.setattr(fuzz, "FUNCTIONS", functions)
        with pytest.raises(SystemExit) as end:
            fuzz.main(["--calls", "8", "--seed", "7"])
        assert end.value.code == code
    out = capsys.readouterr().out
    assert "#1 broken(" in out and "RuntimeError: CUDA error: an illegal memory access" in out
    assert "8 calls: " in out and "6 wrong" in out
