"""Calls made at random; `python -m tests.ops.fuzz` makes more."""

import random

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from ops import Norm, backend

from . import fuzz
from .cases import BF16, FP16, FP32, Case


@pytest.mark.parametrize("by", ["reference", "kernels"])
def test_wrong_calls_are_refused_by_name_and_right_ones_work(by, device, monkeypatch):
    if by == "reference":
        monkeypatch.setattr(backend, "INTERPRET", False)
        device = torch.device("cpu")
    outcomes, wrong = [], []
    for number in range(2000 if by == "reference" else 250 if backend.INTERPRET else 10_000):
        call = fuzz.random_call(random.Random(f"{by}:{number}"), device)
        outcome, problem = fuzz.tried(call)
        outcomes.append(outcome)
        if outcome is fuzz.Outcome.wrong:
            wrong.append(f"{call}\n    {problem}")
    assert not wrong, "\n".join(wrong[:5])
    assert all(0.2 < outcomes.count(outcome) / len(outcomes) < 0.8 for outcome in (fuzz.Outcome.worked, fuzz.Outcome.refused))


def test_calls_that_go_wrong_are_counted_shown_and_fail_the_fuzz(monkeypatch, capsys):
    def broken(x):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backend, "INTERPRET", False)
    for functions, code in ((fuzz.FUNCTIONS, 0), ((broken,), 1)):
        monkeypatch.setattr(fuzz, "FUNCTIONS", functions)
        with pytest.raises(SystemExit) as end:
            fuzz.main(["--calls", "8", "--seed", "7"])
        assert end.value.code == code
    out = capsys.readouterr().out
    assert "8 calls: " in out and "#1 broken(" in out and "RuntimeError: CUDA error: an illegal memory access" in out
    assert "6 wrong" in out.splitlines()[-1]


DTYPES = st.sampled_from([FP32, BF16, FP16])
CASES = st.builds(
    Case,
    norm=st.sampled_from(Norm),
    x=DTYPES,
    residual=st.none() | DTYPES,
    x1=st.none() | DTYPES,
    second=st.booleans(),
    weight=st.none() | DTYPES,
    bias=st.booleans(),
    rowscale=st.sampled_from(["none", "fixed", "learned"]),
    dropout_p=st.sampled_from([0.0, 0.1, 0.5]),
    zero_centered=st.booleans(),
    prenorm=st.booleans(),
    residual_in_fp32=st.booleans(),
    out=st.none() | DTYPES,
    m=st.integers(1, 9),
    n=st.integers(4, 150),
)
LAYOUTS = st.fixed_dictionaries({name: st.sampled_from(fuzz.LAYOUTS) for name in ("x", "residual", "x1")})


@seed(20_240_229)
@settings(max_examples=40 if backend.INTERPRET else 16, deadline=None, database=None)
@given(case=CASES, layouts=LAYOUTS)
def test_any_shape_dtype_layout_and_option_is_as_accurate_as_pytorch(case, layouts):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert fuzz.inaccuracy(case, device, layouts) is None
