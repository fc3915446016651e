"""The MLP: GELU as in GPT-2, or SwiGLU as in Llama."""

from collections.abc import Callable
from functools import cache
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import Activation, MlpConfig, MlpImpl, ModelConfig
from ops import gated_activation_fn


class MLP(nn.Module):
    """[..., width] -> [..., width], through mlp_width hidden features.

    gelu:    down(gelu(up(x))), with the tanh approximation that GPT-2 was trained with.
    swiglu:  down(silu(gate(x)) · value(x)); gate and value are the two halves of `up`, one matrix product (Shazeer,
             arXiv:2002.05202).
    """

    def __init__(self, cfg: ModelConfig, mlp: MlpConfig | None = None) -> None:
        super().__init__()
        self.activation, self.impl = cfg.activation, (mlp or MlpConfig()).impl
        hidden = mlp_width(cfg)
        self.rows = [hidden] * (2 if cfg.activation == Activation.swiglu else 1)  # of the matrices in up
        self.up = nn.Linear(cfg.width, sum(self.rows), bias=cfg.bias)
        self.down = nn.Linear(hidden, cfg.width, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        match self.activation:
            case Activation.gelu:
                return self.down(F.gelu(hidden, approximate="tanh"))
            case Activation.swiglu:
                return self.down(_SWIGLU[self.impl](hidden))
            case _:
                assert_never(self.activation)


def swiglu(x: Tensor) -> Tensor:
    """[..., 2N] -> [..., N], in PyTorch's own operators, as people write it."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def compiled_swiglu(x: Tensor) -> Tensor:
    return (swiglu if torch.compiler.is_compiling() else _compiled())(x)  # in a model that is compiled whole, it is a part


@cache
def _compiled() -> Callable[[Tensor], Tensor]:
    return torch.compile(swiglu)


_SWIGLU = {
    MlpImpl.fused: lambda x: gated_activation_fn(x, activation="silu"),
    MlpImpl.compiled: compiled_swiglu,
    MlpImpl.torch: swiglu,
}


def mlp_width(cfg: ModelConfig) -> int:
    """model.mlp_width, or its default: SwiGLU has three matrices to GELU's two, so 8/3 keeps the number of parameters."""
    if cfg.mlp_width is not None:
        return cfg.mlp_width
    match cfg.activation:
        case Activation.gelu:
            return 4 * cfg.width
        case Activation.swiglu:
            return -(-8 * cfg.width // (3 * 64)) * 64  # rounded up to a multiple of 64
        case _:
            assert_never(cfg.activation)
