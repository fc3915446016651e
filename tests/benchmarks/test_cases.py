"""The norm cases: their tensors, the bytes that they must move, who computes them, and the check that they did."""

import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from benchmarks import cases, kernels, providers
from benchmarks.bandwidth import contender
from benchmarks.cases import BACKWARD, CASES, FORWARD, SITES, Setting, WrongResult, check_backward, check_forward, make_inputs
from benchmarks.providers import PROVIDERS

CPU, STREAMS = torch.device("cpu"), [torch.bfloat16, torch.float32]
BF16, FP32 = STREAMS
EACH = [(case, direction, stream) for case in CASES for direction in (FORWARD, BACKWARD) for stream in STREAMS]


def one_set(case, setting, rows=70, width=256, device=CPU):
    (inputs,) = make_inputs(case, setting, rows, width, 1, device)
    return inputs


def run(name, provider, setting):
    inputs = one_set((CASES | SITES)[name], setting)
    return inputs, PROVIDERS[provider].make((CASES | SITES)[name], setting)(inputs)


@pytest.mark.parametrize(
    "case, direction, residual_bytes, per_element",
    [
        ("ln", FORWARD, None, 4),
        ("add_rms", FORWARD, 2, 8),
        ("dropout_add_ln", FORWARD, 4, 12),
        ("dropout_add_ln", BACKWARD, 2, 5 * 2),
        ("norm_add_norm", FORWARD, 2, 8),
        ("norm_add_norm", BACKWARD, 2, 12),
        ("norm_add_norm", FORWARD, 4, 12),
        ("norm_add_norm", BACKWARD, 4, 18),
        ("norm_add", FORWARD, 2, 6),  # y is r
        ("norm_add", BACKWARD, 2, 6),
        ("norm_add", FORWARD, 4, 12),
        ("norm_add", BACKWARD, 4, 14),
        ("add_dyt", BACKWARD, 2, 8),
        ("add_dyt", BACKWARD, 4, 16),
        ("add_rms", BACKWARD, 4, 16),  # dx is not the gradient of the residual where the dtypes differ
    ],
)
def test_minimum_bytes_are_those_of_the_anchors(case, direction, residual_bytes, per_element):
    assert cases.minimum_bytes((CASES | SITES)[case], direction, 32768, 768, 2, residual_bytes) == 32768 * 768 * per_element


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name, direction, stream", EACH)
def test_traffic_is_the_fewest_bytes_that_a_norm_must_move_and_every_element(name, direction, stream, device):
    """Of the kernel that norms are held against."""
    case, stream = CASES[name], stream if CASES[name].add else None
    inputs = one_set(case, Setting(residual_dtype=stream), 8, 64, torch.device(device))
    read, written = kernels.tensors_moved(case, direction, inputs)
    least = cases.minimum_bytes(case, direction, 8, 64, residual_bytes=stream and stream.itemsize)
    assert sum(t.nbytes for t in (*read, *written)) == least
    if device == "cuda":
        total, outputs = sum(t.float() for t in read), kernels.move(case, direction, inputs)
        torch.testing.assert_close(outputs, tuple(total.to(t.dtype) for t in written))


def test_what_needs_no_kernel_needs_no_triton():
    """Tables of recorded results are made on any machine."""
    code = "import sys; sys.modules['triton'] = None; import benchmarks.readme, benchmarks.norms, ablate"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("provider", ["ours", "ours-seeded", "torch"])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("case", (CASES | SITES).values(), ids=lambda case: case.name)
def test_right_results_pass(case, stream, provider):
    for weights in STREAMS:
        setting = Setting(residual_dtype=stream, weight_dtype=weights)
        function = PROVIDERS[provider].make(case, setting)
        if provider == "ours-seeded" and not (case.dropout and case.plain):
            assert function is None
            continue
        inputs = one_set(case, setting)
        outputs = function(inputs)
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
    setting = Setting(residual_dtype=FP32)
    inputs, outputs = run("add_ln", "torch", setting)
    with pytest.raises(WrongResult, match=message):
        check_forward(CASES["add_ln"], setting, inputs, change(outputs))


def test_dropout_at_another_rate_and_wrong_or_missing_gradients_are_refused():
    case, setting = CASES["dropout_add_rms"], Setting(residual_dtype=FP32)
    with pytest.raises(WrongResult, match="was dropped"):
        check_forward(case, setting, *run(case.name, "torch", Setting(residual_dtype=FP32, dropout_p=0.3)))
    inputs, outputs = run(case.name, "torch", setting)
    factor = check_forward(case, setting, inputs, outputs)
    dx, *others = torch.autograd.grad(outputs, inputs.leaves, inputs.upstream)
    for gradients, message in (((dx.roll(1, 0), *others), "gradient of x is off"), ((dx, *others[:-1], None), "missing")):
        with pytest.raises(WrongResult, match=message):
            check_backward(case, setting, inputs, outputs, gradients, factor)


def test_a_branch_without_its_norm_and_a_gradient_that_went_around_it_are_refused():
    case, setting = SITES["norm_add_norm"], Setting(residual_dtype=FP32)
    inputs, outputs = run(case.name, "torch", setting)
    with pytest.raises(WrongResult, match="residual stream is off"):
        check_forward(case, setting, inputs, PROVIDERS["torch"].make(CASES["add_rms"], setting)(inputs))
    factor = check_forward(case, setting, inputs, outputs)
    gradients = torch.autograd.grad(outputs, inputs.leaves, inputs.upstream)
    with pytest.raises(WrongResult, match="gradient of x is off"):
        check_backward(case, setting, inputs, outputs, (gradients[1].bfloat16(), *gradients[1:]), factor)


def test_missing_libraries_are_named_with_the_reason(monkeypatch):
    errors = [ImportError("no such module"), RuntimeError("no CUDA device\nfound")]
    monkeypatch.setattr(providers, "import_module", Mock(side_effect=errors))
    reasons = {"liger-kernel": "ImportError: no such module", "quack-kernels": "RuntimeError: no CUDA device"}
    assert providers.missing(["ours", "torch", *reasons]) == reasons


def test_libraries_are_asked_only_for_what_they_offer(monkeypatch):
    monkeypatch.setattr(providers, "import_module", Mock())
    for provider, stream, weights, offered in (
        ("liger-kernel", BF16, BF16, {"ln", "rms", "add_rms"}),
        ("liger-kernel", FP32, BF16, {"ln", "rms"}),
        ("quack-kernels", BF16, BF16, {"rms", "add_rms"}),
    ):
        setting = Setting(residual_dtype=stream, weight_dtype=weights)
        assert {name for name, case in CASES.items() if PROVIDERS[provider].make(case, setting) is not None} == offered


def overwriting(inputs):
    """RMSNorm whose backward leaves nothing of dy, which Liger's uses for dx."""
    y = F.rms_norm(inputs.x, inputs.weight.shape, inputs.weight, 1e-5)
    y.register_hook(lambda dy: (dy.clone(), dy.zero_())[0])
    return (y,)


def test_backward_that_overwrites_dy_leaves_the_others_theirs():
    sets = make_inputs(CASES["rms"], Setting(), 16, 128, 2, CPU)
    before = [i.dy.clone() for i in sets]
    entrant = contender("x", overwriting, BACKWARD, sets, lambda inputs, function: None, overwrites_dy=True)
    calls = entrant.build()
    first, second = (calls[1]()[0].clone() for _ in range(2))
    entrant.before()
    assert all(torch.equal(i.dy, dy) for i, dy in zip(sets, before, strict=True))
    assert not torch.equal(first, second) and torch.equal(first, calls[1]()[0])
