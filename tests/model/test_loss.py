"""The loss: the same for every implementation, and the memory that it takes on a GPU."""

import pytest
import torch

from configs.schema import LossConfig, LossImpl
from model.loss import next_token_loss
from tests.ops.test_cross_entropy import oracle

IMPLS = [LossConfig(LossImpl.torch), LossConfig(LossImpl.fused), LossConfig(LossImpl.fused, chunks=3)]


def exact(hidden, weight, targets, **options):
    return oracle(hidden @ weight.mT, targets, **options).sum() / (targets != -100).sum()


@pytest.mark.parametrize("cfg", IMPLS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2**-5)], ids=["fp64", "fp32", "bf16"]
)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "z_loss": 0.01}], ids=str)
def test_it_is_the_mean_over_targets_that_count(cfg, dtype, error, options):
    torch.manual_seed(0)
    cfg = LossConfig(**vars(cfg) | options)
    leaves = [torch.randn(6, 8, dtype=dtype, requires_grad=True), torch.randn(10, 8, dtype=dtype, requires_grad=True)]
    targets = torch.tensor([1, -100, 9, 0, -100, 3])
    found = next_token_loss(*leaves, targets, cfg, training=True)
    found.backward()
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = exact(*doubles, targets, **options)
    expected.backward()
    assert found.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), expected, atol=error, rtol=error)
    validation = next_token_loss(*leaves, targets, cfg, training=False)  # without z-loss
    torch.testing.assert_close(
        validation.double(), exact(*doubles, targets, softcap=options.get("softcap")), atol=error, rtol=error
    )
    for leaf, double in zip(leaves, doubles, strict=True):
        assert (leaf.grad.double() - double.grad).norm() <= error * double.grad.norm()


@pytest.mark.gpu
def test_a_better_implementation_takes_less_memory():
    hidden = torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(8192, (8192,), device="cuda")
    peaks, gradients = {}, []
    for cfg in (LossConfig(LossImpl.torch), LossConfig(LossImpl.compiled), LossConfig(), LossConfig(chunks=8)):
        for _ in range(2):  # the first compiles
            hidden.grad = weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            next_token_loss(hidden, weight, targets, cfg, training=True).backward()
            peaks[cfg.impl, cfg.chunks] = (torch.cuda.max_memory_allocated() - held) / (2 * 8192 * 8192)
        gradients.append(hidden.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], atol=1e-5, rtol=2e-2)
    found = list(peaks.values())  # times the bytes of the logits
    assert found[0] > 3 and found[1] < 2.2 and found[2] < 1.2 and found[3] < 0.3, peaks
