"""Activations of gated MLPs: values and gradients against fp64, gates side by side or apart, rows as they lie in memory."""

import pytest
import torch
import torch.nn.functional as F

from ops import gated_activation_fn

from .cases import BF16, FP16, FP32, covering

FUNCTIONS = {"gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"), "silu": F.silu}
ERROR = {FP32: 1e-6, BF16: 2**-7, FP16: 2**-10}


def oracle(name, x, value=None):
    gate, value = x.chunk(2, -1) if value is None else (x, value)
    return FUNCTIONS[name](gate) * value


CASES = covering(
    name=list(FUNCTIONS), value=[None, FP32, BF16], width=[1, 7, 48, 160, 1100], dtype=[FP32, BF16, FP16],
    strides=["dense", "columns", "transposed"],
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(device, case):
    generator = torch.Generator().manual_seed(0)

    def rows(width, dtype):
        def draw(*shape):
            return torch.randn(shape, generator=generator).to(device, dtype)

        if case["strides"] == "columns":  # of a wider product
            return draw(3, 5, 2 * width + 8)[..., 8 : 8 + width]
        return draw(3, width, 5).mT if case["strides"] == "transposed" else draw(3, 5, width)

    name, n, of_value = case["name"], case["width"], case["value"]
    given = (rows(2 * n, case["dtype"]),) if of_value is None else (rows(n, case["dtype"]), rows(n, of_value))
    leaves, exact = ([t.detach().to(dtype).requires_grad_() for t in given] for dtype in (None, torch.float64))
    y, expected = gated_activation_fn(*leaves, activation=name), oracle(name, *exact)
    assert y.shape == expected.shape and y.dtype == case["dtype"] and y.is_contiguous()
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    gradients, exactly = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, exact, dy.double())
    for found, right in zip((y, *gradients), (expected, *exactly), strict=True):
        error = (found.double() - right).norm() / right.norm().clamp(min=1e-30)
        assert found.shape == right.shape and error <= ERROR[found.dtype]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_large_numbers_and_nan(device, name):
    x = torch.tensor([[-1e4, -30.0, 0.0, 30.0, 1e4, torch.nan]], device=device)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    y, expected = gated_activation_fn(leaf, torch.ones_like(x), name), FUNCTIONS[name](wide)
    (dx,), (right,) = (torch.autograd.grad(out, of, torch.ones_like(out)) for out, of in ((y, leaf), (expected, wide)))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(dx.double(), right, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_rows_at_several_distances_are_copied_once(device, copies):
    x = torch.randn(4, 24, 6, generator=torch.Generator().manual_seed(4)).to(device).mT
    y = gated_activation_fn(x)
    assert len(copies) == 1
    torch.testing.assert_close(y, oracle("silu", x))
