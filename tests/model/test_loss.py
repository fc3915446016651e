"""The loss: the same numbers compiled, and what compiling it saves on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from model import loss
from model.loss import cross_entropy


@pytest.fixture
def traced(monkeypatch):
    """torch.compile without generated code, as this machine may have no C++ compiler; what was given to it."""
    original, given = torch.compile, []

    def compile(function, options=None):
        assert options in (None, loss.TWO_PASSES) and (options is None) == isinstance(function, torch.nn.Module)
        given.append(function)
        return original(function, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", compile)
    loss._compiled.cache_clear()
    yield given
    loss._compiled.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_the_mean_over_targets_that_count_in_fp32(traced, dtype, compiled):
    logits = torch.randn(6, 10, dtype=dtype, requires_grad=True)
    targets = torch.tensor([1, -100, 9, 0, -100, 3])
    found = cross_entropy(logits, targets, compiled)
    found.backward()

    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact[targets >= 0], targets[targets >= 0])
    expected.backward()
    assert found.dtype == torch.float32 and len(traced) == compiled
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)
    tolerance = {} if dtype is torch.float32 else {"atol": 1e-3, "rtol": 2**-8}
    torch.testing.assert_close(logits.grad, exact.grad.to(dtype), **tolerance)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_of_fp64_logits_is_fp64_as_parity_of_an_fp32_run_needs_it(traced, compiled):
    logits, targets = torch.randn(6, 10, dtype=torch.float64), torch.tensor([1, 0, 9, 0, 2, 3])
    exact = -logits.log_softmax(-1)[torch.arange(6), targets].mean()
    torch.testing.assert_close(cross_entropy(logits, targets, compiled), exact, atol=0, rtol=1e-14)


def test_a_model_that_is_compiled_whole_has_it_inside(traced, build, batch):
    model = build(layers=1)
    model.compile_loss = True
    torch._dynamo.reset()
    found = torch.compile(model)(*batch)
    assert traced == [model]
    torch.testing.assert_close(found, build(layers=1)(*batch))


@pytest.mark.gpu
def test_compiled_it_makes_no_fp32_copy_of_the_logits():
    logits = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(4096, (8192,), device="cuda")
    peaks, gradients = [], []
    for compiled in (False, True):
        logits.grad = None
        cross_entropy(logits, targets, compiled).backward()  # compiles
        logits.grad = None
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        cross_entropy(logits, targets, compiled).backward()
        peaks.append((torch.cuda.max_memory_allocated() - held) / logits.nbytes)
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients)
    assert peaks[1] < 1.5, f"times the bytes of the logits: {peaks}"  # their gradient, and little else
