"""The MLP: every implementation of its activation computes the same."""

import pytest
import torch
import torch.nn.functional as F

from configs.schema import Activation, MlpConfig, MlpImpl, ModelConfig
from model import mlp as mlps
from model.mlp import MLP


@pytest.mark.parametrize("impl", MlpImpl)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("bias", [True, False])
def test_every_implementation_is_the_mlp_of_its_definition(impl, activation, bias, monkeypatch):
    monkeypatch.setattr(mlps, "_compiled", lambda: mlps.activated)  # a machine without a GPU may lack a compiler
    torch.manual_seed(0)
    mlp = MLP(ModelConfig(width=16, activation=activation, bias=bias), MlpConfig(impl))
    x = torch.randn(3, 5, 16, requires_grad=True)
    y = mlp(x)
    exact = {name: p.detach().double().requires_grad_() for name, p in mlp.named_parameters()}
    wide = x.detach().double().requires_grad_()
    hidden = F.linear(wide, exact["up.weight"], exact.get("up.bias"))
    if activation is Activation.gelu:
        hidden = F.gelu(hidden, approximate="tanh")
    else:
        gate, value = hidden.chunk(2, -1)
        hidden = gate * torch.sigmoid(gate) * value
    expected = F.linear(hidden, exact["down.weight"], exact.get("down.bias"))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])
    right = torch.autograd.grad(expected.square().sum(), [wide, *exact.values()])
    for one, of in zip(found, right, strict=True):
        torch.testing.assert_close(one.double(), of, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", Activation)
def test_fused_is_one_call_of_the_operator(activation, monkeypatch):
    calls = []
    for name in ("activation_fn", "gated_activation_fn"):
        own = getattr(mlps, name)
        monkeypatch.setattr(mlps, name, lambda *given, own=own, name=name, **how: calls.append(name) or own(*given, **how))
    for impl in MlpImpl:
        if impl is not MlpImpl.compiled:
            MLP(ModelConfig(width=16, activation=activation), MlpConfig(impl))(torch.randn(3, 16))
    assert calls == ["activation_fn" if activation is Activation.gelu else "gated_activation_fn"]


@pytest.mark.gpu
@pytest.mark.parametrize("impl", MlpImpl)
@pytest.mark.parametrize("activation", Activation)
def test_every_implementation_computes_the_same_on_a_gpu(impl, activation):
    torch.manual_seed(0)
    mlp = MLP(ModelConfig(width=64, activation=activation), MlpConfig(impl)).cuda()
    x = torch.randn(300, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y = mlp(x)
    exact = MLP(ModelConfig(width=64, activation=activation), MlpConfig(MlpImpl.torch)).cuda().double()
    exact.load_state_dict(mlp.state_dict())
    expected = exact(x.double())
    assert (y.double() - expected).norm() < 2e-2 * expected.norm()
    found = torch.autograd.grad(y.float().sum(), [*mlp.parameters()])
    right = torch.autograd.grad(expected.sum(), [*exact.parameters()])
    assert all((a.double() - b).norm() < 2e-2 * b.norm() for a, b in zip(found, right, strict=True))
