"""Calls made at random; `python -m tests.ops.fuzz` makes more."""

import pytest
import torch

from ops import kernels

from . import fuzz


@pytest.mark.parametrize("by", ["reference", "kernels"])
def test_a_call_works_or_is_refused_by_the_name_of_an_argument(by, device, monkeypatch):
    calls = 150 if kernels.INTERPRET else 10_000
    if by == "reference":
        monkeypatch.setattr(kernels, "INTERPRET", False)
        device, calls = torch.device("cpu"), 600
    found = [fuzz.wrong(0, number, device) for number in range(calls)]
    assert not any(found), "\n".join(list(filter(None, found))[:5])
