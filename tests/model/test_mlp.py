import math

import pytest
import torch

from configs.schema import ModelConfig
from model.mlp import MLP, mlp_width


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({}, 4 * 96),
        ({"activation": "swiglu"}, 256),
        ({"activation": "swiglu", "width": 100}, 320),  # 266.7, rounded up to a multiple of 64
        ({"activation": "swiglu", "width": 768}, 2048),
        ({"mlp_width": 40}, 40),
        ({"mlp_width": 40, "activation": "swiglu"}, 40),
    ],
)
def test_width(options, width):
    cfg = ModelConfig(**{"width": 96} | options)
    assert mlp_width(cfg) == width
    assert MLP(cfg).down.in_features == width


def test_gelu_is_the_tanh_approximation():
    mlp = MLP(ModelConfig(width=16))
    x = torch.randn(3, 16)
    h = mlp.up(x)
    gelu = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    torch.testing.assert_close(mlp(x), mlp.down(gelu))


def test_swiglu_gates_one_half_with_the_other():
    mlp = MLP(ModelConfig(width=16, mlp_width=24, activation="swiglu"))
    x = torch.randn(3, 16)
    gate, value = mlp.up(x)[:, :24], mlp.up(x)[:, 24:]
    torch.testing.assert_close(mlp(x), mlp.down(gate * gate.sigmoid() * value))
