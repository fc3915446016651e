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
def test_every_implementation_is_the_mlp_of_its_definition(impl, activation, bias, monkeypatch):
    monkeypatch.setattr(mlps, "_compiled", lambda: mlps.swiglu)  # a machine without a GPU may lack a compiler
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


def test_fused_is_one_call_of_the_operator(monkeypatch):
    calls, own = [], mlps.gated_activation_fn
    monkeypatch.setattr(mlps, "gated_activation_fn", lambda *given, **how: calls.append(impl) or own(*given, **how))
    for impl in (MlpImpl.torch, MlpImpl.fused):
        MLP(ModelConfig(width=16, activation=Activation.swiglu), MlpConfig(impl))(torch.randn(3, 16))
    assert calls == [MlpImpl.fused]


@pytest.mark.gpu
@pytest.mark.parametrize("impl", MlpImpl)
def test_every_implementation_computes_the_same_on_a_gpu(impl):
    torch.manual_seed(0)
    gated = ModelConfig(width=64, activation=Activation.swiglu)
    mlp = MLP(gated, MlpConfig(impl)).cuda()
    x = torch.randn(300, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y = mlp(x)
    exact = MLP(gated, MlpConfig(MlpImpl.torch)).cuda().double()
    exact.load_state_dict(mlp.state_dict())
    expected = exact(x.double())
    assert (y.double() - expected).norm() < 2e-2 * expected.norm()
    found = torch.autograd.grad(y.float().sum(), [*mlp.parameters()])
    right = torch.autograd.grad(expected.sum(), [*exact.parameters()])
    assert all((a.double() - b).norm() < 2e-2 * b.norm() for a, b in zip(found, right, strict=True))
