import pytest
import torch

from benchmarks.cases import CASES, Setting, WrongResult, check_backward, check_forward, make_inputs
from benchmarks.providers import PROVIDERS

CPU = torch.device("cpu")
STREAMS = [torch.bfloat16, torch.float32]


def run(case, provider, setting, change=lambda outputs: outputs):
    (inputs,) = make_inputs(case, setting, 70, 256, 1, CPU)
    outputs = change(PROVIDERS[provider].make(case, setting)(inputs))
    return inputs, outputs


@pytest.mark.parametrize("provider", ["ours", "ours-seeded", "torch"])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("weights", STREAMS)
@pytest.mark.parametrize("name", CASES)
def test_right_results_pass(name, weights, stream, provider):
    case, setting = CASES[name], Setting(residual_dtype=stream, weight_dtype=weights)
    if provider == "ours-seeded" and not case.dropout:
        assert PROVIDERS[provider].make(case, setting) is None
        return
    inputs, outputs = run(case, provider, setting)
    factor = check_forward(case, setting, inputs, outputs)
    gradients = torch.autograd.grad(outputs, inputs.leaves, inputs.upstream)
    check_backward(case, setting, inputs, outputs, gradients, factor)


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
    inputs, outputs = run(CASES["add_ln"], "torch", setting, change)
    with pytest.raises(WrongResult, match=message):
        check_forward(CASES["add_ln"], setting, inputs, outputs)


def test_dropout_at_another_rate_is_refused():
    inputs, outputs = run(CASES["dropout_add_ln"], "torch", Setting(residual_dtype=torch.float32, dropout_p=0.3))
    setting = Setting(residual_dtype=torch.float32, dropout_p=0.1)
    with pytest.raises(WrongResult, match="was dropped"):
        check_forward(CASES["dropout_add_ln"], setting, inputs, outputs)


def test_wrong_or_missing_gradients_are_refused():
    case, setting = CASES["dropout_add_rms"], Setting(residual_dtype=torch.bfloat16)
    inputs, outputs = run(case, "torch", setting)
    factor = check_forward(case, setting, inputs, outputs)
    dx, *others = torch.autograd.grad(outputs, inputs.leaves, inputs.upstream)
    with pytest.raises(WrongResult, match="gradient of x is off"):
        check_backward(case, setting, inputs, outputs, (dx.roll(1, 0), *others), factor)
    with pytest.raises(WrongResult, match="missing"):
        check_backward(case, setting, inputs, outputs, (dx, *others[:-1], None), factor)
