"""The MLP: every implementation of a gated one computes the same."""

import pytest
import torch
import torch.nn.functional as F

from configs.schema import Activation, MlpConfig, MlpImpl, ModelConfig
from model import mlp as mlps
from model.mlp import MLP


@pytest.mark.parametrize("impl", MlpImpl)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("bias", [True, False])
def test_every_implementation_is_the_mlp_of_its_definition(impl, activation, bias, device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(mlps, "_compiled", lambda: mlps.swiglu)  # a machine without a GPU may lack a compiler
    torch.manual_seed(0)
    mlp = MLP(ModelConfig(width=16, activation=activation, bias=bias), MlpConfig(impl)).to(device)
    x = torch.randn(3, 5, 16, device=device, requires_grad=True)
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


def test_fused_is_one_call_of_the_operator(monkeypatch):
    calls, own = [], mlps.gated_activation_fn
    monkeypatch.setattr(mlps, "gated_activation_fn", lambda *given, **how: calls.append(impl) or own(*given, **how))
    for impl in (MlpImpl.torch, MlpImpl.fused):
        MLP(ModelConfig(width=16, activation=Activation.swiglu), MlpConfig(impl))(torch.randn(3, 16))
    assert calls == [MlpImpl.fused]
