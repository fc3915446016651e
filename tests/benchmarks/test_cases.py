"""The norm cases: the bytes that they must move, who computes them, and the check that they did."""

from unittest.mock import Mock

import pytest
import torch

from benchmarks import bandwidth, cases, norms, providers
from benchmarks.bandwidth import WrongResult
from benchmarks.cases import BACKWARD, CASES, FORWARD, SITES, Shape, make_inputs
from benchmarks.providers import PROVIDERS

STREAMS = ("bf16", "fp32")


def shape_of(name, residual="fp32", weights="bf16", rows=70, width=256):
    case = (CASES | SITES)[name]
    return Shape(case, residual if case.add else None, weights, rows, width)


def check(shape, function):
    (inputs,) = make_inputs(shape, 1, torch.device("cpu"))
    task = norms.task(shape)
    bandwidth.check(task.reference, task.checked, inputs, function, backward=True)


@pytest.mark.parametrize(
    "case, direction, stream, per_element",
    [
        ("ln", FORWARD, None, 4),
        ("add_rms", FORWARD, "bf16", 8),
        ("dropout_add_ln", FORWARD, "fp32", 12),
        ("dropout_add_ln", BACKWARD, "bf16", 5 * 2),
        ("norm_add_norm", BACKWARD, "fp32", 18),
        ("ln", BACKWARD, None, 6),
        ("norm_add", FORWARD, "bf16", 6),  # y is r
        ("norm_add", BACKWARD, "bf16", 6),
        ("add_rms", BACKWARD, "fp32", 16),  # dx is not the gradient of the residual where the dtypes differ
    ],
)
def test_minimum_bytes_are_those_of_a_count_by_hand(case, direction, stream, per_element):
    assert cases.minimum_bytes(shape_of(case, stream, rows=32768, width=768), direction) == 32768 * 768 * per_element


@pytest.mark.parametrize("provider", ["ours", "torch"])
@pytest.mark.parametrize("case", CASES | SITES)
def test_right_results_pass(case, provider):
    for stream, weights in zip(STREAMS, reversed(STREAMS), strict=True):
        shape = shape_of(case, stream, weights)
        check(shape, PROVIDERS[provider](shape))


def backward_of(function, change):
    """The function with another gradient of x."""

    def changed(x, *others):
        (same := x.view_as(x)).register_hook(change)
        return function(same, *others)

    return changed


@pytest.mark.parametrize(
    "case, change, message",
    [
        ("add_ln", lambda f: lambda *args: (f(*args)[0] * 1.05, f(*args)[1]), "output 0 is off"),
        ("add_ln", lambda f: lambda *args: (f(*args)[0].float(), f(*args)[1]), "torch.float32.*, expected"),
        ("dropout_add_ln", lambda f: lambda x, r, *of: f(x, 0 * r, *of), "was dropped"),
        ("dropout_add_rms", lambda f: lambda *args: PROVIDERS["torch"](shape_of("add_rms"))(*args), "0.000 of x was dropped"),
        ("dropout_norm_add", lambda f: backward_of(f, lambda g: g.roll(1, 0)), "gradient 0 is off"),
        ("add_rms", lambda f: lambda x, r, w, *of: f(x, r, w.detach(), *of), "gradient 2, .* is missing"),
    ],
)
def test_wrong_results_are_refused(case, change, message):
    shape = shape_of(case)
    with pytest.raises(WrongResult, match=message):
        check(shape, change(PROVIDERS["torch"](shape)))


def test_libraries_are_asked_only_for_what_they_offer(monkeypatch):
    monkeypatch.setattr(providers, "import_module", Mock())
    for provider, stream, offered in (
        ("liger-kernel", "bf16", {"ln", "rms", "add_rms"}),
        ("liger-kernel", "fp32", {"ln", "rms"}),
        ("quack-kernels", "bf16", {"rms", "add_rms"}),
        ("flash-attn", "fp32", set(CASES)),
    ):
        assert {name for name in CASES if PROVIDERS[provider](shape_of(name, stream)) is not None} == offered
    assert PROVIDERS["flash-attn"](shape_of("ln", width=16384)) is None
