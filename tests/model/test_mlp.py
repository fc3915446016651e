"""The width of the MLP; what it computes: test_block.py, and against `transformers` tests/training/test_pretrained.py."""

import pytest

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
