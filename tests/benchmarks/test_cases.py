"""The norm cases: their tensors, the bytes that they must move, and the check that a contender computed them."""

import pytest
import torch

from benchmarks.cases import (
    BACKWARD,
    CASES,
    FORWARD,
    MAX_ELEMENTS,
    Setting,
    WrongResult,
    capped_rows,
    check_backward,
    check_forward,
    make_inputs,
    minimum_bytes,
)
from benchmarks.providers import PROVIDERS

CPU, STREAMS = torch.device("cpu"), [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    "case, direction, residual_bytes, per_element",
    [
        ("ln", FORWARD, None, 4),
        ("add_rms", FORWARD, 2, 8),
        ("dropout_add_ln", FORWARD, 4, 12),  # anchors: 25 sites × (12 + 16 bytes)
        ("rms", BACKWARD, None, 3 * 2),
        ("add_rms", BACKWARD, 2, 4 * 2),
        ("dropout_add_ln", BACKWARD, 2, 5 * 2),
        ("add_rms", BACKWARD, 4, 16),  # dx is not the gradient of the residual where the dtypes differ
    ],
)
def test_minimum_bytes_are_those_of_the_anchors(case, direction, residual_bytes, per_element):
    assert minimum_bytes(CASES[case], direction, 32768, 768, 2, residual_bytes) == 32768 * 768 * per_element


def test_rows_are_fewer_only_where_elements_would_be_too_many():
    assert (capped_rows(32768, 16384), capped_rows(32768, 65536), capped_rows(4096, 65536)) == (
        32768,
        MAX_ELEMENTS // 65536,
        4096,
    )


def run(name, provider, setting):
    (inputs,) = make_inputs(CASES[name], setting, 70, 256, 1, CPU)
    return inputs, PROVIDERS[provider].make(CASES[name], setting)(inputs)


@pytest.mark.parametrize("provider", ["ours", "ours-seeded", "torch"])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("weights", STREAMS)
@pytest.mark.parametrize("name", CASES)
def test_right_results_pass(name, weights, stream, provider):
    case, setting = CASES[name], Setting(residual_dtype=stream, weight_dtype=weights)
    if provider == "ours-seeded" and not case.dropout:
        assert PROVIDERS[provider].make(case, setting) is None
        return
    inputs, outputs = run(name, provider, setting)
    factor = check_forward(case, setting, inputs, outputs)
    check_backward(case, setting, inputs, outputs, torch.autograd.grad(outputs, inputs.leaves, inputs.upstream), factor)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda o: (o[0] * 1.05, o[1]), "y is off"),
        (lambda o: (o[0].float(), o[1]), "y is torch.float32"),
        (lambda o: (o[0], o[1].bfloat16()), "residual stream is torch.bfloat16"),
        (lambda o: (o[0],), "1 outputs, expected 2"),
        (lambda o: (o[0], o[1] * 1.05), "residual stream is off"),
    ],
)
def test_wrong_forward_is_refused(change, message):
    setting = Setting(residual_dtype=torch.float32)
    inputs, outputs = run("add_ln", "torch", setting)
    with pytest.raises(WrongResult, match=message):
        check_forward(CASES["add_ln"], setting, inputs, change(outputs))


def test_dropout_at_another_rate_and_wrong_or_missing_gradients_are_refused():
    case, setting = CASES["dropout_add_rms"], Setting(residual_dtype=torch.float32)
    inputs, outputs = run(case.name, "torch", Setting(residual_dtype=torch.float32, dropout_p=0.3))
    with pytest.raises(WrongResult, match="was dropped"):
        check_forward(case, setting, inputs, outputs)
    inputs, outputs = run(case.name, "torch", setting)
    factor = check_forward(case, setting, inputs, outputs)
    dx, *others = torch.autograd.grad(outputs, inputs.leaves, inputs.upstream)
    for gradients, message in (((dx.roll(1, 0), *others), "gradient of x is off"), ((dx, *others[:-1], None), "missing")):
        with pytest.raises(WrongResult, match=message):
            check_backward(case, setting, inputs, outputs, gradients, factor)
