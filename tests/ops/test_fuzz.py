"""Calls made at random; `python -m tests.ops.fuzz` makes more."""

import random
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from benchmarks import results
from ops import backend, layer_norm_linear_fn

from . import fuzz
from .cases import BF16, FP16, FP32, Case


def test_wrong_calls_are_refused_by_name_and_right_ones_work_on_the_reference(monkeypatch):
    monkeypatch.setattr(backend, "INTERPRET", False)
    wrong = []
    for number in range(2500):
        call = fuzz.random_call(random.Random(f"reference:{number}"), torch.device("cpu"))
        outcome, problem = fuzz.tried(call)
        if outcome is fuzz.Outcome.wrong:
            wrong.append(f"{call}\n    {problem}")
    assert not wrong, "\n".join(wrong[:5])


def test_wrong_calls_are_refused_by_name_and_right_ones_work_on_the_kernels(device):
    wrong = []
    for number in range(300 if backend.INTERPRET else 10_000):
        call = fuzz.random_call(random.Random(f"kernels:{number}"), device)
        outcome, problem = fuzz.tried(call)
        if outcome is fuzz.Outcome.wrong:
            wrong.append(f"{call}\n    {problem}")
    assert not wrong, "\n".join(wrong[:5])


def test_random_calls_are_of_both_kinds_and_of_every_function(monkeypatch):
    monkeypatch.setattr(backend, "INTERPRET", False)
    calls = [fuzz.random_call(random.Random(number), torch.device("cpu")) for number in range(400)]
    assert {call.function for call in calls} == set(fuzz.FUNCTIONS)
    refused = 0
    for call in calls:
        try:
            call.function(**call.arguments)
        except (ValueError, TypeError):
            refused += 1
    assert 100 < refused < 300


def test_a_fuzz_is_recorded_with_what_makes_it_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backend, "INTERPRET", False)
    files = []
    for name in ("once", "again"):
        with pytest.raises(SystemExit) as end:
            fuzz.main(["--seed", "7", "--calls", "60", "--output", str(tmp_path / name)])
        assert end.value.code == 0
        files.append(results.load(tmp_path / name))
    assert files[0]["records"] == files[1]["records"]
    assert files[0]["command"] == "python -m tests.ops.fuzz --seed 7 --calls 60"
    assert files[0]["environment"]["versions"]["torch"] == torch.__version__
    assert sum(record[outcome] for record in files[0]["records"] for outcome in fuzz.Outcome) == 60
    assert next(r for r in files[0]["records"] if r["subject"] == "right calls, beside fp64")["worked"] == 15
    assert "60 calls: " in capsys.readouterr().out


def test_what_it_would_not_record_is_refused_before_the_first_call(monkeypatch, capsys):
    git = {"revision": "0123456789", "dirty": False}
    monkeypatch.setattr(results, "facts_of", lambda device: {"command": "", "git": git, "versions": {}})
    monkeypatch.setattr(fuzz, "attempt", lambda *_: pytest.fail("called"))
    with pytest.raises(SystemExit):
        fuzz.main(["--calls", "1", "--revision", "abc"])
    assert "--revision abc" in capsys.readouterr().err


def test_a_call_that_goes_wrong_is_counted_shown_and_fails_the_fuzz(monkeypatch, tmp_path, capsys):
    def broken(x):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fuzz, "FUNCTIONS", (broken,))
    with pytest.raises(SystemExit) as end:
        fuzz.main(["--calls", "4", "--output", str(tmp_path / "record.json")])
    assert end.value.code == 1
    out = capsys.readouterr().out
    assert "#1 broken(" in out and "RuntimeError: CUDA error: an illegal memory access" in out
    assert {r["subject"]: r["wrong"] for r in results.load(tmp_path / "record.json")["records"]}["broken"] == 3


DTYPES = st.sampled_from([FP32, BF16, FP16])
CASES = st.builds(
    Case,
    rms=st.booleans(),
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
LAYOUTS: st.SearchStrategy[dict[str, Callable]] = st.fixed_dictionaries(
    {name: st.sampled_from(fuzz.LAYOUTS) for name in ("x", "residual", "x1")}
)


@seed(20_240_229)
@settings(max_examples=40 if backend.INTERPRET else 16, deadline=None, database=None)
@given(case=CASES, layouts=LAYOUTS)
def test_any_shape_dtype_layout_and_option_is_as_accurate_as_pytorch(case, layouts):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert fuzz.inaccuracy(case, device, layouts) is None


def test_norm_and_linear_of_a_single_row_without_leading_dimensions(device):
    """The fuzz found that backward took a row of shape (N,) for a matrix."""
    x, matrix, bias = (torch.randn(shape, device=device, requires_grad=True) for shape in ((8,), (3, 8), (3,)))
    layer_norm_linear_fn(x, None, None, matrix, bias).sum().backward()
    expected = torch.nn.functional.layer_norm(x.detach(), (8,), eps=1e-6).expand(3, 8)
    torch.testing.assert_close(matrix.grad, expected)
    torch.testing.assert_close(bias.grad, torch.ones_like(bias))


@pytest.mark.parametrize("flag", [torch.zeros(2), "yes", [True]])
def test_a_flag_that_is_no_bool_is_refused(flag):
    x = torch.randn(2, 8)
    for name in ("prenorm", "residual_in_fp32", "zero_centered_weight", "is_rms_norm", "return_dropout_mask"):
        with pytest.raises(TypeError, match=re.escape(f"{name} must be True or False, got {type(flag).__name__}")):
            fuzz.ops.layer_norm_fn(x, None, None, **{name: flag})


@pytest.mark.parametrize("by", ["kernels", "reference"])
def test_a_sparse_tensor_is_refused_also_where_a_dense_one_of_its_shape_was_taken_before(by, device, monkeypatch):
    if by == "reference":
        monkeypatch.setattr(backend, "INTERPRET", False)
        device = torch.device("cpu")
    x = torch.eye(8, device=device)
    for _ in range(2):
        fuzz.ops.layer_norm_fn(x, None, None)
        with pytest.raises(ValueError, match="x must be a dense tensor"):
            fuzz.ops.layer_norm_fn(x.to_sparse(), None, None)
