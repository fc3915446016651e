"""Activations of MLPs: values and gradients against fp64, gates side by side or apart, rows as they lie in memory."""

import pytest
import torch
import torch.nn.functional as F

from ops import activation, activation_fn, gated_activation_fn, kit

from .cases import BF16, FP16, FP32, covering

FUNCTIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda z: F.relu(z).square(),
}
ERROR = {FP32: 1e-6, BF16: 2**-7, FP16: 2**-10}


def oracle(name, x, value, bias, value_bias):
    """value "packed": the second half of x; None: no gate."""
    z = x if bias is None else x + bias
    if value is None:
        return FUNCTIONS[name](z)
    if isinstance(value, str):
        z, value = z.chunk(2, -1)
    return FUNCTIONS[name](z) * (value if value_bias is None else value + value_bias)


def check(name, x, value=None, bias=None, value_bias=None):
    given = (x, value, bias, value_bias)
    leaves = [t.detach().requires_grad_() if isinstance(t, torch.Tensor) else t for t in given]
    exact = [t.detach().double().requires_grad_() if isinstance(t, torch.Tensor) else t for t in given]
    if value is None:
        y = activation_fn(leaves[0], leaves[2], name)
    else:
        y = gated_activation_fn(leaves[0], None if isinstance(value, str) else leaves[1], *leaves[2:], activation=name)
    expected = oracle(name, *exact)
    assert y.shape == expected.shape and y.dtype == x.dtype and y.is_contiguous()
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    gradients = torch.autograd.grad(y, [t for t in leaves if isinstance(t, torch.Tensor)], dy)
    exactly = torch.autograd.grad(expected, [t for t in exact if isinstance(t, torch.Tensor)], dy.double())
    for found, right in zip((y, *gradients), (expected, *exactly), strict=True):
        error = (found.double() - right).norm() / right.norm().clamp(min=1e-30)
        assert found.shape == right.shape and error <= ERROR[found.dtype]


CASES = covering(
    name=list(FUNCTIONS), gate=[None, "packed", "apart"], width=[1, 7, 48, 160, 1100], dtype=[FP32, BF16, FP16],
    bias=[None, FP32, BF16], strides=["dense", "columns", "transposed"],
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(device, case):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device)

    def rows(width):
        if case["strides"] == "columns":  # of a wider product
            return draw(3, 5, 2 * width + 8).to(case["dtype"])[..., 8 : 8 + width]
        return (
            draw(3, width, 5).to(case["dtype"]).mT if case["strides"] == "transposed" else draw(3, 5, width).to(case["dtype"])
        )

    n, gate, bias = case["width"], case["gate"], case["bias"]
    wide = 2 * n if gate == "packed" else n
    check(
        case["name"],
        rows(wide),
        rows(n) if gate == "apart" else gate,
        None if bias is None else draw(wide).to(bias),
        draw(n).to(bias) if bias is not None and gate == "apart" else None,
    )


@pytest.mark.parametrize("gated", [False, True])
def test_many_tiles_of_a_program_and_the_same_bits_each_time(device, gated, monkeypatch):
    facts = kit.device_facts(device)._replace(multiprocessors=1)
    monkeypatch.setattr(kit, "device_facts", lambda _: facts)
    monkeypatch.setattr(activation, "PROGRAMS", 1)
    kit.forget()
    x = torch.randn(203, 32, generator=torch.Generator().manual_seed(1)).to(device)
    bias = torch.linspace(-1, 1, 32, device=device)
    check("silu", x, "packed" if gated else None, bias)
    found = []
    for _ in range(2):
        leaf = bias.clone().requires_grad_()
        y = gated_activation_fn(x, bias=leaf) if gated else activation_fn(x, leaf)
        found.append(torch.autograd.grad(y.square().sum(), leaf)[0])
    assert torch.equal(*found)
    kit.forget()


@pytest.mark.parametrize("frozen", ["x", "value", "bias", "value_bias", "x value", "bias value_bias"])
def test_a_gradient_that_nobody_wants_is_not_computed_and_changes_no_other(device, frozen):
    generator = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(5, 24, generator=generator).to(device) for name in ("x", "value")}
    tensors |= {name: torch.randn(24, generator=generator).to(device) for name in ("bias", "value_bias")}
    found = []
    for without in (set(), set(frozen.split())):
        leaves = {name: t.clone().requires_grad_(name not in without) for name, t in tensors.items()}
        gated_activation_fn(**leaves).square().sum().backward()
        found.append({name: t.grad for name, t in leaves.items()})
    for name, gradient in found[1].items():
        assert gradient is None if name in frozen.split() else torch.equal(gradient, found[0][name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_large_numbers_and_nan(device, name):
    x = torch.tensor([[-1e4, -30.0, 0.0, 30.0, 1e4, torch.nan]], device=device)
    leaf = x.clone().requires_grad_()
    y = activation_fn(leaf, None, name)
    (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    wide = x.double().requires_grad_()
    expected = FUNCTIONS[name](wide)
    (right,) = torch.autograd.grad(expected, wide, torch.ones_like(expected))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(dx.double(), right, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_rows_at_several_distances_are_copied_once(device, monkeypatch):
    copies, own = [], torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t: own(t) if t.is_contiguous() else copies.append(t) or own(t))
    x = torch.randn(4, 24, 6, generator=torch.Generator().manual_seed(4)).to(device).mT
    y = activation_fn(x)
    assert len(copies) == 1
    torch.testing.assert_close(y, F.gelu(x, approximate="tanh"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: activation_fn(x, None, ["gelu"]), r"activation is \['gelu'\], accepted: gelu"),
        (lambda x: activation_fn(x, None, "swish"), "activation is 'swish', accepted: gelu, gelu_tanh, silu, relu2"),
        (lambda x: gated_activation_fn(x[:, :7]), "it has an odd 7 columns"),
        (lambda x: gated_activation_fn(x, value_bias=x[0]), "value_bias is for a value of its own"),
        (lambda x: gated_activation_fn(x, x[:1]), r"value has shape \(1, 8\), expected \(2, 8\)"),
        (lambda x: activation_fn(x, x[0, :4]), r"bias has shape \(4,\), expected \(8,\)"),
        (lambda x: activation_fn(x.long()), "x is int64"),
    ],
)
def test_errors_name_the_argument(device, call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(2, 8, device=device))
