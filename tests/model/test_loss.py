"""The loss, and what compiling it saves on a GPU."""

import pytest
import torch

from model.loss import cross_entropy


@pytest.mark.parametrize(
    ("dtype", "error", "gradient_error"),
    [(torch.float64, 1e-14, 1e-14), (torch.float32, 1e-6, 1e-6), (torch.bfloat16, 1e-6, 2**-8)],
)
def test_it_is_the_mean_over_targets_that_count_in_fp32_or_fp64(dtype, error, gradient_error):
    logits = torch.randn(6, 10, dtype=dtype, requires_grad=True)
    targets = torch.tensor([1, -100, 9, 0, -100, 3])
    found = cross_entropy(logits, targets, compiled=False)
    found.backward()
    exact = logits.detach().double().requires_grad_()
    expected = -exact.log_softmax(-1)[targets >= 0, targets[targets >= 0]].mean()
    expected.backward()
    assert found.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), expected, atol=error, rtol=error)
    torch.testing.assert_close(logits.grad, exact.grad.to(dtype), atol=gradient_error / 4, rtol=gradient_error)


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
